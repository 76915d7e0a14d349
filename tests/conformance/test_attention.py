"""Attention under context parallelism and from a cache; labels and losses of multi-token prediction."""

import pytest
import torch

from megamoe.kernels.attention.core import plain_causal_attention
from megamoe.kernels.attention.variants import Variant, masked_attention
from megamoe.kernels.choice import DEFAULT_KERNELS
from megamoe.model.heads.multi_token_prediction import prediction_masks
from tests.conformance.layouts import CP, assert_as_alone
from tests.conformance.one_step import one_step
from tests.conformance.planting import Edit, fails_with
from tests.support.ranks.pool import Pool
from tests.train.test_step import BATCHES

CORE, VARIANTS = "megamoe.model.attention.core", "megamoe.kernels.attention.variants"
MTP, SUMS = "megamoe.model.heads.multi_token_prediction", "megamoe.train.step_sums"
MEANS = "mtp_sums and (mtp_sums[0] / mtp_sums[1].clamp(min=1), mtp_sums[1].clamp(max=1))"
TWO_DEPTHS = "model.multi_token_prediction={depth: 2, weight: 0.3}"


@fails_with(Edit(CORE, "self.context.own_heads(sinks)", "None"))
def test_sinks_reach_attention_under_context_parallelism(pool: Pool) -> None:
    """Under context parallelism attention drops the sinks, and their gradient is zero.

    Reported: NVIDIA/TransformerEngine#3551, NVIDIA/TransformerEngine#2541
    """
    assert_as_alone(pool, CP, "softmax_offset")


@fails_with(Edit(CORE, "Variant(self.window,", "Variant(None if self.context else self.window,"))
def test_a_window_remains_under_context_parallelism(pool: Pool) -> None:
    """Under context parallelism a sliding window becomes full causal attention.

    Reported: huggingface/accelerate#4177
    """
    assert_as_alone(pool, CP, "linear_qkv")


@fails_with(
    Edit(CORE, "value, documents)\n            return self.c", "value, None)\n            return self.c")
)
def test_documents_remain_apart_under_context_parallelism(pool: Pool) -> None:
    """Under context parallelism packed documents see the documents before them.

    Reported: huggingface/trl#6843
    """
    assert_as_alone(pool, CP, "linear_qkv")


def heads(number: int) -> torch.Tensor:
    """Return random heads, [S, B, N, D]."""
    return torch.randn(6, 1, 2, 4, generator=torch.Generator().manual_seed(number))


@fails_with(Edit(VARIANTS, "place_K <= place_C1 - self", "place_K < place_C1 - self"))
def test_a_window_counts_the_querys_own_position() -> None:
    """A sliding window of w positions lets a query see w + 1.

    Reported: huggingface/transformers#39408, sgl-project/sglang#26147
    """
    query, key, value = (heads(number) for number in range(3))
    found = plain_causal_attention(query, key, value, variant=Variant(window=3), kernels=DEFAULT_KERNELS)
    last = plain_causal_attention(query[3:], key[3:], value[3:], kernels=DEFAULT_KERNELS)
    torch.testing.assert_close(found[-1], last[-1])


@fails_with(Edit(VARIANTS, "_log_sum(scores_BGPSL, variant.sinks_N)", "_log_sum(scores_BGPSL, None)"))
def test_attention_from_a_cache_has_the_sinks() -> None:
    """Attention over a key/value cache leaves the sinks out of the softmax's denominator.

    Reported: kekzl/imp#1345
    """
    query, key, value = (heads(number) for number in range(3))
    variant = Variant(sinks_N=torch.tensor([1.0, -1.0]))
    whole_SBH = plain_causal_attention(query, key, value, variant=variant, kernels=DEFAULT_KERNELS)
    query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
    visible = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    cached = masked_attention(query, key, value, visible, None, variant)
    torch.testing.assert_close(cached.permute(2, 0, 1, 3).flatten(2), whole_SBH)


@fails_with(Edit(MTP, "loss_mask_BS.roll(-k, 1) * together_BS", "loss_mask_BS.roll(-k, 1)"))
def test_a_depth_predicts_no_token_of_another_document() -> None:
    """Multi-token prediction is trained on tokens of the next packed document, or of the sequence's start.

    Reported: pytorch/torchtitan#4544
    """
    masks = prediction_masks(torch.ones(1, 7), torch.tensor([[0, 1, 2, 3, 0, 1, 2]]), 2)
    assert masks.sum((1, 2)).tolist() == [7, 5, 3]


@fails_with(Edit(SUMS, "depth_weight / max(model.depth, 1)", "depth_weight"))
def test_the_loss_of_all_depths_is_their_mean(one_rank: None) -> None:
    """The losses of multi-token prediction are added up instead of averaged.

    Reported: NVIDIA/Megatron-LM#1532
    """
    record, _ = one_step(TWO_DEPTHS, "moe.losses=none")
    assert record.loss - record.lm_loss == pytest.approx(0.3 * sum(record.mtp) / 2, rel=1e-4)


@fails_with(Edit("megamoe.train.step", "tokens, mtp_sums).times", f"tokens, {MEANS}).times"))
def test_the_recorded_loss_of_a_depth_is_a_mean_over_tokens(one_rank: None) -> None:
    """The logged loss of multi-token prediction is a mean of the micro batches' means.

    Reported: NVIDIA/Megatron-LM#4896
    """
    both, _ = one_step(TWO_DEPTHS)
    means_ND = torch.tensor([one_step(TWO_DEPTHS, batches=[batch])[0].mtp for batch in BATCHES])
    masks = (prediction_masks(batch.loss_mask_BS, batch.position_ids_BS, 2) for batch in BATCHES)
    counts_ND = torch.stack([mask[1:].sum((1, 2)) for mask in masks])
    expected_D = (means_ND * counts_ND).sum(0) / counts_ND.sum(0)
    assert both.mtp == pytest.approx(expected_D.tolist(), rel=1e-4)
