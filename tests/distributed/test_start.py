"""A run that starts from another one's weights, under every layout, and runs of which a part is frozen."""

import io
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from safetensors.torch import load_file
from torch import Tensor

from megamoe.errors import UserError
from megamoe.train.trainer import Progress, Trainer
from tests.distributed.pool import Pool
from tests.distributed.runs import PLAIN_FILES, ds_config, run_steps, small_run

Tensors = dict[str, Tensor]
STEPS = 3
DENSE: dict[str, Any] = {"moe__layers": "none", "moe__losses": {}, "parallel__expert": 1}
CUT: dict[str, Any] = {
    "moe__num_experts": 4,
    "moe__expert_ffn_hidden_size": 16,
    "moe__num_shared_experts": 0,
    "moe__router": {"selector": {"name": "top_k", "k": 4, "weights": "one"}},
    "moe__losses": {"z_loss": 0.01},  # every token visits every expert: there is nothing to balance
}


def look(steps: int = 0, save: bool = False, **changes: Any) -> dict[str, Any]:
    """Job: a run's weights at its start and after some steps, and what its optimiser has of them.

    save: write a checkpoint at the end.
    """
    trainer = Trainer(small_run(**changes))
    engine = trainer.engine
    try:
        found: dict[str, Any] = {
            "progress": trainer.progress,
            "moments": len(engine.inner_optimizer.state),
            "before": _weights(engine),
            "masters": _masters(engine),
            "valid": trainer.evaluate()["val/lm_loss"],
        }
        steps_taken = [trainer.step()[1] for _ in range(steps)]
        if save:
            trainer.save()
        words = ("lm_loss", "loss", "grad_norm")
        return (
            found
            | {"steps": [[s[f"train/{word}"] for word in words] for s in steps_taken]}
            | {"after": _weights(engine)}
        )
    finally:
        trainer.close()


def _weights(engine: Any) -> Tensors:
    with engine.gathered(engine.model.parameters()):
        return {name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()}


def _masters(engine: Any) -> Tensors:
    """The fp32 weight of every parameter that the optimiser has."""
    trained = [(name, p) for name, p in engine.model.named_parameters() if p.requires_grad]
    if engine.stage > 0:
        return {name: safe_get_full_fp32_param(p).clone() for name, p in trained}
    held = {id(p) for group in engine.inner_optimizer.param_groups for p in group["params"]}
    masters = {name: engine.inner_optimizer.master_of(p) for name, p in trained}
    assert held == {id(master) for master in masters.values()}
    return {name: master.detach().clone() for name, master in masters.items()}


def refusal(**changes: Any) -> str:
    """Job: what the user is told."""
    try:
        Trainer(small_run(**changes)).close()
    except UserError as error:
        return str(error)
    return "started"


def saved_weights(folder: Path) -> Tensors:
    """A checkpoint's model, its experts put together."""
    experts = [load_file(file) for file in sorted(folder.glob("experts_*.safetensors"))]
    together = {name: torch.cat([held[name] for held in experts]) for name in (experts[0] if experts else {})}
    return load_file(folder / "dense.safetensors") | together


def make(pool: Pool, output: Path, file: str, **changes: Any) -> Path:
    """A checkpoint after one step of 2 ranks."""
    run = {"parallel__expert": 2, "parallel__deepspeed": ds_config(file), "output": output, **changes}
    pool.run(look, 1, True, **run, ranks=2)
    return output / "small" / "checkpoints" / "step_00000001"


@pytest.fixture(scope="module")
def moe_fp32(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(pool, tmp_path_factory.mktemp("moe"), "zero1_fp32")


@pytest.fixture(scope="module")
def moe_bf16(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(pool, tmp_path_factory.mktemp("moe_bf16"), "zero2_bf16")


@pytest.fixture(scope="module")
def dense_fp32(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(pool, tmp_path_factory.mktemp("dense"), "zero1_fp32", **DENSE)


full = pytest.mark.full
LAYOUTS = [
    ("moe_fp32", 1, 1, "zero0_fp32"),
    ("moe_fp32", 2, 1, "zero0_bf16"),
    ("moe_fp32", 4, 4, "zero1_fp32"),
    ("moe_bf16", 1, 1, "zero0_fp32"),
    ("moe_bf16", 2, 2, "zero2_bf16"),
    ("moe_fp32", 4, 2, "zero3_bf16"),
]
REST = [
    pytest.param(source, 4, expert, file, marks=full)
    for source in ("moe_fp32", "moe_bf16")
    for expert in (1, 2, 4)
    for file in PLAIN_FILES
]


@pytest.mark.parametrize(("source", "ranks", "expert", "file"), LAYOUTS + REST)
def test_a_new_run_has_the_weights_whatever_layout_saved_them(
    pool: Pool, request: pytest.FixtureRequest, source: str, ranks: int, expert: int, file: str
) -> None:
    """Optimiser, step and data begin anew; the fp32 masters are the weights, not what was drawn."""
    folder: Path = request.getfixturevalue(source)
    run = {"parallel__expert": expert, "parallel__deepspeed": ds_config(file), "seed": 7}
    found = pool.run(look, checkpoint__init={"path": str(folder)}, **run, ranks=ranks)
    expected = saved_weights(folder)
    dtype = torch.bfloat16 if "bf16" in file else torch.float32
    for rank, here in enumerate(found):
        assert here["progress"] == Progress(0, 0)
        assert here["moments"] == 0 or "offload" in file or "zero0" not in file
        assert here["before"].keys() == expected.keys() == here["masters"].keys()
        for name, weight in here["before"].items():
            whole = expected[name].to(dtype)
            mine = whole.chunk(expert)[rank % expert] if ".experts." in name else whole
            assert torch.equal(weight, mine), name
            assert torch.equal(here["masters"][name], mine.float()), name


@pytest.mark.parametrize(
    ("file", "tolerance"), [("zero1_fp32", 1e-6), ("zero0_bf16", 1e-2), ("zero2_bf16", 1e-2)]
)
def test_a_dense_run_goes_on_as_experts_cut_from_it(
    pool: Pool, dense_fp32: Path, file: str, tolerance: float
) -> None:
    """Two ranks hold two experts each, all chosen with weight 1: the dense run's validation loss."""
    init = {"path": str(dense_fp32), "experts": "cut"}
    precise = {"parallel__deepspeed": ds_config(file)}
    dense = pool.run(look, **{**DENSE, **precise}, checkpoint__init={"path": str(dense_fp32)}, ranks=2)
    cut = pool.run(look, 1, parallel__expert=2, **CUT, **precise, checkpoint__init=init, ranks=2)
    for rank in cut:
        assert rank["valid"] == pytest.approx(dense[0]["valid"], rel=tolerance)
        up = rank["after"]["model.decoder.layers.1.mlp.layer.experts.up"]
        assert not torch.equal(up, rank["before"]["model.decoder.layers.1.mlp.layer.experts.up"])
    drawn = pool.run(look, parallel__expert=2, **CUT, **precise, ranks=2)
    assert drawn[0]["valid"] != pytest.approx(dense[0]["valid"], rel=tolerance)


def test_refused_on_all_ranks_alike(pool: Pool, moe_fp32: Path, tmp_path: Path) -> None:
    folder = tmp_path / moe_fp32.name
    shutil.copytree(moe_fp32, folder)
    (folder / "experts_00001.safetensors").unlink()
    init = {"checkpoint__init": {"path": str(folder)}, "parallel__expert": 2, "output": tmp_path}
    messages = pool.run(refusal, **init, ranks=2, timeout_s=30)
    assert len(set(messages)) == 1
    assert f"{folder}/experts_00001.safetensors: missing or damaged" in messages[0]
    assert "\n" not in messages[0]


BEFORE_THE_RANKS = {
    "heads": ({"model__num_attention_heads": 4}, "saved with model.num_attention_heads 2, this run has 4"),
    "vocabulary": ({"model__vocab_size": 28}, "saved with vocabulary 21, this run has 28; start with"),
}


@pytest.mark.parametrize(("changes", "told"), BEFORE_THE_RANKS.values(), ids=BEFORE_THE_RANKS.keys())
def test_weights_that_would_mean_something_else_are_refused(
    pool: Pool, moe_fp32: Path, changes: dict[str, Any], told: str
) -> None:
    (message,) = pool.run(refusal, **changes, checkpoint__init={"path": str(moe_fp32)}, ranks=1)
    assert f"{moe_fp32}: {told}" in message


def test_a_run_does_not_empty_the_folder_that_it_starts_from(
    pool: Pool, moe_fp32: Path, tmp_path: Path
) -> None:
    inside = tmp_path / "small" / "checkpoints" / moe_fp32.name
    shutil.copytree(moe_fp32, inside)
    (tmp_path / "small" / "config.yaml").touch()  # by which a run's folder is known
    own = {"output": tmp_path, "overwrite": True, "checkpoint__init": {"path": str(inside)}}
    (message,) = pool.run(refusal, **own, ranks=1)
    assert message.startswith(f"checkpoint.init.path: {inside} lies in this run's own folder")


def said(**changes: Any) -> str:
    """Job: what is printed while the run is made ready."""
    with redirect_stdout(io.StringIO()) as text:
        Trainer(small_run(**changes)).close()
    return text.getvalue()


def test_the_first_rank_says_what_the_run_starts_from(pool: Pool, dense_fp32: Path) -> None:
    shared = {**CUT, "moe__num_shared_experts": 1}
    init = {"path": str(dense_fp32), "experts": "cut"}
    printed = pool.run(said, **shared, checkpoint__init=init, moe__frozen=["experts"], ranks=2)
    kept = "router.scorer.weight, shared.up, shared.down"
    assert printed == [f"weights from {dense_fp32}, experts: cut; of the MoE layers as drawn: {kept}\n", ""]
    printed = pool.run(said, moe__frozen=["router"], ranks=1)
    assert printed == ["moe.frozen: router as drawn, for checkpoint.init.path is not set\n"]
    assert pool.run(said, ranks=1) == [""]


BOTH = ["router", "experts"]
FROZEN_LAYOUTS = [
    ("zero0_fp32", 1),
    ("zero0_bf16", 2),
    ("zero1_fp32", 2),
    ("zero2_bf16", 1),
    ("zero2_bf16_offload", 2),
    ("zero3_bf16", 2),
]
FROZEN_REST = [
    pytest.param(file, expert, marks=full)
    for file in PLAIN_FILES
    for expert in (1, 2)
    if (file, expert) not in FROZEN_LAYOUTS
]


@pytest.fixture(scope="module")
def plain(pool: Pool, moe_fp32: Path) -> dict[str, Any]:
    """One rank, fp32, no ZeRO, all frozen."""
    run = {"moe__frozen": BOTH, "checkpoint__init": {"path": str(moe_fp32)}}
    (found,) = pool.run(look, STEPS, **run, ranks=1)
    return found


def _is_frozen(name: str, frozen: list[str]) -> bool:
    return any(f".mlp.layer.{room}." in name for room in frozen)


def _assert_frozen(here: dict[str, Any], frozen: list[str]) -> None:
    """Frozen weights keep their bits and are not the optimiser's; every other one has moved."""
    assert here["masters"].keys() == {name for name in here["before"] if not _is_frozen(name, frozen)}
    moved = {name for name in here["before"] if not torch.equal(here["before"][name], here["after"][name])}
    assert not [name for name in moved if _is_frozen(name, frozen)]
    assert here["masters"].keys() - moved <= {n for n in here["before"] if "norm" in n}  # 1 is coarse in bf16


@pytest.mark.parametrize(("file", "expert"), FROZEN_LAYOUTS + FROZEN_REST)
def test_what_is_frozen_keeps_its_bits_and_the_rest_trains_as_on_one_rank(
    pool: Pool, moe_fp32: Path, plain: dict[str, Any], file: str, expert: int
) -> None:
    run = {"moe__frozen": BOTH, "checkpoint__init": {"path": str(moe_fp32)}, "parallel__expert": expert}
    found = pool.run(look, STEPS, **run, parallel__deepspeed=ds_config(file), ranks=2)
    tolerance = 3e-2 if "bf16" in file else 1e-5
    for here in found:
        _assert_frozen(here, BOTH)
        for step, expected in zip(here["steps"], plain["steps"], strict=True):
            assert step == pytest.approx(expected, rel=tolerance)
            assert step[1] > step[0] + 0.05  # the auxiliary losses stay on


@pytest.mark.parametrize("room", BOTH)
@pytest.mark.parametrize("file", ["zero0_bf16", "zero1_fp32"])
def test_one_of_them_is_frozen_by_itself(pool: Pool, file: str, room: str) -> None:
    run = {"moe__frozen": [room], "parallel__expert": 2, "parallel__deepspeed": ds_config(file)}
    for here in pool.run(look, STEPS, **run, ranks=2):
        _assert_frozen(here, [room])


@pytest.mark.parametrize(
    "file",
    [f if f in ("zero0_bf16", "zero2_fp32") else pytest.param(f, marks=full) for f in PLAIN_FILES],
)
def test_a_frozen_run_resumes_bit_for_bit(pool: Pool, moe_fp32: Path, tmp_path: Path, file: str) -> None:
    """And does not start from its `init` again, which is gone by then."""
    source = tmp_path / "source" / moe_fp32.name
    shutil.copytree(moe_fp32, source)
    run = {
        "moe__frozen": BOTH,
        "checkpoint__init": {"path": str(source)},
        "checkpoint__resume": "auto",
        "parallel__expert": 2,
        "parallel__deepspeed": ds_config(file),
    }
    whole = pool.run(run_steps, 4, **run, output=tmp_path / "whole", ranks=2)
    first = pool.run(run_steps, 2, True, **run, output=tmp_path / "cut", ranks=2)
    shutil.rmtree(source)
    second = pool.run(run_steps, 2, **run, output=tmp_path / "cut", ranks=2)
    for word in ("lm_loss", "loss", "grad_norm"):
        assert first[0][word] + second[0][word] == whole[0][word]
    (message, _) = pool.run(refusal, **{**run, "moe__frozen": []}, output=tmp_path / "cut", ranks=2)
    assert "saved with moe.frozen ['router', 'experts'], this run has []" in message
