"""A run that starts from another one's weights, saved at any layout and taken at any other."""

import io
import shutil
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe.parallel.layout import Layout
from megamoe.train.trainer import Progress, Trainer
from tests.support.checkpoint_files import flip, read_tensors
from tests.support.ranks.initial_weights import STEP_1, Run, Tensors, refusal, weights_of_runs
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import ds_config, small_run

DENSE: Run = {"moe__layers": "none", "moe__losses": {}}
CUT: Run = {
    "moe__num_experts": 4,
    "moe__expert_ffn_hidden_size": 16,
    "moe__num_shared_experts": 0,
    "moe__router": {"selector": {"name": "top_k", "k": 4, "weights": "one"}},
    "moe__losses": {"z_loss": 0.01},  # every token visits every expert: there is nothing to balance
}
COPY: Run = {**CUT, "moe__expert_ffn_hidden_size": 64, "moe__router": {"selector": {"name": "top_k", "k": 2}}}
EP2, TP2, CUT_TWICE = {"expert": 2}, {"tensor": 2}, {"tensor": 2, "expert_tensor": 2}
TP2_EP2, EVERY_WAY = {"tensor": 2, "expert": 2}, {"tensor": 2, "expert": 2, "expert_tensor": 2}
# Each after one step of 2 ranks.
SOURCES: dict[str, Run] = {
    "moe_fp32": {"parallel": EP2, "parallel__deepspeed": ds_config("zero1_fp32")},
    "moe_bf16": {"parallel": EP2, "parallel__deepspeed": ds_config("zero2_bf16")},
    "moe_cut": {"parallel": CUT_TWICE, "parallel__deepspeed": ds_config("zero2_fp32")},
    "dense": {**DENSE, "parallel__deepspeed": ds_config("zero1_fp32")},
    "dense_cut": {**DENSE, "parallel": TP2, "parallel__deepspeed": ds_config("zero0_bf16")},
}


@pytest.fixture(scope="module")
def sources(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in SOURCES}
    runs = [{"steps": 1, "save": True, "output": folders[n], **run} for n, run in SOURCES.items()]
    pool.run(weights_of_runs, runs, ranks=2)
    return {name: folder / STEP_1 for name, folder in folders.items()}


@pytest.fixture
def moe_fp32(sources: dict[str, Path]) -> Path:
    return sources["moe_fp32"]


def weights_of(checkpoint: Path) -> Tensors:
    """Return the whole model's weights by name."""
    tensors = read_tensors(checkpoint).items()
    return {name.removeprefix("model/"): tensor for name, tensor in tensors if name.startswith("model/")}


def own_part(name: str, whole: torch.Tensor, ranks: Layout, rank: int) -> torch.Tensor:
    """Return a rank's part of a weight."""
    tensor, place = ranks.tensor, ranks.tensor_rank(rank)
    if ".experts." in name:
        whole = whole.chunk(ranks.expert)[ranks.expert_rank(rank)]
        count, place = ranks.expert_tensor, rank % ranks.expert_tensor
        if name.endswith("down"):
            return whole.chunk(count, 2)[place]
        return torch.cat([half.chunk(count, 1)[place] for half in whole.chunk(2, 1)], 1)
    if name.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(tensor)[place] for half in whole.chunk(2)])
    if name.endswith(("linear_qkv.weight", "word_embeddings.weight")):
        return whole.chunk(tensor)[place]
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return whole.chunk(tensor, 1)[place]
    return whole


def assert_holds_its_part(
    here: Run, expected: Tensors, layout: dict[str, Any], ranks: int, rank: int
) -> None:
    """Weights and their fp32 masters; expected: of the whole model, in the weights' dtype or finer."""
    assert here["before"].keys() == expected.keys() == here["masters"].keys()
    sizes = {key: size for key, size in layout.items() if key != "sequence"}
    for name, weight in here["before"].items():
        mine = own_part(name, expected[name], Layout(ranks, **sizes), rank).to(weight.dtype)
        assert torch.equal(weight, mine), name
        assert torch.equal(here["masters"][name], mine.float()), name


full = pytest.mark.full
# (source, ranks, layout, DeepSpeed file)
Case = tuple[str, int, dict[str, Any], str]
CASES: list[Case] = [("moe_cut", 1, {}, "zero0_fp32"), ("moe_fp32", 2, CUT_TWICE, "zero1_bf16")]
FULL_CASES: list[Case] = [
    ("moe_bf16", 2, EP2, "zero2_bf16"),
    ("dense_cut", 2, {}, "zero0_fp32"),
    ("moe_bf16", 4, EVERY_WAY, "zero3_fp32"),
    ("moe_bf16", 1, {}, "zero1_fp32"),
    ("moe_fp32", 2, {}, "zero0_bf16"),
    ("moe_cut", 2, {"tensor": 2, "sequence": True, "expert": 2}, "zero0_fp32"),
    ("moe_fp32", 4, {"expert": 4}, "zero1_fp32"),
    ("moe_cut", 4, EP2, "zero3_bf16"),
    ("moe_fp32", 4, TP2_EP2, "zero2_bf16"),
    ("dense", 4, TP2, "zero2_fp32"),
]


def runs_of(cases: list[Case], sources: dict[str, Path]) -> list[Run]:
    return [
        {
            "seed": 7,
            "parallel": layout,
            "parallel__deepspeed": ds_config(file),
            "checkpoint__init": {"path": str(sources[source])},
            **(DENSE if "dense" in source else {}),
        }
        for source, _, layout, file in cases
    ]


def assert_begin(pool: Pool, sources: dict[str, Path], cases: list[Case]) -> None:
    """Check that optimiser, step and data start fresh, and that the fp32 masters are the loaded weights."""
    for ranks in sorted({case[1] for case in cases}):
        own = [case for case in cases if case[1] == ranks]
        by_rank = pool.run(weights_of_runs, runs_of(own, sources), ranks=ranks, timeout_s=600)
        for place, (source, _, layout, file) in enumerate(own):
            expected = weights_of(sources[source])
            for rank, found in enumerate(by_rank):
                here, what = found[place], str(own[place])
                assert here["progress"] == Progress(0, 0), what
                assert here["moments"] == 0 or "offload" in file or "zero0" not in file, what
                dtype = torch.bfloat16 if "bf16" in file else torch.float32
                assert {weight.dtype for weight in here["before"].values()} == {dtype}, what
                assert_holds_its_part(here, expected, layout, ranks, rank)


@pytest.mark.parametrize(
    "cases", [pytest.param(CASES, id="quick"), pytest.param(FULL_CASES, id="others", marks=full)]
)
def test_a_new_run_has_weights_whatever_layout_saved_them(pool: Pool, sources: Any, cases: Any) -> None:
    assert_begin(pool, sources, cases)


def test_a_bf16_runs_checkpoint_holds_fp32_masters(sources: dict[str, Path]) -> None:
    """A run in fp32 loads them bit for bit."""
    for source in ("moe_bf16", "dense_cut"):
        weights = weights_of(sources[source])
        assert {weight.dtype for weight in weights.values()} == {torch.float32}
        assert not all(torch.equal(weight, weight.bfloat16().float()) for weight in weights.values())


def as_experts(dense: Tensors, changes: Run) -> Tensors:
    """The dense model's weights with the FFN of its second block cut or copied, and no router."""
    mlp, experts = "model.decoder.layers.1.mlp.", changes["moe__num_experts"]
    size = changes["moe__expert_ffn_hidden_size"]
    rest = {name: weight for name, weight in dense.items() if not name.startswith(mlp)}
    gate, value = dense[f"{mlp}linear_fc1.weight"].chunk(2)
    starts = [(e * size) % len(gate) for e in range(experts)]
    up = torch.stack([torch.cat([half[s : s + size] for half in (gate, value)]) for s in starts])
    down = torch.stack([dense[f"{mlp}linear_fc2.weight"][:, s : s + size] for s in starts])
    return rest | {f"{mlp}layer.experts.up": up, f"{mlp}layer.experts.down": down}


# (source, ranks, layout, file, what of the dense model, relative tolerance of the loss)
ExpertCase = tuple[str, int, dict[str, Any], str, str, float]
EXPERTS: list[ExpertCase] = [
    ("dense", 2, EP2, "zero2_bf16", "cut", 1e-2),
    ("dense_cut", 2, CUT_TWICE, "zero1_fp32", "cut", 1e-6),
    ("dense_cut", 2, {"expert_tensor": 2}, "zero2_fp32", "copy", 1e-6),
]
FULL_EXPERTS: list[ExpertCase] = [
    ("dense", 2, EP2, "zero1_fp32", "cut", 1e-6),
    ("dense", 2, EP2, "zero0_bf16", "cut", 1e-2),
    ("dense_cut", 4, TP2_EP2, "zero1_fp32", "cut", 1e-6),
    ("dense", 4, EVERY_WAY, "zero0_fp32", "copy", 1e-6),
]


def expert_runs_of(cases: list[ExpertCase], sources: dict[str, Path]) -> Iterator[Run]:
    """Yield for each case the dense run under the same tensor parallelism, and the run with experts."""
    for source, _, layout, file, experts, _ in cases:
        init = {"path": str(sources[source])}
        precise = {"parallel__deepspeed": ds_config(file), "seed": 7}
        own = {"tensor": layout.get("tensor", 1)}
        yield {**DENSE, "parallel": own, **precise, "checkpoint__init": init}
        init = {**init, "experts": experts}
        changes = {"steps": 1, **(CUT if experts == "cut" else COPY)}
        yield {**changes, "parallel": layout, **precise, "checkpoint__init": init}


@pytest.mark.parametrize(
    "cases", [pytest.param(EXPERTS, id="quick"), pytest.param(FULL_EXPERTS, id="others", marks=full)]
)
def test_a_dense_run_continues_with_experts(pool: Pool, sources: dict[str, Path], cases: Any) -> None:
    """All chosen with weight 1, or copies with weights of sum 1: the dense run's validation loss."""
    for ranks in sorted({case[1] for case in cases}):
        own = [case for case in cases if case[1] == ranks]
        by_rank = pool.run(weights_of_runs, [*expert_runs_of(own, sources)], ranks=ranks)
        for place, case in enumerate(own):
            expected = as_experts(weights_of(sources[case[0]]), CUT if case[4] == "cut" else COPY)
            dense = by_rank[0][2 * place]["valid"]
            for rank, found in enumerate(by_rank):
                here = found[2 * place + 1]
                assert here["valid"] == pytest.approx(dense, rel=case[5]), str(case)
                up = "model.decoder.layers.1.mlp.layer.experts.up"
                assert not torch.equal(here["after"][up], here["before"][up])
                drawn = [name for name in here["before"] if name.endswith("router.scorer.weight")]
                assert len(drawn) == 1
                for tensors in (here["before"], here["masters"]):
                    del tensors[drawn[0]]
                assert_holds_its_part(here, expected, case[2], ranks, rank)


def test_refused_on_all_ranks_alike(pool: Pool, moe_fp32: Path, tmp_path: Path) -> None:
    """One bit of a weight, in a file that one of the ranks has checked."""
    folder = tmp_path / moe_fp32.name
    shutil.copytree(moe_fp32, folder)
    flip(folder / "shard_00001.safetensors")
    init = {"checkpoint__init": {"path": str(folder)}, "parallel__expert": 2, "output": tmp_path / "new"}
    messages = pool.run(refusal, **init, ranks=2, timeout_s=30)
    assert len(set(messages)) == 1
    damage = "shard_00001.safetensors: damaged, its SHA-256 is not the one in SHA256SUMS"
    assert f"{folder}: missing or damaged ({damage}); name another" in messages[0]
    assert "\n" not in messages[0]


def test_a_run_does_not_empty_folder_that_it_starts_from(pool: Pool, moe_fp32: Path, tmp_path: Path) -> None:
    inside = tmp_path / "small" / "checkpoints" / moe_fp32.name
    shutil.copytree(moe_fp32, inside)
    (tmp_path / "small" / "config.yaml").touch()  # by which a run's folder is known
    own: dict[str, Any] = {"output": tmp_path, "overwrite": True, "checkpoint__init": {"path": str(inside)}}
    (message,) = pool.run(refusal, **own, ranks=1)
    assert message.startswith(f"checkpoint.init.path: {inside} lies in this run's own folder")


def text_out(**changes: Any) -> str:
    """Job: what is printed while the run is made ready."""
    with redirect_stdout(io.StringIO()) as text:
        Trainer(small_run(**changes)).close()
    return text.getvalue()


def test_the_first_rank_says_what_the_run_starts_from(pool: Pool, sources: dict[str, Path]) -> None:
    dense = sources["dense"]
    shared = {**CUT, "moe__num_shared_experts": 1}
    init = {"path": str(dense), "experts": "cut"}
    printed = pool.run(text_out, **shared, checkpoint__init=init, moe__frozen=["experts"], ranks=2)
    kept = "router.scorer.weight, shared.up, shared.down"
    assert printed == [f"weights from {dense}, experts: cut; of the MoE layers as drawn: {kept}\n", ""]
    printed = pool.run(text_out, moe__frozen=["router"], ranks=1)
    assert printed == ["moe.frozen: router as drawn, for checkpoint.init.path is not set\n"]
    assert pool.run(text_out, ranks=1) == [""]
