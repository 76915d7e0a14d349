"""The gradient of every parameter, experts too, against the training loss written down plainly.

    loss = sum of masked token losses / number of unmasked tokens, both over the whole batch
         + mean over micro batches of the sum over layers and losses of weight * loss

The engine's gradient is read from AdamW's first moment after one step from zero: (1 - beta1) * gradient.
"""

from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state
from torch import Tensor, nn

from megamoe.config import RunConfig
from megamoe.data.batches import BatchStream
from megamoe.data.datasets import build_datasets, resolve_vocabulary
from megamoe.model.gpt import build_gpt
from megamoe.moe.layer import MoELayer
from megamoe.moe.part import Part, StepContext
from megamoe.parallel import launch
from megamoe.train.step import model_inputs, token_index
from megamoe.train.trainer import Trainer
from tests.distributed.pool import Pool
from tests.distributed.runs import ds_config, small_run

TOLERANCE = 1e-5
# Biases, gates and two MoE layers: every kind of parameter. No clipping: the gradient itself is compared.
RUN = {
    "model__num_layers": 3,
    "model__bias": True,
    "model__norm": "layernorm",
    "moe__layers": {"at": [2, 3]},
    "moe__shared_expert_gate": True,
    "optimizer__grad_clip": 0.0,
}

# (ranks, expert-parallel size, micro batches per rank), and the ZeRO stage that `make test` tries.
LAYOUTS = {(1, 1, 1): 0, (1, 1, 4): 1, (2, 1, 4): 1, (2, 2, 2): 0, (2, 2, 4): 2, (4, 2, 2): 1, (4, 4, 1): 2}
CASES = [
    pytest.param(
        *layout,
        stage,
        marks=() if stage == quick else pytest.mark.full,
        id="{} ranks, EP {}, accumulation {}, ZeRO {}".format(*layout, stage),
    )
    for layout, quick in LAYOUTS.items()
    for stage in (0, 1, 2)
]

Found = dict[str, Any]


def gradients_of_the_engine(**changes: Any) -> Found:
    """Job: one step; {"gradients": {name: tensor}, "norm": float} of this rank."""
    config = small_run(**RUN, **changes)
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
            if engine.stage == 0:
                moment = engine.inner_optimizer.state[parameter]["exp_avg"]
            else:
                moment = safe_get_full_optimizer_state(parameter, "exp_avg")
            gradients[name] = moment.clone() / (1 - config.optimizer.beta1)
        return {"gradients": gradients, "norm": record.grad_norm}
    finally:
        trainer.close()


def gradients_of_the_formula(batch_size: int) -> Found:
    """Job for one rank: the loss of the first `batch_size` micro batches as the formula above has it."""
    config = small_run(**RUN, train__global_batch_size=batch_size)
    launch.start(launch.find_world(), timeout_minutes=1)
    vocabulary = resolve_vocabulary(config.data, config.model.vocab_size)
    context = StepContext(seed=config.seed, step=1, aux_scale=0.0)
    model = build_gpt(config, vocabulary.size, lambda shape: MoELayer(config.moe, shape, context))
    weighted: list[Tensor] = []
    _collect_losses(model, weighted)
    lm_sum, tokens = torch.zeros(()), 0.0
    with _micro_batches(config, batch_size) as stream:
        for _ in range(batch_size):
            batch = next(stream)
            context.token_index_T = token_index(batch)
            lm_sum = lm_sum + (model(**model_inputs(batch)) * batch.loss_mask_BS).sum()
            tokens += float(batch.loss_mask_BS.sum())
    assert len(weighted) == batch_size * 2 * len(config.moe.losses)
    loss = lm_sum / tokens + torch.stack(weighted).sum() / batch_size
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    norm = torch.cat([gradient.double().flatten() for gradient in gradients.values()]).norm()
    return {"gradients": gradients, "norm": float(norm)}


def _collect_losses(model: nn.Module, weighted: list[Tensor]) -> None:
    def note(part: Part, inputs: tuple[Any, ...], value: Tensor) -> None:
        weighted.append(part.config.weight * value)

    for module in model.modules():
        if isinstance(module, MoELayer):
            for loss in module.losses.values():
                loss.register_forward_hook(note)


def _micro_batches(config: RunConfig, samples: int) -> BatchStream:
    vocabulary = resolve_vocabulary(config.data, config.model.vocab_size)
    data = build_datasets(
        config.data, vocabulary, seed=config.seed, train_samples=samples, validation_samples=0
    )
    return BatchStream(data.train, start_sample=0, micro_batch_size=1, data_rank=0, data_size=1, workers=0)


@pytest.fixture(scope="module")
def formula(pool: Pool) -> Any:
    """Batch size -> gradients; each worked out once."""
    known: dict[int, Found] = {}

    def of(batch_size: int) -> Found:
        if batch_size not in known:
            (known[batch_size],) = pool.run(gradients_of_the_formula, batch_size, ranks=1)
        return known[batch_size]

    return of


@pytest.mark.parametrize(("ranks", "expert", "accumulation", "stage"), CASES)
def test_every_gradient_is_that_of_the_formula(
    pool: Pool, formula: Any, ranks: int, expert: int, accumulation: int, stage: int
) -> None:
    expected = formula(ranks * accumulation)
    found = pool.run(
        gradients_of_the_engine,
        train__global_batch_size=ranks * accumulation,
        parallel__expert=expert,
        parallel__deepspeed=ds_config(f"zero{stage}_fp32"),
        ranks=ranks,
    )
    assert {name for name in expected["gradients"] if ".experts." in name}
    for name, gradient in expected["gradients"].items():
        assert gradient.abs().max() > 0, f"{name}: the test would see nothing"
        for first in range(0, ranks, expert):  # each set of ranks that share one set of experts
            pieces = [rank["gradients"][name] for rank in found[first : first + expert]]
            ours = torch.cat(pieces) if ".experts." in name else pieces[0]
            assert ours.shape == gradient.shape
            error = (ours - gradient).abs().max() / gradient.abs().max()
            assert error < TOLERANCE, f"{name} of ranks from {first}: off by {error:.1e}"
    for rank in found:
        assert rank["norm"] == pytest.approx(expected["norm"], rel=TOLERANCE)
