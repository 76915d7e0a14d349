"""The coordinate check: how the activations of a model move in its first steps, by width.

Under muP the change of every activation in a step goes to a size that does not depend on the width (Yang et
al. 2022, arXiv 2203.03466, appendix D.1). Without, it grows or shrinks as a power of the width.

A finite width n adds two terms. The product of an update and an activation is a sum over n columns: besides
the part that both have in common, n terms of random sign leave sqrt(n). And a readout weight, of initial
std ~ 1/n, passes on sqrt(n)/n of what its input has moved. Both are ~ n^-1/2 of the limit and add in squares.
So the power from one width to the next goes to 0, while a wrong learning rate or initial std leaves one of
1/2 or more at every width. All widths but the narrowest decide what is flat.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from tempfile import TemporaryDirectory
from typing import Any

from megamoe.config import RunConfig, load_config
from megamoe.errors import UserError
from megamoe.train.step import evaluate
from megamoe.train.trainer import Trainer

MUP, STANDARD = "muP", "standard"

# By the end of a module's name: what its output is, in the order of the pass.
PLACES = {
    "embedding": re.compile(r"^model\.embedding$"),
    "attention": re.compile(r"\.layers\.\d+\.self_attention$"),
    "router scores": re.compile(r"\.router\.scorer$"),
    "FFN or experts": re.compile(r"\.layers\.\d+\.mlp$|\.inserted$"),
    "block": re.compile(r"decoder\.layers\.\d+$"),
    "logits": re.compile(r"^model\.output_layer$"),
}
FLAT = 0.25  # half of the least exponent, up or down, that a wrong rate or initial std leaves
# A run leaves nothing behind, and nothing but the width differs from another one's.
OVERRIDES = (
    *("optimizer.warmup_steps=0", "optimizer.schedule=constant", "evaluation.batches=0", "data.workers=0"),
    *("checkpoint.save_at_end=false", "log.report=false", "overwrite=true", "train.callbacks=none"),
)

# [place][step] -> (root mean square of the activations, of their change since step 0)
Coordinates = dict[str, list[tuple[float, float]]]


def width_overrides(config: RunConfig, width: int, base: int, kind: str) -> tuple[str, ...]:
    """Return the overrides that make a model of a width: FFN and latent sizes and the number of heads grow.

    Raises:
        UserError: naming the key, if a size would not be whole, or belongs to a group of layers.
    """
    model, moe = config.model, config.moe
    own = ("expert_ffn_hidden_size", "shared_expert_ffn_hidden_size", "latent_size")
    if any(getattr(group, key) for group in moe.groups for key in own):
        raise UserError(
            "moe.groups: has FFN or latent sizes of its own, which do not grow with the width; leave them out"
        )
    sizes = {
        "model.hidden_size": model.hidden_size,
        "model.ffn_hidden_size": model.ffn_hidden_size,
        "model.num_attention_heads": model.num_attention_heads,
        "model.num_query_groups": model.num_query_groups,
        "moe.expert_ffn_hidden_size": moe.expert_ffn_hidden_size,
        "moe.shared_expert_ffn_hidden_size": moe.shared_expert_ffn_hidden_size,
        "moe.latent_size": moe.latent_size,
    }
    found = []
    for key, size in sizes.items():
        if size is None:
            continue
        grown = size * Fraction(width, model.hidden_size)
        if grown.denominator != 1:
            raise UserError(
                f"--widths: {width} makes {key} {size} of hidden size {model.hidden_size} {float(grown):g}, "
                "expected a whole number; choose another width"
            )
        found.append(f"{key}={grown}")
    return (*found, "model.mup=null" if kind == STANDARD else f"model.mup={{base: {base}}}")


def measure(config: str, steps: int, seed: int, overrides: Sequence[str]) -> Coordinates:
    """Return the activations' sizes on the first batch, before the first step and after each.

    All steps train on that batch, as `get_coord_data` of the authors' package mup does: an update has little
    in common with the activations of tokens that it has not seen, and is then mostly terms that fall off.

    config: the file of the run. overrides: of it, for this width.
    """
    found: Coordinates = defaultdict(list)
    with TemporaryDirectory() as folder:
        own = (f"train.steps={steps}", f"seed={seed}", f"output={folder}")
        trainer = Trainer(load_config(config, [*OVERRIDES, *overrides, *own]))
        try:
            watch, batches = _Watch(trainer.model), trainer.take_batches()
            for step in range(steps + 1):
                if step:
                    trainer.step(batches)
                with watch:
                    evaluate(trainer.engine, trainer.context, batches)
                for place, sizes in watch.sizes().items():
                    found[place].append(sizes)
        finally:
            trainer.close()
    return dict(found)


class _Watch:
    """Context that keeps the outputs of a model's modules, on the CPU in fp32."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.first: dict[tuple[str, str], list[Any]] = {}
        self.now: dict[tuple[str, str], list[Any]] = {}

    def __enter__(self) -> None:
        self.now = defaultdict(list)
        self.handles = []
        for name, module in self.model.named_modules():
            for place, pattern in PLACES.items():
                if pattern.search(name):
                    self.handles.append(module.register_forward_hook(self._keeping((place, name))))

    def __exit__(self, *unused: object) -> None:
        for handle in self.handles:
            handle.remove()
        self.first = self.first or dict(self.now)

    def _keeping(self, key: tuple[str, str]) -> Any:
        def keep(module: Any, inputs: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            self.now[key].append(output.detach().float().cpu().clone())

        return keep

    def sizes(self) -> dict[str, tuple[float, float]]:
        """Return (size, change) of each place, over all its layers."""
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for key, outputs in self.now.items():
            for output, before in zip(outputs, self.first[key], strict=True):
                of_place = sums[key[0]]
                of_place[0] += float(output.double().square().sum())
                of_place[1] += float((output - before).double().square().sum())
                of_place[2] += output.numel()
        return {
            place: (math.sqrt(size / count), math.sqrt(change / count))
            for place, (size, change, count) in sums.items()
        }


def means(of_seeds: Sequence[Coordinates]) -> Coordinates:
    """Return at each place and step the mean over the seeds."""
    return {
        place: [
            tuple(sum(sizes) / len(of_seeds) for sizes in zip(*of_step, strict=True))
            for of_step in zip(*(found[place] for found in of_seeds), strict=True)
        ]
        for place in of_seeds[0]
    }


def exponent(sizes: Mapping[int, float]) -> float:
    """Return the slope of log(size) over log(width) by least squares; 0 is flat."""
    points = [(math.log(width), math.log(max(size, 1e-30))) for width, size in sizes.items()]
    x, y = (sum(each) / len(points) for each in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def exponents(of_place: Mapping[int, Sequence[tuple[float, float]]]) -> tuple[float, float, float]:
    """Return the exponents of the size, of the change, and of the change without the narrowest width.

    After the last step. Of two widths both count.
    """
    size, change = ({width: steps[-1][which] for width, steps in of_place.items()} for which in (0, 1))
    wider = sorted(change)[-max(2, len(change) - 1) :]
    return exponent(size), exponent(change), exponent({width: change[width] for width in wider})
