"""The share of values that an activation leaves above 0, in experts and in dense FFNs."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamoe.apps.evaluation.perplexity import micro_batches
from megamoe.apps.evaluation.trained_model import TrainedModel, hooked
from megamoe.config.layer_kinds import kinds
from megamoe.config.schema import Activation
from megamoe.config.shapes import expert_activation
from megamoe.errors import UserError
from megamoe.model.architectures.decoder import GPT
from megamoe.moe.experts.activations import is_gated
from megamoe.moe.experts.grouped import GroupedExperts
from megamoe.moe.layer import MoELayer
from megamoe.train.micro_batch import micro_batch_of
from megamoe.train.step import model_inputs

SIGNED = {"relu", "gelu", "reglu", "geglu"}  # f(x) > 0 where x > 0, and for ReLU and GELU nowhere else


def check_activation(trained: TrainedModel) -> None:
    """Refuse a model whose experts have neither ReLU nor GELU.

    Raises:
        UserError: for such a model.
    """
    for activation in unsigned(trained):
        known = ", ".join(sorted(SIGNED))
        raise UserError(
            f"{trained.path}: positive activations need experts with {known}; these have {activation}"
        )


def unsigned(trained: TrainedModel) -> set[Activation]:
    """Return the experts' activations that use neither ReLU nor GELU, gated or not."""
    return {expert_activation(kind.config) for kind in kinds(trained.config)} - SIGNED


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
            trained.context.batch = micro_batch_of(batch, number)
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

    def add_experts(
        self, module: GroupedExperts, inputs: tuple[Any, ...], options: dict[str, Any], output: Tensor
    ) -> None:
        """Count the values of the experts' rows, without the empty places of `capacity.pad`, which are 0.

        Rows that a loss probes the experts with (`only_gate`) are no token's.
        """
        if options.get("only_gate"):
            return
        rows_NH, counts_E = inputs[0], inputs[1]
        is_taken_N = rows_NH.any(-1)
        expert_N = torch.repeat_interleave(torch.arange(len(counts_E), device=counts_E.device), counts_E)
        counts_E = expert_N[is_taken_N].bincount(minlength=len(counts_E))
        for values in up_projections(module, rows_NH[is_taken_N], counts_E):
            self._add(values)

    def add_dense(
        self,
        module: nn.Module,
        inputs: tuple[Any, ...],
        options: dict[str, Any],
        output: tuple[Tensor, Tensor | None],
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
    """Yield the number of each block with a dense FFN, and the FFN's first linear layer.

    The blocks of multi-token prediction are left out.
    """
    stacks = trained.model.stacks()
    blocks: Iterable[Any] = stacks[0] if isinstance(trained.model, GPT) else chain(*stacks)
    for number, block in enumerate(blocks, start=1):
        with suppress(AttributeError):
            yield number, block.mlp.linear_fc1
