"""What all architectures have in common: a model that returns the loss of each label, with MoE layers."""

from collections.abc import Iterator

from torch import Tensor, nn

from megamoe.model.block import Block
from megamoe.moe.layer import MoELayer


class LanguageModel(nn.Module):
    """A transformer that returns the cross entropy of each label, fp32 [B, S], in nats.

    `stacks` are its stacks of blocks, in the order of their blocks' numbers. forward takes the keyword
    arguments of `megamoe.train.step.model_inputs`, and label_smoothing: a share of the target that all the
    other words get evenly.
    """

    def stacks(self) -> list[nn.ModuleList]:
        """Return the stacks of blocks, in the order of the numbers of their blocks."""
        raise NotImplementedError

    def label_logits(self) -> Tensor | None:
        """Return the logits of the last forward pass in evaluation mode, fp32; see `LabelHead`.

        None for a model that predicts tokens.
        """
        return None

    def moe_layers(self) -> Iterator[tuple[int, MoELayer]]:
        """Yield (number, layer) of every MoE layer.

        The number is that of its block, or of the block before it. Blocks are counted from 1 through all
        stacks.
        """
        blocks = [block for stack in self.stacks() for block in stack]
        for number, block in enumerate(blocks, 1):
            assert isinstance(block, Block)
            for layer in block.moe_layers():
                yield number, layer
