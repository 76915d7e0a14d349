"""Several ranks: gradients and norms that no layout changes, and exchanges in which every rank takes part."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from megamoe.moe.router import Router
from megamoe.train.trainer import Trainer
from tests.conformance.planting import Edit, fails_with, on_ranks
from tests.support.ranks.gradients import assert_same, gradients_of_the_engine, gradients_of_the_formula
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import Place, run_steps, small_run

OPTIMIZERS, EXPERTS = "megamoe.optim.optimizers", "megamoe.moe.experts.computation"
STAGES = "ModelParallelUnit.get_pipeline_model_parallel_world_size() > 1:"
AVERAGED = "ep_dp_group = groups._get_expert_data_parallel_group(ep_name)\n            split"
AVERAGED_OVER_COPIES = AVERAGED.replace("\n", "; dp_world_size = dist.get_world_size(ep_dp_group)\n")
LEAVES = "        if len(rows_NH) == 0: return rows_NH.new_empty(rows_NH.shape)\n"
RUN: dict[str, Any] = {"model__num_attention_heads": 4, "optimizer__grad_clip": 0.0}


def gradients_are_those_of_one_rank(pool: Pool, folder: Path, place: Place, **changes: Any) -> None:
    """See that all gradients of a step at this place are those of the loss written down plainly."""
    batch = place.layout.data
    run = {**RUN, **changes, "train__global_batch_size": batch}
    (expected,) = pool.run(gradients_of_the_formula, [(run, batch, 1)], ranks=1)[0]
    found = on_ranks(pool, gradients_of_the_engine, [{**run, **place.changes(folder)}], ranks=place.ranks)
    assert_same([one for (one,) in found], expected, place.layout, 5e-5)


@fails_with(Edit("deepspeed.runtime.engine", AVERAGED, AVERAGED_OVER_COPIES))
def test_an_experts_gradient_does_not_depend_on_expert_parallelism(pool: Pool, tmp_path: Path) -> None:
    """Gradients of experts are as many times too large as expert parallelism has ranks.

    Reported: deepspeedai/DeepSpeed#5618, deepspeedai/DeepSpeed#6545, pytorch/pytorch#160285
    """
    gradients_are_those_of_one_rank(pool, tmp_path, Place(2, expert=2))


@fails_with(Edit("megamoe.parallel.gradient_sync", "dist.all_reduce(total, group=self.group)", "pass"))
def test_the_routers_gradient_is_summed_over_tensor_parallel_ranks(pool: Pool, tmp_path: Path) -> None:
    """Each tensor-parallel rank updates its router by its own tokens, and the copies drift apart.

    Reported: NVIDIA/Megatron-LM#599, pytorch/torchtitan#2387
    """
    gradients_are_those_of_one_rank(pool, tmp_path, Place(2, tensor=2, sequence=True))


@pytest.mark.full
@fails_with(Edit("megamoe.train.step", "1.0 / (len(batches) * engine.layout.tensor)", "1.0 / len(batches)"))
def test_tensor_parallelism_does_not_scale_a_loss(pool: Pool, tmp_path: Path) -> None:
    """The gradient of the auxiliary loss grows with the tensor-parallel ranks.

    Reported: NVIDIA/Megatron-LM#5047, NVIDIA/Megatron-LM#1652
    """
    losses = {"moe__losses": {"switch_balance": 0.5}}
    gradients_are_those_of_one_rank(pool, tmp_path, Place(2, tensor=2), **losses)


def norm_of_a_step(changes: dict[str, Any]) -> float:
    """Job: return the gradient norm that this rank clips by."""
    trainer = Trainer(small_run(**changes))
    trainer.engine.train(True)
    trainer.step()
    norm = float(trainer.engine.inner_optimizer.grad_norm)  # type: ignore[attr-defined]
    trainer.release()
    return norm


@pytest.mark.full
@fails_with(Edit(OPTIMIZERS, "dist.all_reduce(squares, group=group)", "pass"))
def test_every_rank_clips_by_one_norm(pool: Pool) -> None:
    """Each expert-parallel rank clips by the norm of its own experts, and dense weights drift apart.

    Reported: hpcaitech/ColossalAI#2192, deepspeedai/DeepSpeed#8475, NVIDIA-NeMo/Automodel#3816
    """
    run = {"train__global_batch_size": 4, "optimizer__grad_clip": 0.1}
    (alone,) = pool.run(norm_of_a_step, run, ranks=1)
    first, second = on_ranks(pool, norm_of_a_step, {**run, "parallel__expert": 2}, ranks=2)
    assert first == second == pytest.approx(alone, rel=1e-5)


def steps_with_an_idle_rank(changes: dict[str, Any]) -> list[float]:
    """Job: return the norms of two steps in which expert 0 gets every token."""
    trainer = Trainer(small_run(**changes))
    for module in trainer.engine.model.modules():
        if isinstance(module, Router):
            assert isinstance(module.scorer.bias, nn.Parameter)
            module.scorer.bias.data[0] = 1e4
    norms = [float(trainer.step()[0].grad_norm) for _ in range(2)]
    trainer.release()
    return norms


@fails_with(Edit(EXPERTS, "        if self._recomputes:\n", LEAVES + "        if self._recomputes:\n"))
def test_a_rank_whose_experts_are_idle_takes_part_in_the_exchange(pool: Pool) -> None:
    """A rank without tokens leaves the backward exchange out, and the other ranks wait for it for ever.

    Reported: deepspeedai/DeepSpeed#5066, NVIDIA-NeMo/Automodel#935, PaddlePaddle/PaddleFormers#3010
    """
    changes = {
        "parallel__expert": 2,
        "train__global_batch_size": 2,
        "moe__num_shared_experts": 0,
        "moe__router": {
            "scorer": {"name": "linear", "bias": True},
            "selector": {"name": "top_k", "k": 1, "weights": "raw"},
        },
        "moe__losses": {},
    }
    found = on_ranks(pool, steps_with_an_idle_rank, changes, ranks=2, hangs=True)
    assert found[0] == found[1] and all(0 < norm < float("inf") for norm in found[0])


@pytest.mark.full
@fails_with(Edit(OPTIMIZERS, f"    if {STAGES}", f"    if expert and {STAGES}"))
def test_a_stage_without_moe_layers_takes_part_in_the_norm(pool: Pool) -> None:
    """A pipeline stage without experts leaves the norm's collective out, and the other stages wait for it.

    Reported: deepspeedai/DeepSpeed#8478
    """
    run = {"steps": 1, "train__global_batch_size": 4}
    (alone,) = pool.run(run_steps, ranks=1, **run)
    found = on_ranks(pool, steps_of, {**run, "parallel__pipeline": 2}, ranks=2, hangs=True)
    for rank in found:
        assert rank["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)


def steps_of(changes: dict[str, Any]) -> dict[str, list[Any]]:
    """Job: `run_steps` with its arguments in a dictionary."""
    return run_steps(**changes)


@pytest.mark.full
@fails_with(
    Edit("megamoe.parallel.zero.engine", "self._replicas.sum_gradients(self._engine.optimizer)", "pass")
)
def test_tied_weights_of_two_stages_get_both_gradients_before_the_mean(pool: Pool) -> None:
    """The copies of a tied embedding are summed after the reduction or not at all, and drift apart.

    Reported: no public number was verified
    """
    run = {"steps": 2, "train__global_batch_size": 4, "model__tie_embeddings": True}
    (alone,) = pool.run(run_steps, ranks=1, **run)
    found = on_ranks(pool, steps_of, {**run, "parallel__pipeline": 2}, ranks=2)
    for rank in found:
        assert rank["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)
        assert rank["lm_loss"] == pytest.approx(alone["lm_loss"], rel=1e-5)
