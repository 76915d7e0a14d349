"""The configuration's rotary positions: as a value for our kernels, and as Megatron-Core's module."""

from dataclasses import fields
from typing import Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel

from megamoe.config.model_schema import ModelConfig, RotaryConfig
from megamoe.kernels.attention.rotary import LinearScaling, Llama3Scaling, Rotary, Scaling, YarnScaling
from megamoe.model.modules import Modules

SCALINGS: dict[str, Any] = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}


def rotary_of(model: ModelConfig) -> Rotary:
    """Return the rotary positions of a checked configuration with `position: rope`."""
    rotary = model.rotary
    return Rotary(float(model.rope_base), rotary.share, rotary.interleaved, _scaling(rotary))


def _scaling(rotary: RotaryConfig) -> Scaling | None:
    """Return the scaling that is named, whose fields are keys of the configuration."""
    if rotary.scaling == "none":
        return None
    kind: type[Scaling] = SCALINGS[rotary.scaling]
    values = {field.name: getattr(rotary, field.name) for field in fields(kind)}
    return kind(**{name: value for name, value in values.items() if value is not None})


class Frequencies(RotaryEmbedding):
    """Megatron-Core's rotary positions, with our frequencies.

    Its own scalings lack keys: that of Llama 3 has fixed bounds, and YaRN's no interleaved pairs.
    """

    def __init__(self, rotary: Rotary, size: int) -> None:
        super().__init__(size, 1.0, rotary_interleaved=rotary.interleaved, use_cpu_initialization=True)
        self.inv_freq = rotary.inverse_frequencies(size)


def position_options(model: ModelConfig, modules: Modules) -> dict[str, Any]:
    """Return keyword arguments for `BlockConfig` by which our attention or Megatron-Core's rotates heads."""
    if model.position != "rope" or model.latent is not None:
        return {"apply_rope_fusion": False}
    rotary = rotary_of(model)
    if modules.own_rotation:
        return {"own_rotary": rotary, "apply_rope_fusion": False}
    # Transformer Engine's kernel has no factor, and interleaved pairs in its later versions only.
    equal = rotary.attention_factor == 1.0 and not rotary.interleaved
    return {
        "rotary_interleaved": rotary.interleaved,
        "rotary_factor": rotary.attention_factor,
        "apply_rope_fusion": modules.fused_rotation and equal,
    }


def set_rotary_frequencies(decoder: GPTModel, rotary: Rotary) -> None:
    """Give a model in which Megatron-Core rotates heads our frequencies."""
    decoder.rotary_pos_emb = Frequencies(rotary, decoder.config.kv_channels)
