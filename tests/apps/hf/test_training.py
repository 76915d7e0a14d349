"""An imported model trains as in transformers, and leaves every layout as the same files."""

from pathlib import Path

import pytest

from megamoe.apps.hf.export_run import export_run
from megamoe.apps.hf.import_folder import import_folder
from tests.apps.hf.test_classes import same_files
from tests.support.apps.hf_models import CONFIGS, make
from tests.support.apps.hf_training import saved_at, trained_beside_transformers
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import CUT_ALL, ds_config, ds_variant

pytest.importorskip("transformers")


@pytest.mark.full
@pytest.mark.parametrize(("kind", "number"), [(kind, number) for kind in CONFIGS for number in (0, 1)])
def test_gradients_and_three_steps_are_those_of_transformers(
    kind: str, number: int, pool: Pool, tmp_path: Path
) -> None:
    (found,) = pool.run(trained_beside_transformers, kind, number, tmp_path, ranks=1, timeout_s=600)
    assert found["gradient"] < 1e-5
    assert found["change"] > 3e-3
    assert found["weights"] < 1e-4


LAYOUTS = {
    "EP 2": (2, ["parallel.expert=2"]),
    "TP 2": (2, ["parallel.tensor=2"]),
    "EP 4": (4, ["parallel.expert=4"]),
    "TP 2 x EP 2": (4, ["parallel.tensor=2", "parallel.expert=2"]),
    "EP 2 x ETP 2": (4, ["parallel.expert=2", "parallel.expert_tensor=2"]),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", CONFIGS)
def test_ten_layouts_give_the_same_files(kind: str, pool: Pool, tmp_path: Path) -> None:
    make(kind, tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "run", report=lambda line: None)
    zero3 = ds_variant(tmp_path, "zero3_fp32", zero_optimization=CUT_ALL)
    layouts = {
        **LAYOUTS,
        "ZeRO 1": (2, [f"parallel.deepspeed={ds_config('zero1_fp32')}"]),
        "ZeRO 1, TP 2": (4, ["parallel.tensor=2", f"parallel.deepspeed={ds_config('zero1_fp32')}"]),
        "ZeRO 2, EP 2": (2, ["parallel.expert=2", f"parallel.deepspeed={ds_config('zero2_fp32')}"]),
        "ZeRO 3": (2, [f"parallel.deepspeed={zero3}"]),
        "ZeRO 3, TP 2 x EP 2": (4, ["parallel.tensor=2", "parallel.expert=2", f"parallel.deepspeed={zero3}"]),
    }
    if "num_experts" not in (tmp_path / "run/continue.yaml").read_text():
        layouts = {name: it for name, it in layouts.items() if "EP" not in name}
    for number, (ranks, overrides) in enumerate(layouts.values()):
        pool.run(
            saved_at, tmp_path / "run", tmp_path, f"saved{number}", overrides, ranks=ranks, timeout_s=600
        )
        export_run(tmp_path / f"saved{number}", tmp_path / f"back{number}", report=lambda line: None)
        same_files(tmp_path / "hf", tmp_path / f"back{number}")
