"""Auxiliary losses: their scale, what they count, and that they are counted once."""

import pytest
import torch

from megamoe.data.batches import Batch
from megamoe.moe.part import StepContext
from tests.conformance.one_step import one_step, router_gradients
from tests.conformance.planting import Edit, fails_with
from tests.support.moe.build import (
    loss_of,
    make_context,
    make_hidden,
    make_layer,
    make_pairs,
    make_routing,
    make_scored,
    moe_config,
    observed,
    routed,
)
from tests.train.test_step import BATCHES

BALANCE = "moe.losses={switch_balance: 0.5}"
LAYER, LOSSES = "megamoe.moe.layer", "megamoe.moe.auxiliary_losses"
SWITCH = "megamoe.moe.losses.switch_balance"
ROUTED = "        routing = self.router(hidden_TH, context, self._scores_before())\n"
AGAIN = "        if self.recomputing: [each.mul_(2) for each in self.observation.losses.values()]\n"
COMMON, STEP = "megamoe.moe.losses.common", "megamoe.train.step"

pytestmark = pytest.mark.usefixtures("one_rank")


@fails_with(Edit(LAYER, ROUTED, ROUTED + AGAIN))
def test_a_loss_is_recorded_once_under_recomputation() -> None:
    """The recorded auxiliary loss is doubled when its block is computed again.

    Reported: NVIDIA/Megatron-LM#1330, NVIDIA/Megatron-LM#1478, NVIDIA/Megatron-LM#1514
    """
    plain, _ = one_step(BALANCE)
    again, _ = one_step(BALANCE, "model.recompute=full")
    assert again.losses == pytest.approx(plain.losses, rel=1e-6)


@fails_with(Edit(LOSSES, "        if not values or not self.training:", "        if True:"))
def test_the_gradient_of_a_loss_reaches_the_router() -> None:
    """The auxiliary loss is computed and logged, but its gradient reaches no weight.

    Reported: NVIDIA-NeMo/Automodel#1408
    """
    layer = make_layer(moe_config(num_experts=4, losses={"switch_balance": 0.5}))
    (layer(make_hidden(16)) * 0).sum().backward()
    assert all(float(p.grad.abs().max()) > 1e-4 for p in layer.router.parameters() if p.grad is not None)
    assert any(p.grad is not None for p in layer.router.parameters())


@fails_with(Edit(STEP, "1.0 / (len(batches) * engine.layout.tensor)", "1.0 / engine.layout.tensor"))
def test_accumulation_does_not_scale_a_loss() -> None:
    """The gradient of the auxiliary loss grows with the number of accumulated micro batches.

    Reported: NVIDIA-NeMo/Automodel#3359
    """
    _, once = one_step(BALANCE, batches=BATCHES[:1])
    _, thrice = one_step(BALANCE, batches=[BATCHES[0]] * 3)
    for name, gradient in router_gradients(once).items():
        torch.testing.assert_close(thrice[name], gradient, rtol=1e-4, atol=1e-6)


@fails_with(Edit(STEP, "lm_sum * self._scale_K[0]", "lm_sum / mask_BS.sum() / len(self.batches)"))
def test_a_token_weighs_the_same_in_every_micro_batch() -> None:
    """Micro batches with few unmasked tokens weigh as much as full ones: a mean of means.

    Reported: huggingface/transformers#34191, ml-explore/mlx-lm#1413
    """
    both = Batch(
        torch.cat([batch.tokens_BS for batch in BATCHES]),
        torch.cat([batch.labels_BS for batch in BATCHES]),
        torch.cat([batch.position_ids_BS for batch in BATCHES]),
        torch.cat([batch.loss_mask_BS for batch in BATCHES]),
        None,
        torch.cat([batch.sample_index_B for batch in BATCHES]),
    )
    cut_record, cut = one_step()
    whole_record, whole = one_step(batches=[both])
    assert cut_record.lm_loss == pytest.approx(whole_record.lm_loss, rel=1e-5)
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=1e-3, atol=1e-5, msg=name)


@fails_with(
    Edit(COMMON, "counts.sum(dim=-1, keepdim=True)", "counts.max(dim=-1, keepdim=True).values"),
    Edit(SWITCH, "return balance(probs_TE, counts_E, self.dims.kernels)\n", "pass\n"),
    Edit(SWITCH, "probs_E = _first_choice_probs(routing, probs_TE)", "probs_E = probs_TE.sum(0)"),
)
def test_the_balance_loss_is_1_at_balance_for_any_k() -> None:
    """The fractions of the pairs sum to k instead of 1, so that the loss grows with the experts per token.

    Reported: huggingface/transformers#43775
    """
    probs_TE = torch.full((4, 4), 0.25)
    for experts in ([[0], [1], [2], [3]], [[0, 1], [1, 2], [2, 3], [3, 0]]):
        routing = make_routing(experts, probs_TE.log(), probs_TE)
        assert loss_of("switch_balance", routing).item() == pytest.approx(1.0)
    crowded = make_routing([[0, 1]] * 4, probs_TE.log(), probs_TE)
    assert loss_of("switch_balance", crowded).item() == pytest.approx(1.0)  # P is even


@fails_with(Edit(COMMON, "if sums_to_1 else shares(routing.probs_TE)", ""))
def test_small_sigmoids_do_not_lower_the_balance_loss() -> None:
    """With a sigmoid, the router lowers the balance loss by shrinking all probabilities.

    Reported: NVIDIA/Megatron-LM#1545
    """
    values = []
    for low in (0.0, -60.0):
        scores_TE = torch.full((4, 4), low)
        probs_TE = scores_TE.sigmoid()
        routing = make_routing([[0], [1], [2], [3]], scores_TE, probs_TE)
        values.append(loss_of("switch_balance", routing, dims={"score_function": frozenset()}).item())
    assert values == pytest.approx([1.0, 1.0])


@fails_with(Edit(COMMON, "        return routing.wanted_counts_E()\n", "        return routing.counts_E()\n"))
def test_the_balance_loss_counts_what_the_capacity_drops() -> None:
    """The balance loss counts pairs after the capacity has cut them, which hides the imbalance.

    Reported: NVIDIA/Megatron-LM#1513, NVIDIA/Megatron-LM#1617
    """
    scores_TE = torch.tensor([[2.0, 0.0, -1.0, -2.0]]).repeat(8, 1)
    scored, wanted = make_scored(scores_TE), make_pairs([[0]] * 8)
    free = routed(scored, wanted)
    cut = routed(scored, wanted)
    cut.pairs = wanted.keep(torch.arange(8) < 2)
    expected = 4 * scores_TE.softmax(-1)[0, 0].item()
    assert loss_of("switch_balance", free).item() == pytest.approx(expected)
    layer = make_layer(
        moe_config(
            num_experts=4,
            router={"capacity": {"name": "per_expert", "factor": 0.5, "min_capacity": 1}},
            losses={"switch_balance": 1.0},
        )
    )
    layer(make_hidden(16, skewed=True))
    load_E, wanted_E = observed(layer).load_E, observed(layer).wanted_E
    assert int(load_E.sum()) < int(wanted_E.sum())
    without = make_layer(moe_config(num_experts=4, losses={"switch_balance": 1.0}))
    without(make_hidden(16, skewed=True))
    dropped, kept = observed(layer).losses["switch_balance"], observed(without).losses["switch_balance"]
    torch.testing.assert_close(dropped, kept)


@fails_with(Edit(COMMON, "    if context.batch.sequence_T is not None:", "    if False:"))
def test_a_sequence_loss_of_packed_sequences() -> None:
    """The loss of each sequence takes packed sequences of other lengths for one, or mixes their tokens.

    Reported: NVIDIA/Megatron-LM#6108, NVIDIA/Megatron-LM#5696
    """
    generator = torch.Generator().manual_seed(5)
    scores_TE = torch.randn(8, 4, generator=generator)
    owner_T = torch.tensor([0, 1, 0, 1, 0, 0, 0, 0])  # two tokens of the second sequence, six of the first
    together = make_context(sample_index_B=torch.tensor([0, 1]), sequence_T=owner_T)

    def loss(of_TE: torch.Tensor, context: StepContext) -> float:
        scored = make_scored(of_TE)
        routing = routed(scored, make_pairs(of_TE.topk(2).indices.tolist()))
        return loss_of("switch_balance", routing, context, {"num_choices": 2}, scope="sequence").item()

    one_by_one = [loss(scores_TE[owner_T == number], StepContext()) for number in (0, 1)]
    assert loss(scores_TE, together) == pytest.approx(sum(one_by_one) / 2)
