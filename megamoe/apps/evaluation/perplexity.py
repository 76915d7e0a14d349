"""Perplexity of a trained model, and the FLOPs that its experts spend on it."""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from megamoe.apps.evaluation.trained_model import TrainedModel
from megamoe.config.layer_kinds import kinds
from megamoe.data.batches import Batch, BatchStream, Item
from megamoe.errors import UserError
from megamoe.metrics.names import of_validation_set
from megamoe.model.size import dense_ffn_products, layer_products
from megamoe.parallel.consensus import raise_any_error_fast
from megamoe.parallel.process_groups import replica_group
from megamoe.train.micro_batch import micro_batch_of
from megamoe.train.step import model_inputs

FURTHER = "further/"  # before the names of the objective's metrics among the sums
LARGEST_EXPONENT = 709.0  # exp of more overflows


@dataclass(frozen=True)
class Perplexity:
    """What an evaluation found, over all ranks.

    lm_loss: mean cross entropy of the `tokens` unmasked tokens, in nats. perplexity: exp(lm_loss); infinite
    where this is no number of double precision. experts_per_token: the mean number of experts that compute a
    token in an MoE layer. dropped: the share of pairs that the capacity dropped. expert_flops_per_token:
    floating-point operations of the routed experts for one token, over all layers; 2 for a multiplication
    with its addition. dense_share: the same over those of a dense FFN of `model.ffn_hidden_size` in place of
    every MoE layer, as in Yang et al. 2024 (XMoE), figure 4; 0 for a dense model. seconds: wall time of the
    forward passes. tokens_per_s: all tokens, those without a loss and those of sources included, but no
    padding. load_LE: computed pairs of each expert by MoE layer. further: the objective's metrics, such as
    the accuracy of labels.
    """

    lm_loss: float
    perplexity: float
    tokens: int
    experts_per_token: float
    dropped: float
    expert_flops_per_token: float
    dense_share: float
    seconds: float
    tokens_per_s: float
    load_LE: dict[int, list[int]]
    further: dict[str, float]

    def as_data(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        data = asdict(self)
        load = {str(layer): load_E for layer, load_E in data.pop("load_LE").items()}
        return {**data.pop("further"), **data, "load": load}


def validation_sets(trained: TrainedModel, samples: int | None) -> tuple[Mapping[str, Dataset[Item]], int]:
    """Build the validation sets of the model's configuration; return them by name, and the samples of each.

    samples: None: as many as in training.

    Raises:
        UserError: as `TrainingObjective.datasets`; if there is no set.
    """
    samples = trained.validation_samples if samples is None else samples
    sets = trained.objective.datasets(train_samples=1, validation_samples=samples).validation
    if not sets:
        raise UserError(
            "no validation set: data.split has no second share; name data with --data NAME=PREFIX"
        )
    return sets, samples


@torch.no_grad()
def perplexity_on(trained: TrainedModel, dataset: Any, samples: int, name: str = "valid") -> Perplexity:
    """Evaluate a model on the first `samples` samples of a data set. Collective over all ranks.

    name: the validation set's. With `moe.router.replay` its recorded choices at the checkpoint's step replace
    the selectors'.

    The samples are taken in micro batches of `train.micro_batch_size`, on which capacities depend. On the
    run's own validation set the loss is the one that training reports.

    Raises:
        UserError: if the samples do not divide over micro batches and ranks, or cannot be read.
    """
    sums: dict[str, float] = defaultdict(float)  # of this rank
    load_LE: dict[int, Tensor] = {}
    started = time.perf_counter()
    with trained.routing.evaluation_of(trained.step, of_validation_set(name), samples):
        for number, batch in micro_batches(trained, dataset, samples):
            trained.routing.check_batches([batch])
            _evaluate(trained, batch, number, sums, load_LE)
    return _reduced(trained, sums, load_LE, time.perf_counter() - started)


def _evaluate(
    trained: TrainedModel, batch: Batch, number: int, sums: dict[str, float], load_LE: dict[int, Tensor]
) -> None:
    """Add one micro batch to the sums, and to each layer's loads."""
    trained.context.batch = micro_batch_of(batch, number)
    losses_BS = trained.model(**model_inputs(batch))
    sums["loss"] += float((losses_BS * batch.loss_mask_BS).double().sum())
    sums["tokens"] += float(batch.loss_mask_BS.sum())
    further = trained.objective.evaluation_sums(batch, trained.model.label_logits())
    for name in trained.objective.metrics:
        sums[f"{FURTHER}{name}"] += float(further[name])
    sums["routed_tokens"] += _num_tokens(batch)
    for layer_number, layer in trained.model.moe_layers():
        seen = layer.observation
        assert seen is not None
        load_E = seen.load_E.cpu()
        load_LE[layer_number] = load_E + load_LE.get(layer_number, 0)
        sums["wanted"] += int(seen.wanted_E[: len(load_E)].sum())
        sums["layer_tokens"] += int(seen.width_D.sum())


def _num_tokens(batch: Batch) -> int:
    """Return the tokens of both sides, without padding."""
    lengths = [each for each in (batch.lengths_B, batch.source_lengths_B) if each is not None]
    return sum(int(length_B.sum()) for length_B in lengths) if lengths else batch.tokens_BS.numel()


def micro_batches(trained: TrainedModel, dataset: Any, samples: int) -> Iterator[tuple[int, Batch]]:
    """Yield this rank's micro batches of the first `samples` samples, with their numbers over all ranks.

    Raises:
        UserError: as `perplexity_on`.
    """
    layout, size = trained.layout, trained.config.train.micro_batch_size
    if samples < 1 or samples % (size * layout.data):
        raise UserError(
            f"{samples} samples do not divide over {layout.data} data-parallel ranks and micro batches of "
            f"{size} (train.micro_batch_size); choose a multiple of their product"
        )
    data_rank = layout.data_rank(trained.world.rank)
    with BatchStream(
        dataset,
        start_sample=0,
        micro_batch_size=size,
        data_rank=data_rank,
        data_size=layout.data,
        workers=0,
        make_batch=trained.objective.make_batch,
    ) as stream:
        for place in range(samples // (size * layout.data)):
            batch, problem = None, None
            try:
                batch = next(stream)
            except UserError as error:
                problem = str(error)
            raise_any_error_fast(problem)
            assert batch is not None
            yield place * layout.data + data_rank, batch.to(trained.world.device)


def _reduced(
    trained: TrainedModel, sums: dict[str, float], load_LE: dict[int, Tensor], seconds: float
) -> Perplexity:
    """Sum over the data-parallel ranks; the ranks of a tensor-parallel group have the same numbers."""
    head = torch.tensor([*sums.values()], dtype=torch.float64)
    packed = torch.cat([head, *(load_E.double() for load_E in load_LE.values())]).to(trained.world.device)
    dist.all_reduce(packed, group=replica_group())
    of_head, *of_layers = packed.cpu().split([len(head), *map(len, load_LE.values())])
    total = dict(zip(sums, of_head.tolist(), strict=True))
    loads = {number: load_E.long().tolist() for number, load_E in zip(load_LE, of_layers, strict=True)}
    tokens, routed = max(total["tokens"], 1.0), max(total["routed_tokens"], 1.0)
    pairs, layer_tokens = sum(map(sum, loads.values())), total.get("layer_tokens", 0.0)
    wanted, flops = total.get("wanted", 0.0), 0.0
    for kind in kinds(trained.config):
        of_kind = sum(sum(loads.get(number, ())) for number in kind.layers)
        flops += of_kind * 2 * layer_products(kind.config)[1] / routed
    dense = layer_tokens / routed * 2 * dense_ffn_products(trained.config.model)
    loss = total["loss"] / tokens
    return Perplexity(
        lm_loss=loss,
        perplexity=math.exp(loss) if loss < LARGEST_EXPONENT else math.inf,
        tokens=round(total["tokens"]),
        experts_per_token=pairs / max(layer_tokens, 1),
        dropped=1 - pairs / wanted if wanted else 0.0,
        expert_flops_per_token=flops,
        dense_share=flops / dense if dense else 0.0,
        seconds=seconds,
        tokens_per_s=total["routed_tokens"] / seconds,
        load_LE=loads,
        further={name: total[f"{FURTHER}{name}"] / tokens for name in trained.objective.metrics},
    )
