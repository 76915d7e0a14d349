"""Parameter groups: what an entry of `optimizer.groups` names, weight decay, and muP's rates by width."""

import difflib
import re
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from megamoe.compat.deepspeed_zero import whole_shape
from megamoe.config.mup import Scaling
from megamoe.config.schema import GroupConfig, ModelConfig, OptimizerConfig
from megamoe.config.values import compile_pattern
from megamoe.optim.matrices import is_matrix
from megamoe.parallel.consensus import CollectiveError

Parameter = TypeVar("Parameter")


def divide(
    named: Sequence[tuple[str, Parameter]], groups: Sequence[GroupConfig], elsewhere: Sequence[str] = ()
) -> list[list[Parameter]]:
    """Return the parameters of no group, then those of each group, in the order of `named`; the first match
    counts.

    named: (name, parameter) of the trained parameters of this pipeline stage. elsewhere: the names of those
    of the other stages, which may be the only ones that a pattern matches.

    Raises:
        CollectiveError: naming the pattern, if a group would have no parameter.
    """
    found: list[list[Parameter]] = [[] for _ in range(1 + len(groups))]
    matchers = [compile_pattern(group.pattern) for group in groups]
    matched = [False] * len(groups)
    used = [False] * (1 + len(groups))
    of_stage = dict(named)
    names = [*of_stage, *elsewhere]
    for name in names:
        numbers = [number for number, matches in enumerate(matchers) if matches(name)]
        for number in numbers:
            matched[number] = True
        place = numbers[0] + 1 if numbers else 0
        used[place] = True
        if name in of_stage:
            found[place].append(of_stage[name])
    for number, group in enumerate(groups):
        if not used[number + 1]:
            raise CollectiveError(_refusal(number, group, matched[number], names))
    return found


def _refusal(number: int, group: GroupConfig, matched: bool, names: list[str]) -> str:
    key = f"optimizer.groups.{number}.pattern: {group.pattern!r}"
    if matched:
        return f"{key}: all parameters that it matches belong to groups before it; move it up, or take it out"
    near = difflib.get_close_matches(group.pattern, names, n=3, cutoff=0)
    return f"{key} matches no trained parameter; expected a part of names such as {', '.join(near)}"


def weight_decay(config: OptimizerConfig) -> float:
    """Return the effective weight decay: the configured value, else 0 for Adam and 0.1 for the others."""
    if config.weight_decay is not None:
        return config.weight_decay
    return 0.0 if config.name == "adam" else 0.1


def decays(config: OptimizerConfig) -> bool:
    """Whether any parameter has a weight decay."""
    return weight_decay(config) != 0 or any(group.weight_decay for group in config.groups)


# Embeddings and output layers; vectors of constant experts, which are added to hidden states like a bias.
UNSCALED = re.compile(r"(^|\.)(embedding|output_layer)(\.|$)|\.zero\.vector$")
# Parts of a layer with a fixed number of outputs, such as an expert each.
READING = re.compile(r"(^|\.)(router|losses)\.|\.shared\.(gate|mix)$|\.zero\.mix$")
# Of these, the vectors have an entry for each expert, and so has the matrix of a residual for each score.
OF_EXPERTS = re.compile(r"(^|\.)(router|losses)\.")


def width_powers(name: str, parameter: Tensor, hidden_size: int) -> tuple[float, float]:
    """Return the powers (a, b) of the width multiplier m: AdamW's rate is lr / m^a, Muon's `spectral` rate
    lr / m^b.

    An update of spectral norm sqrt(rows / columns) moves every output by a size that does not depend on the
    width (Yang et al. 2023, arXiv 2310.17813). AdamW's has a norm of about sqrt(rows columns) lr.
    """
    if UNSCALED.search(name):
        return 0.0, 0.0
    if READING.search(name):
        shape = whole_shape(parameter)
        reads = shape[-1] == hidden_size and (len(shape) > 1 or OF_EXPERTS.search(name) is None)
        return (1.0, 0.5) if reads and ".router.residual." not in name else (0.0, 0.0)
    return (1.0, 0.0) if is_matrix(parameter) else (0.0, 0.0)


def by_width(
    groups: Sequence[dict[str, Any]],
    named: Sequence[tuple[str, nn.Parameter]],
    model: ModelConfig,
    config: OptimizerConfig,
) -> list[dict[str, Any]]:
    """Divide each group by its weights' rate; `lr_scale` gets the factor, and the decay is divided by it.

    named: the names of the parameters. A step thus decays every weight by as much as in the base model.
    Muon's scale `moonlight` makes an update's norm grow with sqrt(m), which its rate takes back.
    """
    width = Scaling.of(model).width
    names = {parameter: name for name, parameter in named}
    divided = []
    for group in groups:
        parts: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            of_adamw, of_muon = width_powers(names[parameter], parameter, model.hidden_size)
            moonlight = 0.5 if config.muon.update_scale == "moonlight" else 0.0
            power = of_muon + moonlight if group.get("muon") else of_adamw
            parts.setdefault(width**-power, []).append(parameter)
        for factor, parameters in parts.items():
            changed = {"lr_scale": group["lr_scale"] * factor, "weight_decay": group["weight_decay"] / factor}
            name = group["name"] if factor == 1 else f"{group['name']}_times_{factor:g}"
            divided.append({**group, **changed, "name": name, "params": parameters})
    return divided
