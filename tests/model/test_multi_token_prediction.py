"""Multi-token prediction against its formula, position by position, and which of its losses count."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megamoe.kernels.attention.documents import Documents
from megamoe.model.architectures.decoder import GPT
from megamoe.model.heads.multi_token_prediction import prediction_masks
from tests.support.tiny import VOCABULARY, tiny, tiny_gpt

S, DEPTH = 8, 3
TOKENS = torch.randint(VOCABULARY, (2, S + 1), generator=torch.Generator().manual_seed(5))
POSITIONS = torch.arange(S).expand(2, S)
WIDE = ("model.init_std=0.3", f"model.multi_token_prediction.depth={DEPTH}")
MODELS = {
    "dense": ("moe.layers=none",),
    "moe, untied, learned positions": ("model.tie_embeddings=false", "model.position=learned"),
    "factors and a window": (
        "moe.layers={at: [1]}",
        "model.embedding_scale=2",
        "model.logit_scale=0.5",
        "model.attention={window: 3, window_blocks: [2]}",
    ),
}


def changed_norms(model: GPT) -> None:
    for weight in model.parameters():
        if weight.dim() == 1:
            weight.data += 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))


def norm(module: Any, row_H: Tensor) -> Tensor:
    return row_H * (row_H.square().mean() + module.eps).rsqrt() * module.weight


def by_formula(model: GPT, tokens_BS: Tensor) -> dict[tuple[int, int, int], Tensor]:
    """Return the loss of (depth, sequence, position), where it exists: a row at a time but for the blocks.

    tokens_BS: [B, S + 1].
    """
    states: list[Tensor] = []
    handle = model.model.decoder.register_forward_hook(lambda *inside: states.append(inside[-1]))
    model.whole_logits(tokens_BS[:, :S], POSITIONS)
    handle.remove()
    assert model.prediction is not None
    (hidden_SBH,), found = states, {}
    depths: Any = model.prediction.depths
    for k, depth in enumerate(depths, 1):
        rows = torch.zeros_like(hidden_SBH)
        for b in range(len(tokens_BS)):
            for i in range(S - k):  # what the last k places hold reaches no earlier one
                word = model.model.embedding(tokens_BS[b : b + 1, i + k : i + k + 1], torch.tensor([[i + k]]))
                word_H, state_H = (
                    norm(depth.embedding_norm, word[0, 0]),
                    norm(depth.hidden_norm, hidden_SBH[i, b]),
                )
                rows[i, b] = depth.projection.weight @ torch.cat([word_H, state_H])
        hidden_SBH = depth.blocks(rows, attention_mask=None)
        tied = model.model.share_embeddings_and_output_weights
        words = (model.model.embedding.word_embeddings if tied else model.model.output_layer).weight
        logits_SBV = model.model.output_layer(hidden_SBH, weight=words)[0]
        for b in range(len(tokens_BS)):
            for i in range(S - k):
                found[k, b, i] = functional.cross_entropy(logits_SBV[i, b], tokens_BS[b, i + 1 + k])
    return found


@pytest.mark.parametrize("case", MODELS)
def test_losses_and_gradients_are_the_formulas(one_rank: None, case: str) -> None:
    model = tiny_gpt(tiny(*WIDE, *MODELS[case]))
    changed_norms(model)
    expected = by_formula(model, TOKENS)
    model(TOKENS[:, :S], POSITIONS, TOKENS[:, 1:])
    losses_DBS = model.take_multi_token_losses()
    assert losses_DBS is not None and losses_DBS.dtype == torch.float32
    masks_DBS = prediction_masks(torch.ones(2, S), POSITIONS, DEPTH)[1:]
    assert masks_DBS.sum() == len(expected) == 2 * (7 + 6 + 5)
    for (k, b, i), loss in expected.items():
        assert masks_DBS[k - 1, b, i] == 1
        torch.testing.assert_close(losses_DBS[k - 1, b, i], loss, rtol=1e-4, atol=1e-5)
    weights = [weight for name, weight in model.named_parameters() if "router" not in name]
    totals = (losses_DBS * masks_DBS).sum(), torch.stack([*expected.values()]).sum()
    found, by_hand = (torch.autograd.grad(total, weights, allow_unused=True) for total in totals)
    for one, other in zip(found, by_hand, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


def test_no_token_sees_its_own_future(one_rank: None) -> None:
    """Position i of depth k reads the tokens up to i + k, and no other."""
    model = tiny_gpt(tiny(*WIDE))
    labels_BS = TOKENS[:, 1:]
    model(TOKENS[:, :S], POSITIONS, labels_BS)
    before_DBS = model.take_multi_token_losses()
    changed_BS = TOKENS[:, :S].clone()
    changed_BS[:, 5:] += 1
    changed_BS %= VOCABULARY
    model(changed_BS, POSITIONS, labels_BS)
    after_DBS = model.take_multi_token_losses()
    assert before_DBS is not None and after_DBS is not None
    for k in range(1, DEPTH + 1):
        seen = 5 - k  # the first position that reads token 5
        torch.testing.assert_close(after_DBS[k - 1, :, :seen], before_DBS[k - 1, :, :seen])
        assert not torch.allclose(after_DBS[k - 1, :, seen], before_DBS[k - 1, :, seen])


def test_masks_stay_within_documents() -> None:
    """Against a loop over documents of every length."""
    lengths = [1, 2, 5, 3, 4, 1]
    positions_S = torch.cat([torch.arange(n) for n in lengths])
    document_S = torch.cat([torch.full((n,), number) for number, n in enumerate(lengths)])
    size = len(positions_S)
    mask_S = torch.ones(size)
    mask_S[torch.tensor(lengths).cumsum(0) - 1] = 0  # the next token is of another document
    mask_S[5] = 0  # and one for another reason
    masks_DBS = prediction_masks(mask_S[None], positions_S[None], DEPTH)
    assert torch.equal(masks_DBS[0, 0], mask_S)
    for k in range(1, DEPTH + 1):
        for i in range(size):
            target = i + k + 1
            wanted = target < size and document_S[i] == document_S[target] and target != 6
            assert bool(masks_DBS[k, 0, i]) == wanted, (k, i)


def test_documents_do_not_meet(one_rank: None) -> None:
    """A document's losses are the same with others around it and alone."""
    model = tiny_gpt(tiny(*WIDE, "moe.layers=none"))
    starts_BS = torch.tensor([[0, 0, 0, 0, 0, 5, 5, 5]])
    positions_BS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
    model(TOKENS[:1, :S], positions_BS, TOKENS[:1, 1:], Documents.of(starts_BS, torch.device("cpu")))
    packed_DBS = model.take_multi_token_losses()
    model(TOKENS[:1, :5], positions_BS[:, :5], TOKENS[:1, 1:6])
    alone_DBS = model.take_multi_token_losses()
    assert packed_DBS is not None and alone_DBS is not None
    for k in range(1, DEPTH + 1):
        torch.testing.assert_close(packed_DBS[k - 1, 0, : 4 - k], alone_DBS[k - 1, 0, : 4 - k])


def test_generation_and_the_main_loss_know_nothing_of_it(one_rank: None) -> None:
    model, plain = tiny_gpt(tiny(*WIDE)), tiny_gpt(tiny("model.init_std=0.3"))
    inputs = TOKENS[:, :S], POSITIONS
    assert torch.equal(model.whole_logits(*inputs), plain.whole_logits(*inputs))
    assert model.take_multi_token_losses() is None
    assert torch.equal(model(*inputs, TOKENS[:, 1:]), plain(*inputs, TOKENS[:, 1:]))
