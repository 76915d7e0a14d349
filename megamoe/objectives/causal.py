"""Language modelling: predict each next token."""

from megamoe.objectives.objective import TrainingObjective
from megamoe.registry import register


@register("objective", "causal")
class Causal(TrainingObjective):
    """Predict the next token from the tokens before it; the data's samples are made for that already.

    Source: Radford et al. 2018 (GPT), section 3.1.
    """

    architectures = ("decoder",)
