"""Small prepared pairs for the tests of training: three languages, lengths of 2 to 20 tokens."""

from pathlib import Path

from megamoe.apps.translation.prepare import PairPreparation, prepare_pairs

SIZES = {"de": 150, "fr": 60, "it": 30}


def make_pairs(folder: Path, split: list[float], sizes: dict[str, int] = SIZES) -> Path:
    """Write pairs of bytes with tags; return the folder of train, valid and test.

    The source of pair n is "n", some times; its target is the language's first letter, other times.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for language, size in sizes.items():
        lines = [f"{str(n) * (n % 5 + 1)}\t{language[0] * (n % 17 + 1)}\n" for n in range(size)]
        (folder / f"{language}.tsv").write_text("".join(lines))
    output, files = folder / "out", [[language, str(folder / f"{language}.tsv")] for language in sizes]
    prepare_pairs(PairPreparation(str(output), tsv=files, tokenizer="bytes", split=split))
    return output / "pairs"
