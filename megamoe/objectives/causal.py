"""Language modelling: predict each next token."""

from megamoe.objectives.objective import TrainingObjective
from megamoe.registry import register


@register("objective", "causal")
class Causal(TrainingObjective):
    """The next token, given the tokens before it. The data's samples are such pairs already."""

    architectures = ("decoder",)
