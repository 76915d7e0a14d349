"""The numbers of a study of routing that fit into a line."""

from collections.abc import Callable, Iterator
from typing import Any


def _number(value: float | None, pattern: str = "{:.4f}") -> str:
    return "none" if value is None else pattern.format(value)


# (found of one layer) -> its number, for the analyses of one checkpoint
_NUMBERS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "collapse": ("representation collapse RC", _number),
    "required": (
        "required experts",
        lambda found: ", ".join(f"{row['mean']:.3f} for {key}" for key, row in found.items()),
    ),
    "load": (
        "distance of loads in training and inference",
        lambda found: _number(100 * found["distance"], "{:.2f} %"),
    ),
    "tokens": (
        "mutual information with the token, bits",
        lambda found: f"{found['mutual_information']:.4f} (shuffled {found['chance']:.4f})",
    ),
    "coactivation": ("largest lift of two experts", lambda found: _number(found["max_lift"], "{:.3f}")),
    "map": ("map", lambda found: f"{found['method']}, {len(found['first_S'])} tokens"),
}


def summary_lines(results: dict[str, Any]) -> Iterator[str]:
    """Yield lines of text: each checkpoint's numbers by layer, then the comparisons."""
    for row in results["checkpoints"]:
        yield f"{row['run']}, step {row['step']}: loss {row['lm_loss']:.6f}, {row['tokens']:,} tokens"
        for name, found in row["analyses"].items():
            yield from _of_checkpoint(name, found)
    for row in results["comparisons"].get("fluctuation", ()):
        yield f"fluctuation, {row['earlier']} to {row['later']}"
        for number, found in row["layers"].items():
            yield f"  layer {number}: {100 * found['first']:.2f} % of the first choices changed"
    if found := results["comparisons"].get("consistency"):
        yield f"inter-run consistency of {len(found['runs'])} checkpoints"
        for number, layer in found["layers"].items():
            yield f"  layer {number}: {_number(layer['consistency'])}"


def _of_checkpoint(name: str, found: dict[str, Any]) -> Iterator[str]:
    if name == "positive":
        for kind in ("experts", "dense"):
            for number, share in found[kind].items():
                percent = None if share is None else 100 * share
                yield f"  layer {number}, {kind}: positive activations {_number(percent, '{:.2f} %')}"
    elif name == "removal":
        for number, layer in found["layers"].items():
            rise_E = layer["rise_E"]
            worst = max(range(len(rise_E)), key=rise_E.__getitem__)
            yield f"  layer {number}: without expert {worst} the loss rises most, by {rise_E[worst]:.4f} nats"
    else:
        label, number_of = _NUMBERS[name]
        for number, layer in found.items():
            yield f"  layer {number}: {label} {number_of(layer)}"
