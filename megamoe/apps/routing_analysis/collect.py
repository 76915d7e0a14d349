"""One pass of a model over a data set: what the routers of its MoE layers saw and chose, and samples of
its tokens.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.apps.evaluation.perplexity import micro_batches
from megamoe.apps.evaluation.trained_model import TrainedModel, hooked
from megamoe.data.batches import Batch
from megamoe.errors import UserError
from megamoe.moe.layer import MoELayer
from megamoe.moe.router import Router
from megamoe.moe.routing import Routing
from megamoe.parallel.process_groups import replica_group
from megamoe.train.micro_batch import micro_batch_of
from megamoe.train.step import model_inputs


@dataclass(frozen=True)
class TokenSample:
    """Some tokens of a data set, by their index: sample number * sequence length + position.

    index_S: int64, ascending, without repetition. The same data set and size give the same tokens, at any
    layout and for any checkpoint.
    """

    index_S: Tensor

    @classmethod
    def draw(cls, total: int, size: int) -> "TokenSample":
        """Return `size` of `total` tokens, evenly drawn with a fixed seed; all of them if there are fewer."""
        drawn = range(total) if size >= total else sorted(random.Random(0).sample(range(total), size))
        return cls(torch.tensor(list(drawn), dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.index_S)

    def find(self, index_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of the tokens are in the sample, as (place in the sample, row in index_T).

        index_T: int64 token indices. Both results: int64 [M], on the CPU.
        """
        index_T = index_T.cpu()
        if not len(self):
            empty = torch.zeros(0, dtype=torch.int64)
            return empty, empty
        place_T = torch.searchsorted(self.index_S, index_T).clamp(max=len(self) - 1)
        row_M = (self.index_S[place_T] == index_T).nonzero().squeeze(1)
        return place_T[row_M], row_M


WINDOW = 8  # tokens before and after a sampled token that are kept as its text


@dataclass
class LayerPass:
    """What one MoE layer's router did. All tensors are on the CPU.

    Of all tokens: load_E: int64, the pairs that were computed.
    required_CE: int64, at [c, m - 1] the number of tokens that need m experts for the c-th threshold.
    Of the sampled tokens: hidden_SH: fp32, what the router reads. projected_SD: fp32, the same in the space
    in which the scorer compares it with experts; None if that is the hidden space. chosen_SE: bool, the
    experts that the selector chose. first_S: int64, the first of them, -1 if a token has none.
    """

    load_E: Tensor
    required_CE: Tensor
    hidden_SH: Tensor
    projected_SD: Tensor | None
    chosen_SE: Tensor
    first_S: Tensor


@dataclass
class RoutingPass:
    """A pass over a data set, summed over all ranks.

    sample: the tokens that are kept one by one. tokens: number of tokens routed. lm_loss: mean cross entropy
    in nats. thresholds: those of `LayerPass.required_CE`. layers: by number. window_SW: int64, the ids of
    each sampled token and of `WINDOW` tokens on both sides, -1 beyond the sequence.
    """

    sample: TokenSample
    tokens: int
    lm_loss: float
    thresholds: tuple[float, ...]
    layers: dict[int, LayerPass]
    window_SW: Tensor

    @property
    def token_S(self) -> Tensor:
        """The ids of the sampled tokens, int64."""
        return self.window_SW[:, WINDOW]


def chosen_layers(trained: TrainedModel, numbers: Sequence[int] | None) -> dict[int, MoELayer]:
    """Return the MoE layers of these numbers, or all of them.

    Raises:
        UserError: if the model has no MoE layer, or none of such a number.
    """
    layers = dict(trained.model.moe_layers())
    if not layers:
        raise UserError(f"{trained.path}: the model is dense; expected one with MoE layers")
    for number in numbers or ():
        if number not in layers:
            raise UserError(
                f"{trained.path}: layer {number} is no MoE layer; it has {', '.join(map(str, layers))}"
            )
    return {number: layers[number] for number in numbers} if numbers else layers


@torch.no_grad()
def collect(
    trained: TrainedModel,
    dataset: Any,
    samples: int,
    *,
    sample: TokenSample,
    layers: dict[int, MoELayer],
    thresholds: tuple[float, ...] = (),
) -> RoutingPass:
    """Run the model over the first `samples` samples of a data set. Collective over all ranks.

    The samples are taken in micro batches of `train.micro_batch_size`, on which capacities depend.

    Raises:
        UserError: as `perplexity_on`.
    """
    found = {number: _LayerSums(layer, len(sample), thresholds) for number, layer in layers.items()}
    window_SW = torch.zeros(len(sample), 2 * WINDOW + 1, dtype=torch.int64)
    loss = torch.zeros(3, dtype=torch.float64)
    with hooked((layers[number].router, sums.add) for number, sums in found.items()):
        for number, batch in micro_batches(trained, dataset, samples):
            trained.context.batch = micro_batch_of(batch, number)
            index_T = trained.context.token_index(batch.tokens_BS.numel(), batch.tokens_BS.device)
            place_M, row_M = sample.find(index_T)
            for sums in found.values():
                sums.place_M, sums.row_M = place_M, row_M
            window_SW[place_M] = windows(batch, row_M) + 1
            losses_BS = trained.model(**model_inputs(batch))
            masked_BS = losses_BS * batch.loss_mask_BS
            parts = (masked_BS.double().sum(), batch.loss_mask_BS.sum(), masked_BS.numel())
            loss += torch.tensor([float(part) for part in parts], dtype=torch.float64)
    device = trained.world.device
    summed, unmasked, tokens = _over_ranks(loss, device).tolist()
    return RoutingPass(
        sample=sample,
        tokens=round(tokens),
        lm_loss=summed / max(unmasked, 1.0),
        thresholds=thresholds,
        layers={number: sums.reduced(device) for number, sums in found.items()},
        window_SW=_over_ranks(window_SW, device) - 1,
    )


def windows(batch: Batch, row_M: Tensor) -> Tensor:
    """Return the ids around tokens of a micro batch, int64 [M, W]; -1 beyond the sequence.

    row_M: int64 numbers of tokens, s * B + b.
    """
    tokens_BS = batch.tokens_BS.cpu()
    num_sequences, length = tokens_BS.shape
    around_MW = row_M[:, None] // num_sequences + torch.arange(-WINDOW, WINDOW + 1)
    inside_MW = (around_MW >= 0) & (around_MW < length)
    ids_MW = tokens_BS[row_M[:, None] % num_sequences, around_MW.clamp(0, length - 1)]
    return torch.where(inside_MW, ids_MW, -1)


def required_experts(probs_TE: Tensor, threshold: float) -> Tensor:
    """Return how many experts each token needs for its largest p to reach a share of their sum, int64 [T].

    Source: Yang et al. 2024 (XMoE), section 3.2, eq. 5, and figure 5. A threshold of 1 needs all experts with
    p > 0; in fp32 a running sum may reach 1 before.
    """
    if threshold >= 1:
        return (probs_TE > 0).sum(-1).clamp(min=1)
    sums_TE = probs_TE.sort(dim=-1, descending=True).values.cumsum(-1)
    too_few_T = (sums_TE < threshold * probs_TE.sum(-1, keepdim=True)).sum(-1)
    return (too_few_T + 1).clamp(max=probs_TE.shape[1])


class _LayerSums:
    """What a layer's router did on this rank.

    found: rows of tokens of other ranks are 0; chosen_SE is int32, and first_S is 1 more than in the result.
    place_M, row_M: the sampled tokens of the micro batch, as `TokenSample.find` returns them.
    """

    place_M: Tensor
    row_M: Tensor

    def __init__(self, layer: MoELayer, size: int, thresholds: tuple[float, ...]) -> None:
        dims, device = layer.router.dims, next(layer.parameters()).device
        self._thresholds = thresholds
        # A scorer that compares tokens and experts in another space has this method.
        self._project: Callable[[Tensor], Tensor] | None = getattr(layer.router.scorer, "project", None)
        projected_SD = None
        if self._project is not None:
            width = self._project(torch.zeros(1, dims.hidden_size, device=device)).shape[1]
            projected_SD = torch.zeros(size, width)
        self.found = LayerPass(
            load_E=torch.zeros(dims.num_experts, dtype=torch.int64),
            required_CE=torch.zeros(len(thresholds), dims.num_experts, dtype=torch.int64),
            hidden_SH=torch.zeros(size, dims.hidden_size),
            projected_SD=projected_SD,
            chosen_SE=torch.zeros(size, dims.num_experts, dtype=torch.int32),
            first_S=torch.zeros(size, dtype=torch.int64),
        )

    def add(self, router: Router, inputs: tuple[Any, ...], options: dict[str, Any], routing: Routing) -> None:
        """Add a micro batch: a forward hook of the layer's router."""
        self.found.load_E += routing.counts_E().cpu()
        for c, threshold in enumerate(self._thresholds):
            number_T = required_experts(routing.probs_TE, threshold)
            self.found.required_CE[c] += torch.bincount(number_T.cpu() - 1, minlength=routing.num_experts)
        if len(self.found.first_S):
            # Collective under tensor parallelism, so also where no token is in the sample.
            self._keep(router.token_sharding.all_gather(inputs[0]), routing)

    def _keep(self, hidden_TH: Tensor, routing: Routing) -> None:
        found, place_M, row_M = self.found, self.place_M, self.row_M
        hidden_MH = hidden_TH[row_M.to(hidden_TH.device)].float()
        found.hidden_SH[place_M] = hidden_MH.cpu()
        if self._project is not None and found.projected_SD is not None:
            found.projected_SD[place_M] = self._project(hidden_MH).float().cpu()
        token_N, expert_N = routing.wanted.token_N.cpu(), routing.wanted.expert_N.cpu()
        chosen_TE = torch.zeros(routing.num_tokens, routing.num_experts, dtype=torch.int32)
        chosen_TE[token_N, expert_N] = 1
        found.chosen_SE[place_M] = chosen_TE[row_M]
        is_first_N = (routing.wanted.choice_N == 0).cpu()
        first_T = torch.zeros(routing.num_tokens, dtype=torch.int64)
        first_T[token_N[is_first_N]] = expert_N[is_first_N] + 1
        found.first_S[place_M] = first_T[row_M]

    def reduced(self, device: torch.device) -> LayerPass:
        """Sum over the data-parallel ranks; each sampled token has its values on one of them."""
        summed: dict[str, Any] = {
            name: None if tensor is None else _over_ranks(tensor, device)
            for name, tensor in vars(self.found).items()
        }
        summed |= {"chosen_SE": summed["chosen_SE"].bool(), "first_S": summed["first_S"] - 1}
        return LayerPass(**summed)


def _over_ranks(tensor: Tensor, device: torch.device) -> Tensor:
    if not tensor.numel():
        return tensor
    on_device = tensor.to(device)
    dist.all_reduce(on_device, group=replica_group())
    return on_device.cpu()
