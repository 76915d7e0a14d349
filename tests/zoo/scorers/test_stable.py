"""The two phases of `stable`: who chooses, who learns, and that frozen means frozen."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.errors import UserError
from megamoe.moe.part import Dims, StepContext
from megamoe.moe.router import Router
from megamoe.moe.routing import Routing
from megamoe.zoo.scorers.stable import StableScorer
from tests.support.moe.build import HIDDEN, gradient_of, make_context, make_hidden, make_part, moe_config

VOCABULARY = 12
EXPERTS = 4
IDS = torch.arange(36) % VOCABULARY
TREE: dict[str, Any] = {
    "num_experts": EXPERTS,
    "router": {
        "scorer": {"name": "stable", "phase_1_steps": 3, "routing_dim": 5},
        "score_function": "sigmoid",
        "selector": {"name": "top_k", "k": 1, "weights": "raw"},
    },
    "losses": {"stable_balance": 0.3, "stable_distillation": 1.0},
}


def make_router(seed: int = 1, **router: Any) -> Router:
    config = moe_config(**{**TREE, "router": {**TREE["router"], **router}})
    return Router(config.router, Dims(HIDDEN, EXPERTS, init_std=0.4, seed=seed, vocab_size=VOCABULARY))


def reported(step: int = 1, ids_T: Tensor = IDS) -> StepContext:
    return make_context(step=step, token_ids_T=ids_T)


def end_step(router: Router, step: int) -> None:
    with torch.no_grad():
        router.scorer.after_step(torch.zeros(EXPERTS, dtype=torch.int64), reported(step))


def in_phase_2(seed: int = 1, **router: Any) -> Router:
    made = make_router(seed, **router)
    end_step(made, 3)
    return made


def scorer_of(router: Router) -> StableScorer:
    assert isinstance(router.scorer, StableScorer)
    return router.scorer


def light_VE(scorer: StableScorer) -> Tensor:
    """Return the light router's scores of each token id, in fp64."""
    return (scorer.light_embedding.double() @ scorer.light_centroids.double().T).detach()


def test_phase_1_chooses_by_the_centroids() -> None:
    router, hidden_TH = make_router(), make_hidden(36)
    routing = router(hidden_TH, reported())
    plain_TE = hidden_TH.double() @ scorer_of(router).centroids.double().T
    torch.testing.assert_close(routing.scores_TE.double(), plain_TE, rtol=1e-5, atol=1e-5)
    assert torch.equal(routing.pairs.expert_N, plain_TE.argmax(1))
    weight_T = 1 / (1 + (-plain_TE.max(1).values).exp())
    torch.testing.assert_close(routing.pairs.weight_N.double(), weight_T, rtol=1e-5, atol=1e-5)
    assert routing.extras["phase_1"].item() == 1
    assert not torch.equal(routing.pairs.expert_N, light_VE(scorer_of(router))[IDS].argmax(1))


@pytest.mark.parametrize("training", [True, False])
def test_phase_2_chooses_by_the_words_alone_and_weighs_by_the_centroids(training: bool) -> None:
    router = in_phase_2().train(training)
    choice_T = light_VE(scorer_of(router))[IDS].argmax(1)
    assert len(choice_T.unique()) > 2
    for seed in (2, 3):
        hidden_TH = make_hidden(36, seed)
        routing = router(hidden_TH, reported())
        assert torch.equal(routing.pairs.expert_N, choice_T)
        plain_TE = hidden_TH.double() @ scorer_of(router).centroids.double().T
        weight_T = 1 / (1 + (-plain_TE.gather(1, choice_T[:, None])[:, 0]).exp())
        torch.testing.assert_close(routing.pairs.weight_N.double(), weight_T, rtol=1e-5, atol=1e-5)
        assert routing.extras["phase_1"].item() == 0


def test_phase_1_ends_after_its_last_step() -> None:
    router = make_router()
    for step in (1, 2):
        end_step(router, step)
        assert router(make_hidden(36), reported()).extras["phase_1"].item() == 1
    end_step(router, 3)
    assert router(make_hidden(36), reported()).extras["phase_1"].item() == 0
    # A run that goes on with fewer steps of phase 1 than it has made is in phase 2 after its next.
    late = make_router()
    end_step(late, 7)
    assert late(make_hidden(36), reported()).extras["phase_1"].item() == 0


def loss_of(router: Router, routing: Routing, *names: str) -> Tensor:
    losses = [make_part("loss", name)(routing, reported()) for name in names]
    return torch.stack([routing.pairs.weight_N.sum() / 36, *losses]).sum()


def test_frozen_is_exact_under_momentum_and_weight_decay() -> None:
    router = make_router()
    optimizer = torch.optim.AdamW(router.parameters(), lr=0.1, weight_decay=0.1)
    choices: list[Tensor] = []
    rankings: list[Tensor] = []
    for step in range(1, 8):
        optimizer.zero_grad()
        routing = router(make_hidden(36), reported(step))
        loss_of(router, routing, "stable_balance", "stable_distillation").backward()
        before_EH = scorer_of(router).centroids.detach().clone()
        light_VD = scorer_of(router).light_embedding.detach().clone()
        optimizer.step()
        assert not torch.equal(scorer_of(router).centroids, before_EH)  # in both phases
        assert not torch.equal(scorer_of(router).light_embedding, light_VD)  # what the buffers are for
        end_step(router, step)
        if step >= 3:
            after = router.eval()(make_hidden(36, seed=step), reported(step))
            choices.append(after.pairs.expert_N)
            rankings.append(after.ranking_TE)
            router.train()
    assert all(torch.equal(choice, choices[0]) for choice in choices)
    assert all(torch.equal(ranking, rankings[0]) for ranking in rankings)


def test_the_light_router_learns_from_the_distillation_alone_and_nobody_else_does() -> None:
    def learned(loss: str) -> dict[str, bool]:
        router = make_router()
        routing = router(make_hidden(36).requires_grad_(), reported())
        values = {
            "weights": routing.pairs.weight_N.sum(),
            "balance": make_part("loss", "stable_balance")(routing, reported()),
            "distillation": make_part("loss", "stable_distillation")(routing, reported()),
        }
        values[loss].backward()
        return {n: p.grad is not None and bool(p.grad.any()) for n, p in router.scorer.named_parameters()}

    centroids = {"centroids": True, "light_embedding": False, "light_centroids": False}
    assert learned("weights") == learned("balance") == centroids
    assert learned("distillation") == {name: not known for name, known in centroids.items()}


def test_phase_2_teaches_the_centroids_alone() -> None:
    router = in_phase_2()
    routing = router(make_hidden(36), reported())
    losses = [
        make_part("loss", name)(routing, reported()) for name in ("stable_balance", "stable_distillation")
    ]
    assert [loss.item() for loss in losses] == [0, 0]
    loss_of(router, routing, "stable_balance", "stable_distillation").backward()
    scorer = scorer_of(router)
    assert gradient_of(scorer.centroids).any()
    assert not gradient_of(scorer.light_embedding).any()
    assert not gradient_of(scorer.light_centroids).any()


def test_the_light_router_learns_what_the_words_decide() -> None:
    """If a token id determines the hidden state, phase 2 starts with the choices of phase 1."""
    router = make_router()
    hidden_TH = make_hidden(VOCABULARY)[IDS]
    light = [scorer_of(router).light_embedding, scorer_of(router).light_centroids]
    optimizer = torch.optim.Adam(light, lr=0.1)
    for _ in range(40):
        optimizer.zero_grad()
        make_part("loss", "stable_distillation")(router(hidden_TH, reported()), reported()).backward()
        optimizer.step()
    first = router(hidden_TH, reported()).pairs.expert_N
    end_step(router, 3)
    assert len(first.unique()) > 2
    assert torch.equal(router(make_hidden(36, seed=8), reported()).pairs.expert_N, first)


def test_the_phase_survives_a_checkpoint() -> None:
    router, other = in_phase_2(), make_router(seed=5)
    other.load_state_dict(router.state_dict())
    torch.nn.init.zeros_(scorer_of(other).light_embedding)
    found, expected = (r.eval()(make_hidden(36), reported()) for r in (other, router))
    assert torch.equal(found.pairs.expert_N, expected.pairs.expert_N)
    assert found.extras["phase_1"].item() == 0


def test_masks_hold_in_phase_2() -> None:
    router = in_phase_2()
    candidates_TE = torch.ones(36, EXPERTS, dtype=torch.bool)
    candidates_TE[torch.arange(36), light_VE(scorer_of(router))[IDS].argmax(1)] = False

    class Without(torch.nn.Module):
        step_wide = False

        def forward(self, *_: object) -> Tensor:
            return candidates_TE

        def keeps_tokens_local(self, _: object) -> bool:
            return False

    router.masks.append(Without())
    second_T = light_VE(scorer_of(router))[IDS].argsort(1, descending=True)[:, 1]
    assert torch.equal(router(make_hidden(36), reported()).pairs.expert_N, second_T)


def test_sizes_and_start() -> None:
    scorer = make_part("scorer", "stable", dims={"vocab_size": 1000})
    assert scorer.light_embedding.shape == (1000, 50) and scorer.light_centroids.shape == (4, 50)
    assert scorer.light_embedding.std().item() == pytest.approx(1, abs=0.02)


def test_without_token_ids_it_is_refused() -> None:
    with pytest.raises(UserError, match="knows no vocabulary"):
        make_part("scorer", "stable")
    scorer = make_part("scorer", "stable", dims={"vocab_size": VOCABULARY})
    with pytest.raises(UserError, match="layers got none"):
        scorer(make_hidden(3), StepContext())
