"""muP's learning rates: the parameter groups divided by how their weights depend on the width."""

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from megamoe.compat.deepspeed_zero import whole_shape
from megamoe.config.mup import Scaling
from megamoe.config.schema import ModelConfig, OptimizerConfig
from megamoe.optim.matrices import is_matrix

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
