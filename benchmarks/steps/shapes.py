"""The shapes at which steps are compared, and what is asked of them there."""

from dataclasses import dataclass

from megamoe.config import RunConfig
from megamoe.config.shapes import expert_ffn_size
from megamoe.moe.router import mean_choices

OPTIMIZER_BAR = 1.1  # over one flat tensor of as many parameters
TRANSFORMERS_BAR = 1.3  # at least: the seconds of its step over ours
STARTUP_BAR = 20.0  # seconds, of the demo


@dataclass(frozen=True)
class Shape:
    """A model whose blocks are all MoE, and a step's tokens, in sequences of one micro batch."""

    blocks: int
    hidden: int
    heads: int
    ffn: int
    experts: int
    choices: int
    sequence: int
    tokens: int

    @classmethod
    def of(cls, config: RunConfig) -> "Shape":
        """Return the shape of a configuration; its blocks need not all be MoE."""
        model, train = config.model, config.train
        sequences = train.global_batch_size or train.micro_batch_size
        return cls(
            blocks=model.num_layers,
            hidden=model.hidden_size,
            heads=model.num_attention_heads,
            ffn=expert_ffn_size(config),
            experts=config.moe.num_experts,
            choices=round(mean_choices(config.moe)),
            sequence=config.data.sequence_length,
            tokens=sequences * config.data.sequence_length,
        )

    def overrides(self) -> list[str]:
        """Return the overrides that give a configuration this shape."""
        sequences = self.tokens // self.sequence
        return [
            f"model.num_layers={self.blocks}",
            f"model.hidden_size={self.hidden}",
            f"model.num_attention_heads={self.heads}",
            "moe.layers.every=1",
            f"moe.expert_ffn_hidden_size={self.ffn}",
            f"moe.num_experts={self.experts}",
            f"moe.router.selector.k={self.choices}",
            f"data.sequence_length={self.sequence}",
            f"train.micro_batch_size={sequences}",
            f"train.global_batch_size={sequences}",
        ]


SHAPES = {"demo": Shape(4, 256, 4, 256, 8, 2, 256, 2048), "large": Shape(8, 512, 8, 1024, 8, 2, 512, 4096)}
# Forward and backward of the MoE model over the dense one's, by shape and precision.
DENSE_BARS = {"demo": {"fp32": 1.15, "bf16": 1.25}, "large": {"fp32": 1.10, "bf16": 1.15}}


def name_of(config: RunConfig) -> str | None:
    """Return the name of the shape of SHAPES that a configuration has."""
    shape, every = Shape.of(config), config.moe.layers.every == 1
    return next((name for name, known in SHAPES.items() if every and known == shape), None)
