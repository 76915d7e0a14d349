"""What experts contribute: the share of positive activations, and the loss without an expert."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamoe.apps.evaluation.perplexity import micro_batches, perplexity_on
from megamoe.apps.evaluation.trained_model import TrainedModel
from megamoe.apps.routing_analysis.collect import hooked
from megamoe.config.shapes import expert_activation
from megamoe.errors import UserError
from megamoe.moe.experts.activations import is_gated
from megamoe.moe.experts.grouped import GroupedExperts
from megamoe.moe.layer import MoELayer
from megamoe.moe.router import Router
from megamoe.moe.routing import Routing
from megamoe.train.step import model_inputs, set_context

SIGNED = {"relu", "gelu", "reglu", "geglu"}  # f(x) > 0 where x > 0, and for ReLU and GELU nowhere else


def check_activation(trained: TrainedModel) -> None:
    """Refuse a model whose experts have neither ReLU nor GELU.

    Raises:
        UserError: for such a model.
    """
    activation = expert_activation(trained.config)
    if activation not in SIGNED:
        raise UserError(
            f"{trained.path}: positive activations need experts with {', '.join(sorted(SIGNED))}; these "
            f"have {activation}"
        )


@torch.no_grad()
def positive_activations(
    trained: TrainedModel, dataset: Any, samples: int, layers: dict[int, MoELayer]
) -> dict[str, dict[str, float | None]]:
    """Return the share of values above 0 after the activation, by layer. Collective over all ranks.

    experts: of the routed experts of these MoE layers, over the rows that they compute. dense: of all blocks
    with a dense FFN whose activation is ReLU or GELU. A gated activation counts f(gate), before the product.
    None: the experts had no row.

    Source: Yang et al. 2024 (XMoE), figure 1 (dense models) and figure 6 (experts).

    Raises:
        UserError: as `check_activation` and `perplexity_on`.
    """
    check_activation(trained)
    activation, device = trained.config.model.activation, trained.world.device
    blocks = dict(_dense_blocks(trained)) if activation in SIGNED else {}
    experts = {number: _Positives(device) for number in layers}
    dense = {number: _Positives(device, is_gated(activation)) for number in blocks}
    hooks: list[tuple[nn.Module, Any]] = [
        (module, experts[number].add_experts)
        for number, layer in layers.items()
        for module in layer.experts.modules()  # an expert of several sub-layers has several
        if isinstance(module, GroupedExperts)
    ]
    hooks += [(linear, dense[number].add_dense) for number, linear in blocks.items()]
    with hooked(hooks):
        for number, batch in micro_batches(trained, dataset, samples):
            set_context(trained.context, batch, number)
            trained.model(**model_inputs(batch))
    return {
        "experts": {str(number): found.share() for number, found in experts.items()},
        "dense": {str(number): found.share() for number, found in dense.items()},
    }


def up_projections(experts: GroupedExperts, rows_NH: Tensor, counts_E: Tensor) -> Iterator[Tensor]:
    """Yield what each expert's activation f reads, [n, F]: the first product, or of a gated one the gate."""
    for expert, rows in enumerate(rows_NH.split(counts_E.tolist())):
        rows_nF = rows @ experts.up[expert].T
        if experts.up_bias is not None:
            rows_nF = rows_nF + experts.up_bias[expert]
        yield rows_nF.chunk(2, dim=-1)[0] if is_gated(experts.activation) else rows_nF


class _Positives:
    """Values above 0, and all values, of this rank. gated: whether a dense FFN's activation is gated."""

    def __init__(self, device: torch.device, gated: bool = False) -> None:
        self.counts, self._gated = torch.zeros(2, dtype=torch.int64, device=device), gated

    def add_experts(self, module: GroupedExperts, inputs: tuple[Any, ...], output: Tensor) -> None:
        for values in up_projections(module, inputs[0], inputs[1]):
            self._add(values)

    def add_dense(
        self, module: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]
    ) -> None:
        values, bias = output
        values = values if bias is None else values + bias
        self._add(values.chunk(2, dim=-1)[0] if self._gated else values)

    def _add(self, values: Tensor) -> None:
        self.counts[0] += (values > 0).sum()
        self.counts[1] += values.numel()

    def share(self) -> float | None:
        """Return the share over all ranks: each computes its own rows, or its own slice of an FFN."""
        dist.all_reduce(self.counts)
        positive, values = self.counts.tolist()
        return positive / values if values else None


def _dense_blocks(trained: TrainedModel) -> Iterator[tuple[int, nn.Module]]:
    """Yield the number of each block with a dense FFN, and the FFN's first linear layer."""
    for block in trained.decoder.model.decoder.layers:
        with suppress(AttributeError):
            yield block.layer_number, block.mlp.linear_fc1


def removal(trained: TrainedModel, dataset: Any, samples: int, layers: dict[int, MoELayer]) -> dict[str, Any]:
    """Evaluate the model once for each expert of the layers, without that expert. Collective over all ranks.

    A removed expert computes nothing: its pairs are dropped after the router, and a token's other pairs keep
    their weights. No token is sent elsewhere instead. Returns lm_loss: of the whole model, in nats. rise_E:
    by layer, how much the loss rises without each expert, in nats; negative where it falls. share_E: the
    share of the layer's pairs that the expert computes.

    Source: ours; Michel et al. 2019 remove attention heads one at a time in the same way.
    """
    whole = perplexity_on(trained, dataset, samples)
    found: dict[str, Any] = {"lm_loss": whole.lm_loss, "layers": {}}
    for number, layer in layers.items():
        rise_E = []
        for expert in range(layer.num_experts):
            with without_expert(layer, expert):
                rise_E.append(perplexity_on(trained, dataset, samples).lm_loss - whole.lm_loss)
        load_E = whole.load_LE[number]
        found["layers"][str(number)] = {
            "rise_E": rise_E,
            "share_E": [load / max(sum(load_E), 1) for load in load_E],
        }
    return found


def without_expert(layer: MoELayer, expert: int) -> AbstractContextManager[None]:
    """Drop the pairs of one expert of a layer."""

    def drop(router: Router, inputs: tuple[Any, ...], routing: Routing) -> Routing:
        return replace(routing, pairs=routing.pairs.keep(routing.pairs.expert_N != expert))

    return hooked([(layer.router, drop)])
