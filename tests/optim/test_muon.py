"""Muon on one rank, at every ZeRO stage: against a plain Muon, and torch.optim.Muon."""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megamoe.config.schema import MuonConfig
from megamoe.errors import UserError
from megamoe.optim.matrices import TABLES, Matrix, matrices_of, orthogonalise, step_rows
from megamoe.optim.muon import MOMENTUM, Directions, PartitionedMuon, Piece
from megamoe.optim.optimizers import parameter_groups
from megamoe.parallel.chunks import Sharding
from megamoe.parallel.layout import Layout
from megamoe.parallel.zero.deepspeed_config import ParallelPlan
from megamoe.parallel.zero.matrix_exchange import MatrixExchange, SplitWeight
from megamoe.validation.deepspeed import deepspeed_problems
from tests.optim.test_kinds import LR, OPTIONS, loss_of, losses_of, stepped
from tests.support.ranks.runs import ds_config
from tests.support.tiny import tiny, tiny_engine, tiny_gpt

CLIP, STEPS, DECAY = 0.05, 10, 0.5  # as in OPTIONS
SYSTEMS = {
    "gated": (
        "model.activation=swiglu",
        "moe.layers.every=2",
        "moe.num_shared_experts=1",
        "model.num_query_groups=1",
    ),
    "plain": ("model.activation=gelu", "model.bias=true", "model.tie_embeddings=false"),
}
VARIANTS: dict[str, tuple[str, ...]] = {
    "moonlight": (),
    "spectral": (
        "optimizer.muon.update_scale=spectral",
        "optimizer.muon.nesterov=false",
        "optimizer.muon.lr_scale=0.2",
    ),
    "polar_express": ("optimizer.muon.coefficients=polar_express", "optimizer.muon.steps=4"),
}
ADAMW_WORDS = ("embedding", "output_layer", "router", "losses", "norm", "bias")


def plain_orthogonal(matrix: Tensor, rows: list[tuple[float, float, float]]) -> Tensor:
    """In fp64, from the singular values: what the steps make of U S V^T."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / matrix.double().norm().clamp(min=1e-7)
    for a, b, c in rows:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ v


def split_by_hand(name: str, weight: Tensor, gated: bool, heads: int, groups: int) -> Iterator[Tensor]:
    """Yield views of the matrices in a weight."""
    if weight.dim() == 3:
        for expert in weight:
            yield from expert.chunk(2) if gated and name.endswith("up") else (expert,)
    elif name.endswith("qkv.weight"):
        size = weight.shape[0] // (heads + 2 * groups)
        by_group = weight.view(groups, heads // groups + 2, size, -1)
        yield by_group[:, :-2].reshape(-1, weight.shape[1])
        yield by_group[:, -2].reshape(-1, weight.shape[1])
        yield by_group[:, -1].reshape(-1, weight.shape[1])
    else:
        is_first = name.endswith(("fc1.weight", "shared.up"))
        yield from weight.chunk(2) if gated and is_first else (weight,)


def joined_by_hand(
    name: str, like: Tensor, parts: list[Tensor], gated: bool, heads: int, groups: int
) -> Tensor:
    if like.dim() == 3:
        each = 2 if gated and name.endswith("up") else 1
        return torch.stack([torch.cat(parts[i : i + each]) for i in range(0, len(parts), each)])
    if name.endswith("qkv.weight"):
        size = like.shape[0] // (heads + 2 * groups)
        columns = like.shape[1]
        queries, keys, values = (part.view(groups, -1, size, columns) for part in parts)
        return torch.cat([queries, keys, values], dim=1).reshape(-1, columns)
    return torch.cat(parts)


class PlainMuon:
    """Muon and AdamW written out, weight by weight."""

    def __init__(self, model: nn.Module, config: Any, orthogonal: Callable[[Tensor], Tensor]) -> None:
        self.weights = dict(model.named_parameters())
        self.options: MuonConfig = config.optimizer.muon
        self.gated = config.model.activation == "swiglu"
        self.heads = config.model.num_attention_heads
        self.groups = config.model.num_query_groups or self.heads
        self.orthogonal = orthogonal
        self.means = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.squares = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.count = 0

    @torch.no_grad()
    def step(self) -> None:
        self.count += 1
        for name, weight in self.weights.items():
            gradient, mean = weight.grad, self.means[name]
            assert gradient is not None
            if any(word in name for word in ADAMW_WORDS):
                square = self.squares[name]
                mean.mul_(0.9).add_(gradient, alpha=0.1)
                square.mul_(0.95).add_(gradient**2, alpha=0.05)
                matrix = weight.dim() >= 2 and "bias" not in name
                weight.mul_(1 - LR * (DECAY if matrix else 0))
                size = (square / (1 - 0.95**self.count)).sqrt() + 0.001
                weight.sub_(LR * mean / (1 - 0.9**self.count) / size)
                continue
            m = self.options.momentum
            mean.mul_(m).add_(gradient, alpha=1 - m)
            direction = m * mean + (1 - m) * gradient if self.options.nesterov else mean
            facts = self.gated, self.heads, self.groups
            parts = []
            for part in split_by_hand(name, direction, *facts):
                rows, columns = part.shape
                scale = 0.2 * math.sqrt(max(rows, columns))
                if self.options.update_scale == "spectral":
                    scale = math.sqrt(max(1, rows / columns))
                parts.append(scale * self.orthogonal(part).float())
            lr = LR * self.options.lr_scale
            weight.mul_(1 - lr * DECAY).sub_(lr * joined_by_hand(name, weight, parts, *facts))


def plain_weights(*overrides: str) -> dict[str, Tensor]:
    config = tiny(*OPTIONS, "optimizer.name=muon", *overrides)
    model = tiny_gpt(config).train()
    rows = step_rows(config.optimizer.muon)
    optimizer = PlainMuon(model, config, lambda part: plain_orthogonal(part, rows))
    for step in range(STEPS):
        model.zero_grad()
        losses_of(model, step).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        assert norm > CLIP
        optimizer.step()
    return {name: weight.detach() for name, weight in model.named_parameters()}


def our_weights(stage: int, *overrides: str) -> dict[str, Tensor]:
    return stepped(stage, "optimizer.name=muon", *overrides, steps=STEPS)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize(
    "system", [pytest.param(name, marks=() if name == "plain" else pytest.mark.full) for name in SYSTEMS]
)
def test_ten_steps_are_those_of_a_plain_muon(one_rank: None, system: str) -> None:
    expected = plain_weights(*SYSTEMS[system])
    for stage in (0, 1, 2, 3):
        assert_close(our_weights(stage, *SYSTEMS[system]), expected)


@pytest.mark.parametrize("variant", ["spectral", "polar_express"])
def test_the_options_are_those_of_a_plain_muon(one_rank: None, variant: str) -> None:
    overrides = (*SYSTEMS["gated"], *VARIANTS[variant])
    # The first step of Polar Express takes a small singular value, and its rounding to fp32, 8.3 times.
    atol = 3e-6 if variant == "polar_express" else 1e-6
    assert_close(our_weights(0, *overrides), plain_weights(*overrides), atol)


def test_a_matrix_moves_as_in_torch_optim_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's takes its steps in bf16, whatever the weights are; here in fp32, to compare them closely."""
    plain_to = Tensor.to

    def to(tensor: Tensor, *args: Any, **options: Any) -> Tensor:  # torch 2.15; before it, `bfloat16`
        is_step = options.get("dtype") is torch.bfloat16
        return tensor.clone() if is_step else plain_to(tensor, *args, **options)

    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(Tensor, "bfloat16", lambda tensor: tensor.clone())
    for shape, scale in (((12, 20), "moonlight"), ((20, 12), "spectral")):
        start = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        name = {"moonlight": "match_rms_adamw", "spectral": "original"}[scale]
        reference = torch.optim.Muon([theirs], lr=LR, weight_decay=DECAY, adjust_lr_fn=name)
        config = MuonConfig(update_scale=scale)  # type: ignore[arg-type]
        group = {"params": [ours], "muon": True, "weight_decay": DECAY}
        optimizer = PartitionedMuon([group], config, lr=LR)
        optimizer.muon.solver = AlwaysAlone(ours, config)
        for step in range(STEPS):
            gradient = torch.randn(shape, generator=torch.Generator().manual_seed(10 + step))
            ours.grad, theirs.grad = gradient.clone(), gradient.clone()
            optimizer.step()
            reference.step()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
        assert not torch.allclose(ours, start, atol=1e-3)


class AlwaysAlone:
    """A solver of one matrix in one tensor."""

    def __init__(self, weight: Tensor, config: MuonConfig) -> None:
        self.tensors, self.rows = {weight: None}, step_rows(config)

    def solve(self, directions: Directions) -> Iterator[tuple[Piece, Tensor]]:
        ((weight, direction),) = directions.items()
        rows, columns = direction.shape
        piece = Piece(weight, 0, (rows, columns), columns, (rows, columns))
        wide = direction if rows <= columns else direction.mT
        found = orthogonalise(wide[None], self.rows)[0]
        yield piece, found if rows <= columns else found.mT


@pytest.mark.parametrize(("table", "steps", "error"), [("jordan", 5, 0.35), ("polar_express", 8, 1e-3)])
def test_singular_values_come_near_one(table: str, steps: int, error: float) -> None:
    """Jordan's steps end between 0.7 and 1.2 (his figure); those of Polar Express converge."""
    values = torch.logspace(-2, 0, 16)
    left = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))[0]
    right = torch.linalg.qr(torch.randn(24, 24, generator=torch.Generator().manual_seed(1)))[0][:16]
    config = MuonConfig(coefficients=table, steps=steps)  # type: ignore[arg-type]
    found = orthogonalise((left * values @ right)[None], step_rows(config))[0]
    assert float((torch.linalg.svdvals(found) - 1).abs().max()) < error
    assert not orthogonalise(torch.zeros(1, 2, 3), step_rows(config)).any()


def test_the_last_row_of_a_table_repeats() -> None:
    own = MuonConfig(coefficients=[[3.0, -3.0, 1.0], [1.5, -0.5, 0.0]], steps=4)
    assert step_rows(own) == [(3.0, -3.0, 1.0), *[(1.5, -0.5, 0.0)] * 3]
    assert step_rows(MuonConfig()) == [TABLES["jordan"][0]] * 5


def test_queries_keys_and_values_are_found_in_their_groups() -> None:
    """Two groups of three heads of two rows: q q q k v."""
    queries, keys, values = matrices_of(20, 7, 2, (3, 1, 1))
    assert [list(each) for each in queries.ranges] == [[*range(6)], [*range(10, 16)]]
    assert [list(each) for each in keys.ranges] == [[6, 7], [16, 17]]
    assert [list(each) for each in values.ranges] == [[8, 9], [18, 19]]
    assert queries.sizes == (7, 12) and keys.rows == 4


def test_groups_choose_the_algorithm(one_rank: None) -> None:
    groups = (
        "optimizer.groups=[{pattern: 'experts', algorithm: adamw}, "
        "{pattern: 'router', algorithm: muon, lr_scale: 3}, {pattern: 'shared', lr_scale: 2}]"
    )
    config = tiny("optimizer.name=muon", "optimizer.muon.lr_scale=0.5", groups, "moe.num_shared_experts=1")
    model = tiny_gpt(config)
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {
        names[parameter]: (group.get("muon", False), group["lr_scale"])
        for group in parameter_groups(model, config.optimizer)
        for parameter in group["params"]
    }
    for name, facts in found.items():
        matrix = name.endswith(("linear_qkv.weight", "linear_proj.weight", "fc1.weight", "fc2.weight"))
        expected = (matrix, 0.5 if matrix else 1.0)
        if "experts" in name:
            expected = (False, 1.0)
        elif "router" in name:
            expected = (True, 1.5)
        elif "shared" in name:
            expected = (True, 1.0)
        assert facts == expected, name


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ("optimizer.groups=[{pattern: layernorm, algorithm: muon}]",),
            r"optimizer\.groups: 'layernorm' with algorithm: muon matches .*, which is no matrix; narrow .*",
        ),
        (
            ("moe.expert_ffn_hidden_size=1",),
            r"optimizer\.name: muon: .*experts\.\w+ is a matrix of (1 x 16|16 x 1), expected at least 2 .*",
        ),
    ],
)
def test_what_is_no_matrix_is_refused(one_rank: None, overrides: tuple[str, ...], line: str) -> None:
    config = tiny("optimizer.name=muon", *overrides)
    with pytest.raises(UserError) as refused:
        tiny_engine(config)
    assert re.fullmatch(line, str(refused.value)), str(refused.value)


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, "offload_optimizer.device is 'cpu', but"),
        ({"stage": 1, "round_robin_gradients": True}, "round_robin_gradients is true, with which"),
    ],
)
def test_what_hides_a_matrix_is_refused(section: dict[str, Any], line: str) -> None:
    for name, found in (("muon", True), ("adamw", False)):
        config = tiny("parallel.deepspeed=ds.json", f"optimizer.name={name}")
        plan = ParallelPlan.of(config, 1, {"zero_optimization": section})
        problems = [str(problem) for problem in deepspeed_problems(config, plan, None)]
        assert any(line in problem for problem in problems) == found, problems


@pytest.mark.parametrize("stage", [0, 2])
def test_a_skipped_step_leaves_the_momentum(one_rank: None, stage: int) -> None:
    files = f"parallel.deepspeed={ds_config(f'zero{stage}_bf16')}"
    engine = tiny_engine(tiny(files, "optimizer.name=muon", "moe.expert_ffn_hidden_size=16"))
    engine.train(True)

    def states() -> list[Tensor]:
        optimizer = engine.inner_optimizer
        weights = [p.detach().clone() for p in engine.model.parameters()]
        return weights + [state[MOMENTUM].clone() for state in optimizer.state.values() if MOMENTUM in state]

    engine.backward(loss_of(engine, 0), last=True)
    engine.step(LR)
    before = states()
    assert len(before) > sum(1 for _ in engine.model.parameters())
    for scale, apply in ((float("inf"), True), (1.0, False)):
        engine.backward(loss_of(engine, 1) * scale, last=True)
        engine.step(LR, apply_update=apply)
        assert engine.step_skipped
        assert all(torch.equal(one, other) for one, other in zip(before, states(), strict=True))
    engine.backward(loss_of(engine, 1), last=True)
    engine.step(LR)
    assert not torch.equal(before[-1], states()[-1])


def test_owners_share_the_work() -> None:
    """Of four ranks each has a quarter of the FLOPs, whichever mixture of matrices."""
    matrix = [Matrix((range(8),), 8)]
    weights = [
        SplitWeight(
            f"w{n}", matrix, n < 4, Sharding(), (2, 8, 8) if n < 4 else (8, 8), None, torch.empty(0), 0
        )
        for n in range(12)
    ]
    exchange = MatrixExchange.__new__(MatrixExchange)
    for expert in (1, 2):
        exchange._layout, exchange._rank = Layout(4, expert=expert), 0
        owners = exchange._owners(weights)
        held = [owner for each in owners[4:] for owner in each]
        experts = [owner for each in owners[:4] for owner in each]
        assert {held.count(rank) for rank in range(4)} == {2}
        assert {experts.count(rank) for rank in range(0, 4, expert)} == {8 * expert // 4}
