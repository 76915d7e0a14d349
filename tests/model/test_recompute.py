"""Recomputation: the same gradients, every layer counted once, and just what was asked for computed again."""

import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megamoe import registry
from megamoe.model.architectures.decoder import GPT
from megamoe.model.modules import Norm
from megamoe.moe.objective import Objective
from megamoe.moe.observation import Observation
from megamoe.moe.part import StepContext
from megamoe.moe.routing import Routing
from tests.support.moe.build import observed
from tests.support.tiny import VOCABULARY, tiny, tiny_gpt

S = 8
TOKENS = torch.arange(2 * S).view(2, S) * 5 % VOCABULARY
POSITIONS = torch.arange(S).expand(2, S)
# Every kind of random draw, every place of a layer, and a dense block.
RUN = [
    "model.num_layers=4",
    "model.init_std=0.3",
    "model.hidden_dropout=0.2",
    "model.attention_dropout=0.2",
    "moe.layers={at: [1, 4], insert_after: [2]}",
    "moe.num_shared_experts=1",
    "moe.expert_output_dropout=0.2",
    "moe.expert_activation_dropout=0.2",
    "moe.router.scorer.jitter=0.1",
    "moe.router.capacity={name: per_expert, factor: 1.0}",
    "moe.losses={switch_balance: 0.1, z_loss: 0.1}",
]


class Total(Objective):
    """A toy: the mean over tokens of the token's loss times its first choice's score."""

    @dataclass
    class Config:
        weight: float = 0.5

    def forward(self, routing: Routing, context: StepContext, token_losses_T: Tensor) -> Tensor:
        return (routing.scores_TE.max(1).values * token_losses_T).mean()


@pytest.fixture
def with_objective(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setitem(registry._parts["loss"], "total", Total)
    return ["moe.losses={switch_balance: 0.1, total: 0.5}"]


def step(model: GPT) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one forward and backward pass as the training step has them."""
    torch.manual_seed(3)
    losses_BS = model(TOKENS, POSITIONS, TOKENS.roll(1))
    loss = losses_BS.sum()
    for _, layer in model.moe_layers():
        if layer.losses.objectives:
            loss = loss + layer.objective(losses_BS.transpose(0, 1).reshape(-1))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def made(recompute: str, *overrides: str) -> GPT:
    context = StepContext(seed=3, step=7, aux_scale=0.5)
    return tiny_gpt(tiny(*RUN, *overrides, f"model.recompute={recompute}"), context)


@functools.cache
def plain_step(*overrides: str) -> tuple[Tensor, dict[str, Tensor], list[Observation], int]:
    """Loss, gradients, what the layers observed and `kept_bytes` without recomputation, worked out once."""
    model = made("none", *overrides)
    return *step(model), [observed(layer) for _, layer in model.moe_layers()], kept_bytes(model)


def assert_same(model: GPT, *overrides: str) -> None:
    """See that a step is that of `plain_step`."""
    right_loss, right, observations, _ = plain_step(*overrides)
    loss, gradients = step(model)
    assert torch.equal(loss, right_loss)
    assert gradients.keys() == right.keys() and len(gradients) > 30
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, right[name], rtol=1e-5, atol=1e-6, msg=name)
    for (_, layer), expected in zip(model.moe_layers(), observations, strict=True):
        assert torch.equal(observed(layer).load_E, expected.load_E)
        assert observed(layer).losses == expected.losses
        assert layer.routing is None and not layer.recomputing


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("sublayers", [1, 2])
def test_gradients_are_the_same(one_rank: None, recompute: str, sublayers: int) -> None:
    overrides = (f"moe.expert_sublayers={sublayers}",)
    assert_same(made(recompute, *overrides), *overrides)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_an_objectives_gradient_and_value_are_the_same(
    one_rank: None, recompute: str, with_objective: list[str]
) -> None:
    model = made(recompute, *with_objective)
    assert_same(model, *with_objective)
    for _, layer in model.moe_layers():
        assert layer.observation is not None and layer.observation.losses["total"].abs() > 0


@pytest.mark.parametrize(
    ("recompute", "expected"),
    [
        ("none", {"attention": 4, "experts": 3, "dense": 2}),
        ("selective", {"attention": 4, "experts": 6, "dense": 2}),
        ("full", {"attention": 8, "experts": 6, "dense": 4}),
    ],
)
def test_what_is_computed_again(one_rank: None, recompute: str, expected: dict[str, int]) -> None:
    model, calls = made(recompute), Counter[str]()

    def count(kind: str) -> Any:
        return lambda *_: calls.update([kind])

    for name, module in model.named_modules():
        kinds = {"self_attention": "attention", "experts": "experts", "linear_fc1": "dense"}
        kind = kinds.get(name.rsplit(".", 1)[-1])
        if kind is not None:
            module.register_forward_pre_hook(count(kind))
    step(model)
    assert dict(calls) == expected


LATENT = [
    "model.latent={query_rank: 12, key_value_rank: 10, nope_size: 6, rope_size: 4, value_size: 8}",
    "model.position=rope",
]
LISTS = ["norms", "core_attention", "experts_activation", "shared_experts", "moe", "moe_layer", "block"]
TOGETHER = "norms, core_attention, experts_activation, shared_experts"


class Alive(TorchDispatchMode):
    """Knows the memory of all tensors that operators made inside."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves(output):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return output

    def bytes(self) -> int:
        return sum(size for each, size in self._made.values() if not each.expired())


def kept_bytes(model: GPT) -> int:
    """Return the memory that the graph of a forward pass holds."""
    with Alive() as alive:
        losses_BS = model(TOKENS, POSITIONS, TOKENS.roll(1))
    for _, layer in model.moe_layers():
        layer.context.batch.traces.clear()
    held = alive.bytes()
    assert losses_BS.requires_grad
    return held


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_less_is_kept(one_rank: None, recompute: str) -> None:
    assert kept_bytes(made(recompute)) < 0.8 * plain_step()[-1]


@pytest.mark.parametrize("names", [*LISTS, TOGETHER])
def test_a_list_of_modules(one_rank: None, names: str) -> None:
    model = made(f"[{names}]", "model.bias=true")
    assert_same(model, "model.bias=true")
    assert kept_bytes(model) < plain_step("model.bias=true")[-1]


@pytest.mark.parametrize("names", ["latent_up", "latent_up, core_attention", f"latent_up, {TOGETHER}"])
@pytest.mark.parametrize("ranks", ["12", pytest.param("null", marks=pytest.mark.full)])
def test_latent_attention_keeps_its_compressed_states(one_rank: None, names: str, ranks: str) -> None:
    latent = [each.replace("query_rank: 12", f"query_rank: {ranks}") for each in LATENT]
    model = made(f"[{names}]", *latent)
    assert_same(model, *latent)
    assert kept_bytes(model) < plain_step(*latent)[-1]


def test_one_after_the_other_is_less_and_less(one_rank: None) -> None:
    """Each further module takes more away; a norm is dropped although the shared experts keep their input."""
    names = ["norms", "shared_experts", "experts_activation", "moe"]
    lists = [
        "none",
        *(f"[{', '.join(names[:count])}]" for count in (1, 2, 3)),
        "[norms, shared_experts, moe]",
    ]
    held = [kept_bytes(made(each, "moe.expert_bias=true")) for each in lists]
    assert held == sorted(held, reverse=True) and len(set(held)) == len(held)


@pytest.mark.parametrize("recompute", [f"[{TOGETHER}]", "[moe]"])
def test_dropped_values_are_freed_and_computed_once(
    one_rank: None, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    given = Norm._normed

    def counted(self: Norm, hidden: Tensor) -> Tensor:
        calls["grad" if torch.is_grad_enabled() else "again"] += 1
        return given(self, hidden)

    monkeypatch.setattr(Norm, "_normed", counted)
    step(made(recompute))
    in_blocks = calls["grad"] - 1  # the final norm lies in no block
    assert calls["again"] == (in_blocks if "norms" in recompute else 0)


@pytest.mark.parametrize("recompute", ["selective", "full", f"[{TOGETHER}]", "[moe, norms]"])
def test_evaluation_and_a_second_backward_pass(one_rank: None, recompute: str) -> None:
    model, plain = made(recompute).eval(), made("none").eval()
    with torch.no_grad():
        assert torch.equal(model.whole_logits(TOKENS, POSITIONS), plain.whole_logits(TOKENS, POSITIONS))
    loss = model.whole_logits(TOKENS, POSITIONS).square().sum()
    weight = model.model.embedding.word_embeddings.weight
    first, second = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
