"""Log-likelihoods of our class in the harness are those of its own class `hf` on the exported folder."""

from pathlib import Path
from typing import Any

import pytest

from megamoe.apps.hf.export_run import export_run
from megamoe.apps.hf.import_folder import import_folder
from tests.apps.hf.test_classes import opened
from tests.apps.hf.test_custom import LENGTH, NO_CAPACITY, saved
from tests.apps.lm_eval.test_model import requests
from tests.support.apps.hf_models import make, with_tokenizer

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install 'megamoe[eval]'")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'megamoe[eval]'")
pytestmark = [pytest.mark.full, pytest.mark.usefixtures("one_rank")]
PAIRS = [
    ("the river", " runs to the sea"),
    ("", "the sea"),
    ("and the sea runs to no one. The river runs", " to"),
    ("The river runs to the sea, and ", "no one"),
]
TEXTS = ["the river", "The river runs to the sea, and the sea runs to no one. " * 12]


def compare(ours: Any, folder: Path, **options: Any) -> None:
    """Compare both classes' answers to questions and to whole texts, some longer than the model reads."""
    from lm_eval.models.huggingface import HFLM

    from megamoe.apps.lm_eval.model import Megamoe

    mine = Megamoe(ours, batch_size=3)
    theirs = HFLM(str(folder), device="cpu", dtype="float32", batch_size=3, **options)
    assert (mine.max_length, mine.prefix_token_id) == (theirs.max_length, theirs.prefix_token_id)
    assert len(mine.tok_encode(TEXTS[1])) > mine.max_length
    found, expected = (
        model.loglikelihood(requests("loglikelihood", *PAIRS), disable_tqdm=True) for model in (mine, theirs)
    )
    assert len({value for value, _ in expected}) == len(PAIRS)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-5)
    rolled, others = (
        model.loglikelihood_rolling(
            requests("loglikelihood_rolling", *((text,) for text in TEXTS)), disable_tqdm=True
        )
        for model in (mine, theirs)
    )
    tokens = [len(mine.tok_encode(text)) for text in TEXTS]
    for one, other, count in zip(rolled, others, tokens, strict=True):
        assert one / count == pytest.approx(other / count, abs=1e-5)


def test_of_an_exported_class(tmp_path: Path) -> None:
    make("qwen3_moe", tmp_path / "hf")
    with_tokenizer(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "run", report=lambda line: None)
    export_run(tmp_path / "run", tmp_path / "out", report=lambda line: None)
    compare(opened(tmp_path / "run"), tmp_path / "out")


@pytest.mark.parametrize("preset", ["threshold_on_hypersphere_in_clusters", "hash"])
def test_of_the_custom_class(preset: str, tmp_path: Path) -> None:
    with_tokenizer(tmp_path / "words")
    step = tmp_path / "step_00000001"
    saved(step, preset, NO_CAPACITY, f"data.tokenizer={tmp_path / 'words'}")
    export_run(step, tmp_path / "out", model_class="custom", report=lambda line: None)
    ours = opened(step, f"data.tokenizer={tmp_path / 'words'}")
    assert ours.config.data.sequence_length == LENGTH
    compare(ours, tmp_path / "out", trust_remote_code=True)
