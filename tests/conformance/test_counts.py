"""Counters of load: what is counted, how often, and how exactly. Random draws and precision of the router."""

import pytest
import torch

from megamoe.moe.context import Padding
from megamoe.moe.part import StepContext
from tests.conformance.one_step import one_step, router_gradients
from tests.conformance.planting import Edit, fails_with
from tests.support.moe.build import (
    make_context,
    make_hidden,
    make_layer,
    make_pairs,
    make_part,
    make_routing,
    make_scored,
    moe_config,
    observed,
    routed,
)

LAYER, SWITCH, ROUTING = "megamoe.moe.layer", "megamoe.moe.losses.switch_balance", "megamoe.moe.routing"
SUMS, KERNELS, RNG = "megamoe.train.step_sums", "megamoe.kernels.router", "megamoe.moe.rng"
BIAS = "megamoe.moe.score_functions.expert_bias"
ROUTED = "        routing = self.router(hidden_TH, context, self._scores_before())\n"
AGAIN = "        if self.recomputing:\n            "
IN_BF16 = "weight_N.bfloat16().new_zeros(size).scatter_add_(0, index_N, weight_N.bfloat16()).long()\n"
TO_BF16 = "; self.bias_E.copy_(self.bias_E.bfloat16())\n"
TOKENS = 2 * 16  # of both micro batches of `one_step`

pytestmark = pytest.mark.usefixtures("one_rank")


@fails_with(Edit(LAYER, ROUTED, ROUTED + AGAIN + "self.observation.load_E.add_(routing.counts_E())\n"))
def test_a_recomputed_block_is_counted_once() -> None:
    """The tokens of each expert are counted in the forward pass and again when the block is recomputed.

    Reported: pytorch/torchtitan#1593, NVIDIA-NeMo/Automodel#3247
    """
    record, _ = one_step("model.recompute=full")
    assert [int(layer.load_E.sum()) for layer in record.layers.values()] == [2 * TOKENS] * 2


@fails_with(Edit(SWITCH, "if self.config.running and context.micro_batch in", "if None in"))
def test_running_counts_take_in_a_recomputed_micro_batch_once() -> None:
    """Counts that run over the step's micro batches take in a recomputed one twice.

    Reported: NVIDIA-NeMo/Automodel#3247
    """
    loss = "moe.losses={switch_balance: {weight: 0.5, scope: global_batch, running: true}}"
    record, plain = one_step(loss)
    record_again, again = one_step(loss, "model.recompute=full")
    assert record_again.losses == pytest.approx(record.losses, rel=1e-6)
    for name, gradient in router_gradients(plain).items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-4, atol=1e-6)


@fails_with(Edit(SUMS, "vector if known is None else", "vector if known is None or name == 'counts' else"))
def test_counts_are_those_of_all_micro_batches() -> None:
    """With gradient accumulation, the load is that of the last micro batch alone.

    Reported: no public number was verified
    """
    record, _ = one_step()
    assert [int(layer.wanted_E.sum()) for layer in record.layers.values()] == [2 * TOKENS] * 2


@fails_with(Edit(ROUTING, "weight_N.new_zeros(size).scatter_add_(0, index_N, weight_N)\n", IN_BF16))
def test_counts_above_256_are_exact() -> None:
    """Tokens are counted in bf16, where 256 + 1 is 256.

    Reported: no public number was verified
    """
    probs_TE = torch.full((600, 4), 0.25)
    routing = make_routing([[0]] * 599 + [[1]], probs_TE.log(), probs_TE)
    assert routing.counts_E().tolist() == [599, 1, 0, 0]


@fails_with(Edit(SWITCH, '== "global_batch" and self.training:', '== "global_batch":'))
def test_an_evaluation_leaves_the_counts_of_training() -> None:
    """Tokens of an evaluation enter the counts by which the next training step balances.

    Reported: pytorch/torchtitan#4148
    """
    scores_TE = torch.randn(8, 4, generator=torch.Generator().manual_seed(5))
    one = routed(make_scored(scores_TE), make_pairs([[0], [1]] * 4))
    other = routed(make_scored(scores_TE), make_pairs([[3]] * 8))
    values = []
    for evaluates in (False, True):
        loss = make_part("loss", "switch_balance", scope="global_batch", running=True)
        loss.train()(one, make_context(step=1, micro_batch=0))
        if evaluates:
            loss.eval()(other, make_context(step=1, micro_batch=7))
        values.append(loss.train()(one, make_context(step=1, micro_batch=1)).item())
    assert values[0] == values[1]


@fails_with(Edit("megamoe.moe.token_sharding", "        if padding is None:\n", "        if True:\n"))
def test_padding_is_not_routed() -> None:
    """Padding takes places in experts, and counts in the load and in the balance loss.

    Reported: huggingface/transformers#28505, NVIDIA/Megatron-LM#2121
    """
    padding = Padding.of(torch.tensor([3, 5]), 5)
    context = make_context(sample_index_B=torch.tensor([0, 1]), padding=padding)
    losses = {"switch_balance": 0.1}
    layer = make_layer(moe_config(num_experts=4, losses=losses), context)
    hidden_TH = make_hidden(10)
    output_TH = layer(hidden_TH)
    assert int(observed(layer).load_E.sum()) == 2 * 8
    unpadded = make_layer(moe_config(num_experts=4, losses=losses))
    torch.testing.assert_close(output_TH[padding.place_V], unpadded(hidden_TH[padding.place_V]))
    seen, expected = observed(layer), observed(unpadded)
    torch.testing.assert_close(seen.losses["switch_balance"], expected.losses["switch_balance"])


@fails_with(Edit(KERNELS, "(hidden_TH.float(), weight_EH.float())", "(hidden_TH, weight_EH).float()"))
def test_a_router_of_a_bf16_model_computes_in_fp32() -> None:
    """The router's scores are computed or rounded in bf16, and near ties change the choice of experts.

    Reported: deepspeedai/DeepSpeed#5156, vllm-project/vllm#14027
    """
    layer = make_layer(moe_config(num_experts=4)).bfloat16()
    hidden_TH = make_hidden(64).bfloat16()
    scores_TE = layer.router(hidden_TH, StepContext()).scores_TE
    weight_EH = layer.router.scorer.weight
    assert isinstance(weight_EH, torch.Tensor)
    exact_TE = hidden_TH.double() @ weight_EH.double().T
    assert scores_TE.dtype == torch.float32
    torch.testing.assert_close(scores_TE.double(), exact_TE, rtol=1e-5, atol=1e-5)


@fails_with(Edit(BIAS, "alpha=self.config.bias_update)\n", "alpha=self.config.bias_update)" + TO_BF16))
def test_a_bias_keeps_small_updates() -> None:
    """The balancing bias is held in bf16, which rounds its small updates away.

    Reported: NVIDIA/Megatron-LM#1482
    """
    part = make_part("score_function", "sigmoid", bias_update=0.001)
    load_E = torch.tensor([9, 1, 1, 1])
    for _ in range(400):
        part.after_step(load_E, StepContext())
    assert part.bias_E.dtype == torch.float32
    assert part.bias_E.tolist() == pytest.approx([-0.4, 0.4, 0.4, 0.4], abs=1e-4)


@fails_with(Edit(RNG, '{layer}/{purpose}"', "{layer}/{purpose}/{__import__('random').random()}\""))
def test_a_recomputed_router_draws_the_same_noise() -> None:
    """The jitter is drawn anew when a block is recomputed, so that gradients belong to other experts.

    Reported: allenai/OLMo-core#828
    """
    jitter = "moe.router.scorer.jitter=0.3"
    _, plain = one_step(jitter)
    _, again = one_step(jitter, "model.recompute=full")
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
