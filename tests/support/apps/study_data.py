"""The data of all studies in small: what `make demo` and `make papers-data` prepare, at the same places."""

import json
from pathlib import Path

from megamoe.apps.translation.prepare import PairPreparation, prepare_pairs
from tests.support.data.sources import make_data

LANGUAGES = ("de", "fr", "ro", "cs")
LABELS = ("django", "plone")
PAIRS = 400  # of each language: enough for a batch of 32 in each split


def make_study_data(root: Path) -> None:
    """Write root/data/stdlib/stdlib and root/data/papers, of bytes."""
    texts = [f"def f_{number}(x):\n    return x * {number}\n" * 8 for number in range(200)]
    (root / "data/stdlib").mkdir(parents=True)
    make_data(root / "data/stdlib/stdlib", texts)
    for language in LANGUAGES:
        lines = [f"message {n} of the program\t{f'{language} {n} ' * 3}\n" for n in range(PAIRS)]
        (root / f"{language}.tsv").write_text("".join(lines))
    papers = root / "data/papers"
    prepare_pairs(
        PairPreparation(
            str(papers),
            tsv=[[language, str(root / f"{language}.tsv")] for language in LANGUAGES],
            tokenizer="bytes",
            bilingual=True,
            split=[0.7, 0.15, 0.15],
        )
    )
    for name, count in (("train", 32), ("valid", 32), ("test.en", 8), ("test.de", 8)):
        rows = [
            {"text": f"{LABELS[number % 2]} {number}", "label": LABELS[number % 2], "language": "en"}
            for number in range(count)
        ]
        _write(papers / f"labels/{name}.jsonl", rows)


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
