"""Count the parameters of models from their configurations, and compare them with published numbers.

python tools/count_parameters.py examples/papers --published examples/papers/published.json
python tools/count_parameters.py examples/recipes --published examples/recipes/published.json
python tools/count_parameters.py examples/demo.yaml --vocab-size 4096

No weights are built and no data is read. A model without `model.vocab_size` needs --vocab-size. A folder
stands for its YAML files. "Active" are the parameters that compute a token, with one expert where the number
of a token's experts varies.
"""

import argparse
from pathlib import Path
from typing import Any

from megamoe.apps.command import aligned, check_positive, json_of, parser_of, run_tool
from megamoe.errors import UserError

MOST_BYTES = 1 << 20  # of a file of published numbers
HEADER = ("model", "total", "active", "routed experts", "outside embeddings", "published", "difference")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("configs", nargs="+", type=Path, help="YAML files, or folders of them")
    parser.add_argument("--published", type=Path, metavar="FILE", help="JSON: name: {total: number, ...}")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="of models that do not name one")
    options = parser.parse_args(arguments)
    return run_tool(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    check_positive("--vocab-size", options.vocab_size)
    published = _published(options.published) if options.published else {}
    rows = [_row(path, options.vocab_size, published) for path in _files(options.configs)]
    unknown = published.keys() - {row[0] for row in rows}
    if unknown:
        raise UserError(f"--published: {min(unknown)!r} is not among the configurations; leave it out")
    print(aligned([HEADER, *rows]))


def _files(paths: list[Path]) -> list[Path]:
    """Return the files, and those of folders in the order of their names; small recipes only if named."""
    found: list[Path] = []
    for path in paths:
        inside = [file for file in sorted(path.glob("*.yaml")) if not file.stem.endswith("_small")]
        if path.is_dir() and not inside:
            raise UserError(f"{path}: a folder without YAML files; name a file or another folder")
        found += inside if path.is_dir() else [path]
    return found


def _row(path: Path, vocab_size: int | None, published: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    from megamoe.config import load_config
    from megamoe.model.size import embedding_size, model_size

    # Patterns of datasets are not looked up: the data need not be there.
    more = published.get(path.stem, {}).get("counted_with", [])
    config = load_config(path, ["data.sources=[unread]", "data.validation={}", *more])
    vocab_size = config.model.vocab_size or vocab_size
    if vocab_size is None:
        raise UserError(f"{path}: model.vocab_size is not set; give --vocab-size, or set it")
    size = model_size(config, vocab_size)
    outside = size.total - embedding_size(config, vocab_size)
    known = published.get(config.name)
    cells = [f"{number:,}" for number in (size.total, size.active, size.expert, outside)]
    if known is None:
        return (config.name, *cells, "", "")
    counted = outside if known.get("without_embedding") else size.total
    difference = f"{100 * (counted / known['total'] - 1):+.2f} %"
    return (config.name, *cells, f"{known['total']:,}", difference)


def _published(path: Path) -> dict[str, dict[str, Any]]:
    found = json_of("--published", path, MOST_BYTES)
    if not isinstance(found, dict):
        raise UserError(f"--published: {path}: expected a mapping of names")
    for name, entry in found.items():
        total = entry.get("total") if isinstance(entry, dict) else None
        if not isinstance(total, int) or total < 1:
            raise UserError(f"--published: {path}: {name!r}: expected total, a whole number of parameters")
        more = entry.get("counted_with", [])
        if not isinstance(more, list) or not all(isinstance(override, str) for override in more):
            raise UserError(f"--published: {path}: {name!r}: counted_with: expected a list of overrides")
    return found
