"""Every legal layout of up to four ranks with everything that must not change what is trained."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray

from megamoe.config.schema import RunConfig
from megamoe.parallel.layout import Layout
from megamoe.parallel.pipeline.schedule import rounds_problem
from megamoe.validation.layout import misfits
from tests.support.ranks.runs import WORDS, assert_as_alone, ds_file, parallel_changes, small_run

T = TypeVar("T")
# Tokens enough that in bf16 a near-tie which falls differently moves a norm by less than the tolerance.
SEQUENCES = 4  # of a micro batch
SIZES: dict[str, Any] = {
    "train__micro_batch_size": SEQUENCES,
    "model__num_attention_heads": 4,
    "model__hidden_size": 32,
    "moe__layers": {"at": [1]},
    "moe__num_experts": 16,
}
SYSTEMS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


@dataclass(frozen=True)
class Case:
    """One way to train one of the presets.

    accumulation: micro batches a step of each data-parallel rank. blocks: of the model. node: the ranks of a
    node, between which rows are exchanged by node; 0: directly.
    """

    ranks: int
    tensor: int
    expert: int
    expert_tensor: int
    sequence: bool
    zero: int
    recompute: str
    accumulation: int
    preset: str
    precision: str
    pipeline: int = 1
    chunks: int = 1
    context: int = 1
    blocks: int = 2
    node: int = 0

    @property
    def data(self) -> int:
        return self.ranks // (self.tensor * self.pipeline * self.context)

    def changes(self, folder: Path) -> dict[str, Any]:
        """Return the changes for `small_run`; folder: receives a separate DeepSpeed file."""
        return {
            **SIZES,
            **SYSTEMS[self.preset],
            **parallel_changes(self, ds_file(folder, f"zero{self.zero}_{self.precision}")),
            **({"parallel__exchange": "by_node", "parallel__node_size": self.node} if self.node else {}),
            "model__num_layers": self.blocks,
            "model__recompute": self._recomputed(),
            "train__global_batch_size": SEQUENCES * self.accumulation * self.data,
        }

    def _recomputed(self) -> str | list[str]:
        some = ["core_attention", "moe", *(["norms"] if self.zero < 3 else [])]
        return some if self.recompute == "some" else self.recompute

    def alone(self) -> "Case":
        """The plain run with which it must agree."""
        batch = self.accumulation * self.data
        return Case(1, 1, 1, 1, False, 0, "none", batch, self.preset, self.precision, blocks=self.blocks)


@cache
def every_case() -> list[Case]:
    """All that are legal; the checks of the configuration decide."""
    more = ((0, 1, 2, 3), ("none", "selective", "full", "some"), (1, 2), SYSTEMS, ("fp32", "bf16"))
    found: list[Case] = []
    for sizes in product((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4), (False, True)):
        for node in (0, 1, 2):
            cases = (Case(*sizes, *choice, node=node) for choice in product(*more))  # type: ignore[misc]
            plain = next(cases)
            if (plain.tensor > 1 or not plain.sequence) and list(_legal([plain])):
                found += [plain, *cases]
    return found


@cache
def _sized_run() -> RunConfig:
    return small_run(**SIZES)


def _legal(cases: Iterable[Case]) -> Iterator[Case]:
    config = _sized_run()
    legal: dict[Layout, bool] = {}
    for case in cases:
        sizes = (case.tensor, case.expert, case.expert_tensor, case.pipeline, case.context)
        layout = Layout(case.ranks, *sizes)
        if layout not in legal:
            legal[layout] = next(misfits(config, layout, "fp32"), None) is None
        # Nodes within an expert group; one of the slices of an expert is not cut.
        by_node = case.expert_tensor <= case.node < case.expert * case.expert_tensor
        if legal[layout] and (by_node or case.node == 0):
            yield case


@cache
def staged_cases() -> list[Case]:
    """Return those of four ranks with pipeline stages or context parallelism that are legal."""
    choices: Iterator[Any] = product(
        (4,),
        (1, 2),
        (1, 2, 4),
        (1, 2),
        (False, True),
        (0, 1, 2),
        ("none", "selective", "full", "some"),
        (1, 2, 3),
        SYSTEMS,
        ("fp32",),
        (1, 2, 4),
        (1, 2),
        (1, 2, 4),
        (4,),
        (0, 1, 2),
    )
    found = []
    for choice in choices:
        _, tensor, *_, sequence, zero, _, accumulation, preset, _ = choice[:10]
        pipeline, chunks, context, blocks, _ = choice[10:]
        if pipeline * context == 1 or pipeline * chunks > blocks:
            continue
        if (chunks > 1 and pipeline == 1) or (sequence and tensor == 1):
            continue
        if rounds_problem(pipeline, chunks, accumulation) is not None:
            continue
        is_tied = SYSTEMS[preset].get("model__tie_embeddings", True)
        if pipeline > 1 and zero == 2 and is_tied:
            continue
        found.append(Case(*choice))
    return list(_legal(found))


@cache
def few_cases() -> list[Case]:
    """Return cases in which every two values of two fields occur together, if they do so in any."""
    return covering(every_case())


def covering(cases: list[T], paired: tuple[str, ...] | None = None) -> list[T]:
    """Few of these flat dataclasses, in which every two values of two fields that occur together at all do
    so; greedily.

    paired: the fields whose values are combined, by default all. Of the others, every value occurs.
    """
    columns = {name: _numbers([getattr(case, name) for case in cases]) for name in vars(cases[0])}
    combined = list(combinations(columns if paired is None else paired, 2))
    groups = [columns[one] * (columns[other].max() + 1) + columns[other] for one, other in combined]
    groups += list(columns.values())
    # has[case, value or pair of values]
    has = np.concatenate([group[:, None] == np.unique(group) for group in groups], axis=1)
    left = np.ones(has.shape[1], dtype=bool)
    chosen = []
    while left.any():
        best = int(has[:, left].sum(axis=1).argmax())
        chosen.append(cases[best])
        left &= ~has[best]
    return chosen


def _numbers(values: list[Any]) -> NDArray[np.int64]:
    """Number the different values in the order in which they occur."""
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values])


def name(case: Case) -> str:
    """Return a readable name: the differences from the plain run."""
    plain = case.alone()
    given = {field.name: getattr(case, field.name) for field in fields(case)}
    message = [f"{key}={value}" for key, value in given.items() if value != getattr(plain, key)]
    return ",".join([case.preset, case.precision, *message])


def runs_of(cases: list[Case], steps: int, folder: Path) -> list[dict[str, Any]]:
    """Return the arguments of `run_steps` for each."""
    return [{"steps": steps, **case.changes(folder)} for case in cases]


def assert_case(case: Case, found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """Every rank shows the losses and norms of the plain run; in fp32, the same experts were chosen.

    In bf16 a token whose scores nearly tie may choose another one, which a norm of the gradients shows most.
    """
    if case.precision == "fp32":
        assert_as_alone(found, alone, name(case))
        return
    for word in WORDS:
        tolerance = 1e-2 if word == "grad_norm" else 5e-3
        for rank in found:
            assert rank[word] == pytest.approx(alone[word], rel=tolerance), f"{name(case)}: {word}"
