"""Layouts of two ranks: gradients, norms, counts and losses are those of one rank."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megamoe.moe.context import Padding
from megamoe.moe.layer import LayerShape, MoELayer
from megamoe.moe.process_groups import ParallelGroups
from megamoe.optim.optimizers import global_grad_norm
from megamoe.parallel import launch
from megamoe.train.trainer import Trainer
from tests.conformance.layouts import CP, EP, EP_TP, ETP, NORM, PP, RUN, SP, TP, UPDATE, assert_as_alone, step
from tests.conformance.planting import Edit, fails_with, on_ranks
from tests.support.moe.build import HIDDEN, gradient_of, make_context, make_hidden, moe_config
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import Place, small_run

CORE, HEADS = "megamoe.model.attention.core", "megamoe.model.attention.head_norms"
OPTIMIZERS, GROUPS = "megamoe.optim.optimizers", "megamoe.parallel.process_groups"
MARKS, STAGES = "megamoe.parallel.zero.deepspeed_moe_layer", "megamoe.parallel.zero.pipeline"
WORDS, MTP = "megamoe.model.heads.vocabulary", "megamoe.model.heads.multi_token_prediction"
LOSSES, DIRECT = "megamoe.moe.auxiliary_losses", "megamoe.moe.dispatch.direct"
EXPERTS, TRAINER = "megamoe.moe.experts.grouped", "megamoe.train.trainer"
STEP, SUMS = "megamoe.train.step", "megamoe.train.step_sums"
OF_FIRST = "[gradient] * (ModelParallelUnit.get_tensor_model_parallel_rank() == 0)"
SCALED = "{n: value * (len(context.batch.bounds or [0, 0]) - 1) for n, value in values.items()}"
GATHERED = "gather_from_tensor_model_parallel_region(logits_SBV)"
ENDS = "if layer.router.score_function.bias_E is None: return\n" + 16 * " "
AFTER = "layer.after_step(record.wanted_on_device[number])"
OF_PART = "batch.loss_mask_BS.sum() / (parts * mask_BS.sum().clamp(min=1))"


def norm_of_sinks() -> float:
    """Job: the norm of a gradient that is 1 at every sink, and 0 elsewhere."""
    trainer = Trainer(small_run(**RUN, **TP.changes(Path())))
    sinks = [p for name, p in trainer.model.named_parameters() if name.endswith("softmax_offset")]
    norm = float(global_grad_norm([(sink, torch.ones_like(sink)) for sink in sinks]))
    trainer.release()
    return norm


@fails_with(Edit(CORE, "self.softmax_offset, ranks > 1,", "self.softmax_offset, False,"))
def test_the_sinks_of_every_head_count_in_the_norm(pool: Pool) -> None:
    """The norm leaves out the attention sinks of the heads that other tensor-parallel ranks have.

    Reported: NVIDIA/Megatron-LM#7452, NVIDIA/Megatron-LM#7530
    """
    assert on_ranks(pool, norm_of_sinks, ranks=2) == [4.0] * 2  # four heads in four blocks


@fails_with(Edit(OPTIMIZERS, "else whole).append(gradient)", "else cut).append(gradient)"))
def test_a_replicated_weight_counts_once_in_the_norm(pool: Pool) -> None:
    """A weight that every tensor-parallel rank has whole counts once for each of them in the norm.

    Reported: NVIDIA-NeMo/RL#3788, ROCm/TransformerEngine#715
    """
    assert_as_alone(pool, SP, NORM)


@pytest.mark.full
@fails_with(Edit(OPTIMIZERS, "[]).append(gradient)", f"[]).extend({OF_FIRST})"))
def test_the_experts_of_every_tensor_parallel_rank_count_in_the_norm(pool: Pool) -> None:
    """The norm drops experts as copies, because their rank is not the first of its tensor-parallel group.

    Reported: NVIDIA/Megatron-LM#5916, NVIDIA/Megatron-LM#6470, radixark/Megatron-LM#80
    """
    assert_as_alone(pool, EP_TP, NORM)


@fails_with(Edit(HEADS, "= config.tensor_model_parallel_size > 1", "= config.sequence_parallel"))
def test_the_gradients_of_head_norms_are_summed_without_sequence_parallelism(pool: Pool) -> None:
    """A norm that all heads share gets one rank's heads' gradient, if there is no sequence parallelism.

    Reported: NVIDIA/Megatron-LM#7452, NVIDIA-NeMo/RL#3716
    """
    assert_as_alone(pool, TP, "[qk]_layernorm")


@fails_with(Edit("megamoe.model.modules", "= config.sequence_parallel  # type", "= False  # type"))
def test_the_gradients_of_norms_are_summed_under_sequence_parallelism(pool: Pool) -> None:
    """Under sequence parallelism each rank updates the last norm by its own positions.

    Reported: NVIDIA/Megatron-LM#1446
    """
    assert_as_alone(pool, SP, "final_layernorm")


@fails_with(Edit(MARKS, "= layout.tensor > 1", "= layout.tensor > 1 < parameter.ndim"))
def test_the_gradient_of_a_shared_experts_gate_is_summed(pool: Pool) -> None:
    """Each tensor-parallel rank updates the gate of the shared expert by its own tokens.

    Reported: alibaba/Pai-Megatron-Patch#397, alibaba/Pai-Megatron-Patch#425
    """
    assert_as_alone(pool, SP, "shared.gate")


@fails_with(Edit("megamoe.model.moe_block", ", tensor_parallel_output_grad=False", ""))
def test_a_gather_of_what_all_ranks_compute_alike_does_not_sum_gradients(pool: Pool) -> None:
    """The backward pass of a gather adds up gradients that are equal on all tensor-parallel ranks.

    Reported: THUDM/slime#1748
    """
    assert_as_alone(pool, TP, "router|shared")


@fails_with(Edit(WORDS, "(logits_SBV.float(), labels_SB", f"({GATHERED}.float(), labels_SB"))
def test_a_cross_entropy_over_shards_gets_shards(pool: Pool) -> None:
    """A cross entropy that adds up shards of the vocabulary gets the whole logits on every rank.

    Reported: NVIDIA/Megatron-LM#7452
    """
    assert_as_alone(pool, TP, "embedding")


def padded_layer() -> dict[str, torch.Tensor]:
    """Job: the router's gradient of two padded sequences, whose positions the ranks share, and the load."""
    launch.start(launch.find_world(), timeout_minutes=1)
    rank, size = dist.get_rank(), dist.get_world_size()
    padding = Padding.of(torch.tensor([3, 7]), 8)
    context = make_context(sample_index_B=torch.arange(2), padding=padding, aux_scale=1 / size)
    shape = LayerShape(HIDDEN, 24, 1, "swiglu", init_std=0.4, output_std=0.4, seed=1)
    config = moe_config(num_experts=4, losses={"switch_balance": 0.5, "z_loss": 0.1})
    layer = MoELayer(config, shape, context, ParallelGroups(dist.group.WORLD if size > 1 else None))
    layer(make_hidden(16).chunk(size)[rank]).sum().backward()
    gradient = gradient_of(layer.router.scorer.weight)
    dist.all_reduce(gradient)
    assert layer.observation is not None
    return {"router": gradient, "load": layer.observation.load_E, **layer.observation.losses}


@fails_with(Edit(LOSSES, "(output_TH, values, self", f"(output_TH, {SCALED}, self"))
def test_padding_does_not_scale_a_loss_under_tensor_parallelism(pool: Pool) -> None:
    """With a padding mask, the auxiliary losses' gradient is scaled by the tokens of all tensor ranks.

    Reported: NVIDIA/Megatron-LM#7452, NVIDIA/Megatron-LM#7481
    """
    (alone,) = pool.run(padded_layer, ranks=1)
    for found in on_ranks(pool, padded_layer, ranks=2):
        for name, expected in alone.items():
            torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-5, msg=name)


@fails_with(Edit(DIRECT, "combine(rows_NH, state.weight_N,", "combine(rows_NH, state.weight_N.detach(),"))
def test_the_loss_of_tokens_trains_the_router_under_expert_parallelism(pool: Pool) -> None:
    """Under expert parallelism the pairs' weights lose their gradient, and auxiliary losses alone train.

    Reported: NVIDIA-NeMo/Automodel#2995
    """
    assert_as_alone(pool, EP, "router")


@fails_with(Edit(SUMS, "self._counts(on_device)", "self._counts(sums._vectors)"))
def test_the_bias_balances_the_tokens_of_all_ranks(pool: Pool) -> None:
    """Each rank moves the balancing bias by the counts of its own tokens, and the copies drift apart.

    Reported: pytorch/torchtitan#4154
    """
    (alone,) = step(pool, Place(), planted=False)
    for found in step(pool, EP):
        for name, bias_E in alone["buffers"].items():
            torch.testing.assert_close(found["buffers"][name], bias_E, msg=name)


@fails_with(Edit(TRAINER, AFTER, f"[{AFTER} for _ in range(record.micro_batches)]"))
def test_the_bias_moves_once_in_a_step(pool: Pool) -> None:
    """The balancing bias moves in each accumulated micro batch.

    Reported: pytorch/torchtitan#1304
    """
    (alone,) = step(pool, Place())
    biases = [bias_E for name, bias_E in alone["buffers"].items() if name.endswith("bias")]
    assert [float(bias_E.abs().max()) for bias_E in biases] == pytest.approx([UPDATE] * 4)


@pytest.mark.full
@fails_with(Edit(TRAINER, AFTER, ENDS + AFTER))
def test_a_layer_without_a_bias_does_not_end_the_others_updates(pool: Pool) -> None:
    """The first layer without a balancing bias ends the update of all layers after it.

    Reported: pytorch/torchtitan#3686
    """
    group = {"layers": {"at": [1]}, "router": {"score_function": "softmax"}}
    (alone,) = step(pool, Place(), moe__groups=[group])
    biases = [bias_E for name, bias_E in alone["buffers"].items() if name.endswith("bias")]
    assert [float(bias_E.abs().max()) for bias_E in biases] == pytest.approx([UPDATE] * 3)


@fails_with(Edit(GROUPS, "copies = _own(layout.expert_copy_groups()", "copies = _own(layout.data_groups()"))
def test_gradients_of_different_slices_of_an_expert_do_not_mix(pool: Pool) -> None:
    """With expert tensor and no expert parallelism, gradients of different slices are averaged.

    Reported: NVIDIA/Megatron-LM#1628, NVIDIA/Megatron-LM#5916, NVIDIA/Megatron-LM#6080
    """
    assert_as_alone(pool, ETP, "experts.(up|down)$")


@fails_with(Edit(EXPERTS, "bias_EH, expert_N)", "bias_EH * self.cut.count, expert_N)"))
def test_the_slices_of_an_expert_add_its_bias_once(pool: Pool) -> None:
    """The bias of an expert's output is added by every slice of the expert, and then summed over them.

    Reported: pytorch/torchtitan#4245
    """
    assert_as_alone(pool, ETP, NORM)


@fails_with(Edit(STEP, "(len(batches) * engine.layout.tensor)", "(len(batches) * engine.layout.batch_ranks)"))
def test_context_parallelism_does_not_scale_a_loss(pool: Pool) -> None:
    """The gradient of the auxiliary losses shrinks with the context-parallel ranks.

    Reported: NVIDIA/Megatron-LM#2217
    """
    assert_as_alone(pool, CP, "router")


@fails_with(Edit(STEP, "lm_sum * self._scale_K[0]", f"lm_sum * self._scale_K[0] * {OF_PART}"))
def test_a_token_weighs_the_same_in_every_part_of_a_sequence(pool: Pool) -> None:
    """Each context-parallel rank divides by the unmasked tokens of its own part of the sequence.

    Reported: NVIDIA/Megatron-LM#7452, NVIDIA/Megatron-LM#7513
    """
    assert_as_alone(pool, CP, "embedding")


@fails_with(Edit(SUMS, "dist.all_reduce(tokens_K,", "tokens_K[1:] *= 2; dist.all_reduce(tokens_K[:1],"))
def test_multi_token_losses_are_means_over_the_tokens_of_all_ranks(pool: Pool) -> None:
    """Each rank divides its losses of multi-token prediction by its own tokens: a mean of means.

    Reported: NVIDIA/Megatron-LM#7452, NVIDIA/Megatron-LM#7498
    """
    assert_as_alone(pool, EP, "prediction.depths")


@fails_with(
    Edit(MTP, "inputs.shifted(k)", "inputs.of(model.config.context).shifted(k)"),
    Edit(MTP, "        inputs = inputs.of(model.config.context)\n", ""),
)
def test_multi_token_inputs_are_shifted_before_they_are_cut(pool: Pool) -> None:
    """Multi-token prediction shifts each rank's part of a sequence by itself, and misses its next tokens.

    Reported: pytorch/torchtitan#4544, NVIDIA-NeMo/Automodel#3544
    """
    assert_as_alone(pool, CP, "prediction.depths")


@pytest.mark.full
@fails_with(Edit(STAGES, '[p for p in model.parameters() if getattr(p, "is_replicated", False)]', "[]"))
def test_the_copy_of_an_untied_embedding_gets_both_gradients(pool: Pool) -> None:
    """The embedding that multi-token prediction reads on the last stage leaves that of the first one.

    Reported: NVIDIA-NeMo/Megatron-Bridge#5380
    """
    assert_as_alone(pool, PP, "word_embeddings", model__tie_embeddings=False)
