"""The base class of losses that need the model's token losses."""

from megamoe.moe.part import Part


class Objective(Part):
    """A loss that needs the model's token losses: (Routing, context, token_losses_T) -> scalar fp32.

    It is configured under `losses`. The training step calls it after the model's forward pass.
    token_losses_T: fp32, without gradient, 0 for masked tokens. It is no training objective, which says what
    the model predicts (`megamoe/objectives`).
    """

    needs_token_losses = True

    @property
    def num_rollouts(self) -> int:
        """The number of times each sequence is routed in a forward pass."""
        return 1
