"""A training step whose objective has every sequence routed several times."""

import pytest
import torch
from torch import Tensor

from megamoe.config import RunConfig
from megamoe.model.architectures.decoder import GPT
from megamoe.moe.part import StepContext
from megamoe.moe.routing import Routing
from megamoe.train.micro_batch import micro_batch_of
from megamoe.train.step import evaluate, model_inputs, num_rollouts, train_step
from tests.support.tiny import tiny, tiny_gpt
from tests.train.test_step import BATCHES, engine_of

POLICY = ("moe.router.scorer=policy", "moe.router.selector={name: sample, k: 2}")
ROLLOUTS = 3
WEIGHT = 0.5


def config_of(weight: float = WEIGHT, *overrides: str) -> RunConfig:
    return tiny(*POLICY, f"moe.losses={{grpo: {{weight: {weight}, rollouts: {ROLLOUTS}}}}}", *overrides)


def plain_grpo(routing: Routing, losses_GbS: Tensor) -> Tensor:
    """The objective on policy, where the reference is the policy: its value is 0, its gradient is not."""
    num_tokens = losses_GbS.numel()
    assert routing.num_tokens == num_tokens
    reward_GbS = -losses_GbS.double()
    advantage_GbS = (reward_GbS - reward_GbS.mean(0)) / (reward_GbS.std(0, correction=0) + 1e-4)
    expert_TK = routing.wanted.expert_N.reshape(num_tokens, 2)
    probs_TE = routing.scores_TE.softmax(1)
    first_T, second_T = probs_TE.gather(1, expert_TK).unbind(1)
    log_T = (first_T * second_T / (1 - first_T)).log()
    ratio_T = (log_T - log_T.detach()).exp()
    # Tokens of a block stand position by position, then rollout by rollout.
    return -(ratio_T * advantage_GbS.permute(2, 0, 1).reshape(-1)).sum() / num_tokens


def reference_gradients(config: RunConfig) -> tuple[GPT, float]:
    """The step's gradients in plain PyTorch: (model that holds them, lm loss)."""
    context = StepContext(seed=4, step=1)
    model = tiny_gpt(config, context).train()
    routings: list[Routing] = []
    for _, layer in model.moe_layers():
        layer.router.register_forward_hook(lambda *call: routings.append(call[-1]))
    tokens = sum(float(batch.loss_mask_BS.sum()) for batch in BATCHES)
    lm_loss = 0.0
    for number, batch in enumerate(BATCHES):
        routings.clear()
        repeated = batch.repeat(ROLLOUTS)
        context.batch = micro_batch_of(repeated, number, ROLLOUTS)
        masked_BS = model(**model_inputs(repeated)) * repeated.loss_mask_BS
        loss = masked_BS.sum() / ROLLOUTS / tokens
        lm_loss += float(loss.detach())
        for routing in routings:
            value = plain_grpo(routing, masked_BS.detach().reshape(ROLLOUTS, 2, 8))
            loss = loss + WEIGHT * value / len(BATCHES)
        loss.backward()
    return model, lm_loss


def test_step_is_that_of_the_plain_formula(one_rank: None) -> None:
    """AdamW's first step shows each gradient: with an eps of 1 it moves a weight by g / (|g| + 1)."""
    config = config_of(WEIGHT, "optimizer.eps=1.0", "optimizer.grad_clip=0.0", "optimizer.weight_decay=0.0")
    expected, lm_loss = reference_gradients(config)
    engine, context = engine_of(config, seed=4, step=1)
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    record = train_step(engine, context, BATCHES, lr=1.0, label_smoothing=0.0)
    assert record.lm_loss == pytest.approx(lm_loss, rel=1e-5)
    assert record.tokens == 15  # not once for each rollout
    assert record.losses["grpo"] == pytest.approx(0, abs=1e-5)
    for name, parameter in engine.model.named_parameters():
        gradient = expected.get_parameter(name).grad
        assert gradient is not None, name
        update = before[name] - parameter.detach()
        torch.testing.assert_close(update, gradient / (gradient.abs() + 1), rtol=1e-3, atol=1e-6, msg=name)


def test_every_rollout_draws_its_own_experts_and_is_computed(one_rank: None) -> None:
    engine, context = engine_of(config_of(), seed=4, step=1)
    model = engine.model
    assert isinstance(model, GPT) and num_rollouts(model) == ROLLOUTS
    drawn: list[Tensor] = []
    for _, layer in model.moe_layers():
        layer.router.register_forward_hook(lambda *call: drawn.append(call[-1].wanted.expert_N))
    record = train_step(engine, context, BATCHES, lr=0.0, label_smoothing=0.0)
    assert [int(layer.load_E.sum()) for layer in record.layers.values()] == [2 * 16 * ROLLOUTS * 2] * 2
    choice_SGbK = drawn[0].reshape(8, ROLLOUTS, 2, 2)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (choice_SGbK[:, one] != choice_SGbK[:, other]).float().mean() > 0.3


def test_the_objective_moves_the_policy_and_nothing_waits_for_it_after(one_rank: None) -> None:
    moved = []
    for weight in (0.0, WEIGHT):
        engine, context = engine_of(config_of(weight), seed=4, step=1)
        train_step(engine, context, BATCHES, lr=0.01, label_smoothing=0.0)
        model = engine.model
        assert isinstance(model, GPT)
        assert all(layer.routing is None for _, layer in model.moe_layers())
        weights = [layer.get_parameter("router.scorer.weight") for _, layer in model.moe_layers()]
        moved.append([weight.detach().clone() for weight in weights])
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(*moved, strict=True))


def test_evaluation_routes_once_and_draws_nothing(one_rank: None) -> None:
    engine, context = engine_of(config_of(), seed=4, step=1)
    model = engine.model
    assert isinstance(model, GPT)
    train_step(engine, context, BATCHES, lr=0.0, label_smoothing=0.0)
    drawn: list[Routing] = []
    for _, layer in model.moe_layers():
        layer.router.register_forward_hook(lambda *call: drawn.append(call[-1]))
    first = evaluate(engine, context, BATCHES)
    context.step += 1
    assert evaluate(engine, context, BATCHES) == first
    for routing in drawn:
        assert routing.num_tokens == 16
        assert torch.equal(routing.wanted.expert_N, routing.scores_TE.topk(2).indices.reshape(-1))
