"""Jobs that find every parameter's gradient: the engine's, and that of the plain training loss.

    loss = sum of masked token losses / number of unmasked tokens, both over the whole batch
         + mean over micro batches of the sum over layers and losses of weight * loss

The engine's gradient is read from AdamW's first moment after one step from zero: (1 - beta1) * gradient.
"""

import re
from collections import defaultdict
from typing import Any

import torch
from deepspeed.utils import safe_get_full_optimizer_state
from torch import Tensor

from megamoe.config import RunConfig
from megamoe.config.schema import MoEConfig
from megamoe.data.batches import BatchStream
from megamoe.data.datasets import build_datasets, resolve_vocabulary
from megamoe.kernels.choice import Kernels
from megamoe.model.architectures.language_model import LanguageModel
from megamoe.model.build import build_model
from megamoe.moe.layer import LayerShape, MoELayer
from megamoe.moe.objective import Objective
from megamoe.moe.part import Part, StepContext
from megamoe.moe.router import Router
from megamoe.moe.routing import Routing
from megamoe.parallel import launch
from megamoe.parallel.layout import Layout
from megamoe.parallel.process_groups import start_groups
from megamoe.train.micro_batch import micro_batch_of
from megamoe.train.step import model_inputs, num_rollouts
from megamoe.train.trainer import Trainer
from tests.support.ranks.runs import small_run

Found = dict[str, Any]
Changes = dict[str, Any]


def gradients_of_the_engine(several: list[Changes]) -> list[Found]:
    """Job: one step of each run; {"gradients": {name: tensor}, "norm": float} of this rank.

    cuts: {name: (dimension, stride)} of what tensor parallelism cuts, as Megatron-Core marks it. buffers: by
    name, after the step.
    """
    return [_engine_step(small_run(**changes)) for changes in several]


def _engine_step(config: RunConfig) -> Found:
    trainer = Trainer(config)
    engine = trainer.engine
    try:
        record, _ = trainer.step()
        if engine.stage > 0:
            # DeepSpeed links parameters to their moments after the first group's step, when the other
            # groups have none yet.
            zero = engine._engine.optimizer
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()
        gradients = {}
        for name, parameter in engine.model.named_parameters():
            if engine.stage > 0:
                moment = safe_get_full_optimizer_state(parameter, "exp_avg")
            else:  # a parameter that got no gradient has no moment
                moment = engine.inner_optimizer.state[parameter].get("exp_avg", torch.zeros_like(parameter))
            gradients[name] = moment.clone() / (1 - config.optimizer.beta1)
        cuts = {
            name: tuple(getattr(parameter, f"partition_{word}") for word in ("dim", "stride"))
            for name, parameter in engine.model.named_parameters()
            if getattr(parameter, "tensor_model_parallel", False)
        }
        buffers = {name: buffer.clone() for name, buffer in engine.model.named_buffers()}
        return {"gradients": gradients, "norm": record.grad_norm, "cuts": cuts, "buffers": buffers}
    finally:
        trainer.release()


def gradients_of_the_formula(several: list[tuple[Changes, int, int]]) -> list[Found]:
    """Job for one rank: the loss of the first micro batches of each run as the formula above has it.

    several: (changes of `small_run`, number of micro batches, number of ranks whose micro batches together
    a loss of the scope `global_batch` looks at).
    """
    launch.start(launch.find_world(), timeout_minutes=1)
    start_groups(Layout(1), timeout_minutes=1)
    return [_formula(small_run(**changes), size, ranks) for changes, size, ranks in several]


def _formula(config: RunConfig, batch_size: int, ranks: int) -> Found:
    vocabulary = resolve_vocabulary(config.data, config.model.vocab_size)
    context = StepContext(seed=config.seed, step=1, aux_scale=0.0)

    def make_layer(moe: MoEConfig, shape: LayerShape) -> MoELayer:
        return MoELayer(moe, shape, context)

    model = build_model(config, vocabulary.size, make_layer, Kernels.of(config.model))
    rollouts = num_rollouts(model)
    weighted: list[Tensor] = []
    routings: dict[int, list[Routing]] = defaultdict(list)
    _collect(model, weighted, routings)
    lm_sum, tokens = torch.zeros(()), 0.0
    with _micro_batches(config, batch_size) as stream:
        for number in range(batch_size):
            batch = next(stream).repeat(rollouts)
            context.batch = micro_batch_of(batch, number, rollouts)
            masked_BS = model(**model_inputs(batch)) * batch.loss_mask_BS
            lm_sum = lm_sum + masked_BS.sum() / rollouts
            tokens += float(batch.loss_mask_BS.sum()) / rollouts
            for _, layer in model.moe_layers():
                if layer.losses.objectives:
                    weighted.append(layer.objective(masked_BS.transpose(0, 1).reshape(-1)))
    weighted += _global_balance(model, routings, ranks)
    loss = lm_sum / tokens + sum(weighted, torch.zeros(())) / batch_size
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    gradients = {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for name, parameter, gradient in zip(names, parameters, found, strict=True)
    }
    norm = torch.cat([gradient.double().flatten() for gradient in gradients.values()]).norm()
    return {"gradients": gradients, "norm": float(norm)}


def _collect(model: LanguageModel, weighted: list[Tensor], routings: dict[int, list[Routing]]) -> None:
    def record_loss(part: Part, inputs: tuple[Any, ...], value: Tensor) -> None:
        if getattr(part.config, "scope", None) != "global_batch":
            weighted.append(part.config.weight * value)

    def record_routing(router: Router, inputs: tuple[Any, ...], routing: Routing) -> None:
        routings[router.dims.layer].append(routing)

    for _, layer in model.moe_layers():
        layer.router.register_forward_hook(record_routing)
        for loss in layer.losses.values():
            if not isinstance(loss, Objective):
                loss.register_forward_hook(record_loss)


def _global_balance(model: LanguageModel, routings: dict[int, list[Routing]], ranks: int) -> list[Tensor]:
    """E sum_i f_i P_i over the micro batches that `ranks` ranks have at a time, once for each of them."""
    terms: list[Tensor] = []
    for number, layer in model.moe_layers():
        for loss in layer.losses.values():
            config: Any = loss.config
            if getattr(config, "scope", None) != "global_batch":
                continue
            for first in range(0, len(routings[number]), ranks):
                together = routings[number][first : first + ranks]
                wanted_N = torch.cat([routing.wanted.expert_N for routing in together])
                fraction_E = torch.bincount(wanted_N, minlength=layer.num_experts) / wanted_N.numel()
                mean_E = torch.cat([routing.probs_TE for routing in together]).mean(0)
                terms.append(ranks * config.weight * layer.num_experts * (fraction_E * mean_E).sum())
    return terms


def _micro_batches(config: RunConfig, samples: int) -> BatchStream:
    vocabulary = resolve_vocabulary(config.data, config.model.vocab_size)
    data = build_datasets(
        config.data, vocabulary, seed=config.seed, train_samples=samples, validation_samples=0
    )
    return BatchStream(data.train, start_sample=0, micro_batch_size=1, data_rank=0, data_size=1, workers=0)


def assert_same(
    found: list[Found], expected: Found, layout: Layout, tolerance: float, only: str = "."
) -> None:
    """Every rank's gradients are those of the formula: its piece of what is cut, the rest whole.

    only: a pattern of the names that are compared. A pipeline stage has some of the names.
    """
    largest = max(float(gradient.abs().max()) for gradient in expected["gradients"].values())
    for name, gradient in expected["gradients"].items():
        # What is zero but for rounding is held against the largest gradient of the model.
        scale = max(float(gradient.abs().max()), 1e-4 * largest)
        for rank, one in enumerate(found):
            if name not in one["gradients"] or not re.search(only, name):
                continue
            ours, piece = (
                one["gradients"][name],
                _piece(expected["gradients"], name, one["cuts"], layout, rank),
            )
            assert ours.shape == piece.shape, f"{name} of rank {rank}: {ours.shape}, not {piece.shape}"
            error = float((ours - piece).abs().max()) / scale
            assert error < tolerance, f"{name} of rank {rank}: off by {error:.1e}"
    for one in found:
        assert abs(one["norm"] / expected["norm"] - 1) < tolerance


def _piece(whole: dict[str, Tensor], name: str, cuts: dict[str, Any], layout: Layout, rank: int) -> Tensor:
    """Return a rank's part of a whole gradient."""
    gradient = whole[name]
    if ".experts." in name:
        # SwiGLU's score function and value stand above each other, in twice as many rows as the FFN size.
        ffn_size = whole[name.removesuffix(".up") + ".down"].shape[2] if name.endswith(".up") else 0
        dimension, stride = (1, gradient.shape[1] // ffn_size) if ffn_size else (2, 1)
        gradient = gradient.chunk(layout.expert)[layout.expert_rank(rank)]
        return _cut(gradient, dimension, stride, rank % layout.expert_tensor, layout.expert_tensor)
    if name in cuts:
        dimension, stride = cuts[name]
        return _cut(gradient, dimension, stride, layout.tensor_rank(rank), layout.tensor)
    return gradient


def _cut(whole: Tensor, dimension: int, stride: int, index: int, count: int) -> Tensor:
    """One of `count` pieces; stride: how many parts are stacked in the dimension, each of which is cut."""
    if count == 1:
        return whole
    return torch.cat(whole.chunk(stride * count, dimension)[index::count], dimension)
