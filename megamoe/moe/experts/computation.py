"""How a layer's routed experts compute the rows of a dispatch, as the configuration decides."""

from typing import Any

from torch import Tensor, nn

from megamoe.errors import UserError
from megamoe.moe.dispatch.dispatcher import Dispatcher, LocalDispatch
from megamoe.moe.experts.dropout import ExpertDropout
from megamoe.moe.recompute import recomputed


class ExpertComputation:
    """Calls the experts with what they and the dispatch need beside the rows.

    recomputes: the backward pass computes the experts again. weighs_inside: the pairs' weights multiply the
    activations, and not the outputs (`moe.weights_in_activation`). reads_counts: the experts' products read
    their counts on the host.

    Raises:
        UserError: if the weights are needed at the experts and the exchange does not send them.
    """

    def __init__(
        self,
        experts: nn.Module,
        dispatcher: Dispatcher,
        *,
        recomputes: bool,
        weighs_inside: bool,
        reads_counts: bool,
    ) -> None:
        if weighs_inside and not dispatcher.sends_weights:
            raise UserError(
                f"moe.weights_in_activation: the exchange {type(dispatcher).__name__} does not send the "
                "weights to the experts; set it to false, or parallel.exchange to direct or by_node"
            )
        self._experts: Any = experts
        self.dispatcher = dispatcher
        self._recomputes, self._weighs_inside, self._reads_counts = recomputes, weighs_inside, reads_counts
        self._delays = not recomputes and not isinstance(dispatcher, LocalDispatch)

    def delayed_gradients(self) -> Any:
        """Let the experts' weight gradients be computed beside the exchange of the rows' gradients."""
        return self._experts.put_off_gradients() if self._delays else None

    def __call__(
        self, rows_NH: Tensor, counts_E: Tensor, state: Any, dropout: ExpertDropout | None, delayed: Any
    ) -> Tensor:
        """Return the experts' outputs of the rows of `Dispatcher.finish`, [N, H]; state: of the dispatch."""
        options: dict[str, Any] = {}
        if self._weighs_inside:
            options["weight_N"] = self.dispatcher.dispatched_weights(state)
        if self._reads_counts:
            host_E = self.dispatcher.host_counts(state)
            # Where nothing is exchanged, this is the layer's one wait for the device.
            options["host_E"] = counts_E.cpu() if host_E is None else host_E
        inputs = rows_NH, counts_E, dropout, delayed
        output_NH: Tensor
        if self._recomputes:
            output_NH = recomputed(self._experts, [], *inputs, **options)
        else:
            output_NH = self._experts(*inputs, **options)
        return output_NH if dropout is None else dropout.on_output(output_NH)

    def combine(self, rows_NH: Tensor, state: Any) -> Tensor:
        """Return each token's weighted sum of its experts' outputs, [T, H]."""
        dispatcher = self.dispatcher
        return (dispatcher.combine_weighted if self._weighs_inside else dispatcher.combine)(rows_NH, state)
