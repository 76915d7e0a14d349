"""Small prepared pairs for the tests of training: three languages, lengths of 2 to 20 tokens."""

from pathlib import Path

from megamoe.apps.translation.prepare import PairPreparation, prepare_pairs

SIZES = {"de": 150, "fr": 60, "it": 30}


def make_pairs(folder: Path, split: list[float], sizes: dict[str, int] = SIZES) -> Path:
    """Write pairs of bytes with tags; return the folder of train, valid and test.

    The source of pair n is "n", some times; its target is the language's first letter, other times.
    """
    lines = [
        f'{{"source": "{str(number) * (number % 5 + 1)}", "target": "{language[0] * (number % 17 + 1)}", '
        f'"language": "{language}"}}\n'
        for language, size in sizes.items()
        for number in range(size)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "all.jsonl").write_text("".join(lines))
    output = folder / "out"
    prepare_pairs(
        PairPreparation(str(output), jsonl=[str(folder / "all.jsonl")], tokenizer="bytes", split=split)
    )
    return output / "pairs"
