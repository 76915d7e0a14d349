"""What an MoE layer observes of a pass: counts and sums for the metrics, and the losses' share in the
gradient.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megamoe.kernels.choice import DEFAULT_KERNELS, Kernels
from megamoe.kernels.router import gate_sums
from megamoe.moe.part import StepContext
from megamoe.moe.routing import Routing
from megamoe.moe.token_sharding import TokenSharding


@dataclass
class Observation:
    """Statistics of one forward pass over the whole micro batch, on the device and without gradient.

    load_E, wanted_E: int64, the pairs that each expert computes and those that the selector chose for it;
    wanted_E goes on with the experts without computation (`moe.zero_experts`). losses: the auxiliary losses
    by name, unweighted. width_D: int64 [len(wanted_E) + 1], the number of tokens that are computed by d
    experts, at place d. entropy: the sum over tokens of the gate entropy, nats. top_1: the sum
    over tokens of the largest share, see `gate_sums`. gradient_squares: by name, filled in by the backward
    pass where it is measured, see `gradient_share`.
    """

    load_E: Tensor
    wanted_E: Tensor
    losses: dict[str, Tensor]
    width_D: Tensor
    entropy: Tensor
    top_1: Tensor
    gradient_squares: dict[str, Tensor] = field(default_factory=dict)


def observe(
    routing: Routing,
    losses: dict[str, Tensor],
    kernels: Kernels = DEFAULT_KERNELS,
    real: Routing | None = None,
) -> Observation:
    """Return the observation of a micro batch; never waits for the device.

    real: the routing to the experts that compute, if there are others.
    """
    if real is not None and real is not routing:
        wanted_E = routing.wanted_counts_E()
        entropy, top_1, width_D = gate_sums(routing.probs_TE, real.pairs.token_N, kernels)
        return Observation(real.counts_E(), wanted_E, losses, width_D, entropy, top_1)
    load_E = routing.counts_E()
    wanted_E = load_E if routing.wanted is routing.pairs else routing.wanted_counts_E()
    if routing.slots is None:
        entropy, top_1, width_D = gate_sums(routing.probs_TE, routing.pairs.token_N, kernels)
    else:
        entropy, top_1, _ = gate_sums(routing.probs_TE, routing.wanted.token_N, kernels)
        width_D = routing.width_D()
    return Observation(load_E, wanted_E, losses, width_D, entropy, top_1)


WHOLE = ""  # of the gradient from all losses together; no loss has this name


def measure_gradients(
    observation: Observation,
    routing: Routing,
    weighted: dict[str, Tensor],
    context: StepContext,
    token_sharding: TokenSharding,
) -> None:
    """Let the backward pass fill in `observation.gradient_squares`, over this rank's tokens.

    Each is the squared L2 norm of a gradient of the scores: of every auxiliary loss with its weight, by name,
    and of everything together (`WHOLE`), with the language-model loss. All have the scale of the backward
    pass, which cancels in their ratios. weighted: the losses times their weights, with gradient.
    The training gradient does not change. What the losses saved should be kept, see `kept_to_measure`.
    """
    scores_TE = routing.scores_TE
    if not (torch.is_grad_enabled() and scores_TE.requires_grad):
        return  # nothing learns here
    own = token_sharding.local_slice(context, len(scores_TE))
    factor = context.aux_scale * token_sharding.size  # every rank adds the same share of a loss
    by_name: dict[str, Tensor] = {}
    for name, loss in weighted.items():
        if loss.requires_grad:
            (found,) = torch.autograd.grad(loss, scores_TE, retain_graph=True, allow_unused=True)
            if found is not None:
                by_name[name] = found[own] * factor
    observation.gradient_squares = {name: _square(gradient) for name, gradient in by_name.items()}
    missing = (token_sharding.size - 1) / token_sharding.size  # of the auxiliary gradient, on the other ranks

    def keep(gradient_TE: Tensor) -> None:
        whole = gradient_TE[own]
        if missing:
            whole = whole + missing * sum(by_name.values(), torch.zeros_like(whole))
        observation.gradient_squares[WHOLE] = _square(whole)

    scores_TE.register_hook(keep)


def kept_to_measure(context: StepContext) -> AbstractContextManager[Any]:
    """Return what keeps the tensors that are saved for backward inside it, if this step measures gradients.

    Recomputation drops them. Each loss's gradient would then compute the whole block again, in the forward
    pass, and hold it until the backward pass. It is for what follows the scores: tensors of [T, E].
    """
    if not context.measure_gradients:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _square(gradient: Tensor) -> Tensor:
    return gradient.detach().double().square().sum()
