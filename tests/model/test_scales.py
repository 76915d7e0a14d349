"""Factors on embeddings, residual branches and logits: the same as in the weights, whatever the path."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.model.modules import Norm
from tests.support.tiny import VOCABULARY, tiny, tiny_model

S = 8
TOKENS = torch.randint(VOCABULARY, (2, S), generator=torch.Generator().manual_seed(5))
POSITIONS = torch.arange(S).expand(2, S)
LABELS = TOKENS.roll(-1, 1)
RESIDUAL, EMBEDDING, LOGITS, CAP = 0.5, 3.0, 0.25, 1.5
SCALES = (f"model.residual_scale={RESIDUAL}", f"model.embedding_scale={EMBEDDING}")
OF_LOGITS = (f"model.logit_scale={LOGITS}", f"model.logit_soft_cap={CAP}")
WRITERS = ("linear_proj.", "linear_fc2.", "experts.down", "shared.down")  # into the residual
WIDE = ("model.init_std=0.4", "model.tie_embeddings=false")
SOURCES = {"source_BL": TOKENS.flip(1), "source_position_ids_BL": POSITIONS}
MODELS = {
    "decoder": ("moe.layers={at: [2], insert_after: [1]}", "moe.num_shared_experts=1"),
    "norms of sums": ("moe.layers={at: [2]}",),
    "recomputed": ("moe.layers={at: [2]}", "model.recompute=full"),
    "post-norm, biases": ("moe.layers={at: [2]}", "model.norm_position=post", "model.bias=true"),
    "encoder": ("model.architecture=encoder", "model.bias=true", "train.objective=masked"),
    "encoder_decoder": (
        "model.architecture=encoder_decoder",
        "train.objective=span_corruption",
        "moe.layers={every: null, decoder: {at: [2]}}",
    ),
}


def scaled_weights(model: Any, plain: Any) -> None:
    """Give the model without factors the weights of the other, multiplied by them."""
    with torch.no_grad():
        for (name, weight), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            if weight.dim() == 1:
                weight += 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
            factor = RESIDUAL if any(word in name for word in WRITERS) else 1.0
            theirs.copy_(weight * (EMBEDDING if "word_embeddings" in name else factor))


@pytest.mark.parametrize("case", MODELS)
def test_factors_are_those_of_weights(one_rank: None, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In values and gradients, with the logits' factor and bound put on the plain model's logits."""
    if case == "norms of sums":
        monkeypatch.setattr(Norm, "sums", lambda self, hidden: True)
    overrides = (*WIDE, *MODELS[case])
    model: Any = tiny_model(tiny(*overrides, *SCALES, *OF_LOGITS))
    plain: Any = tiny_model(tiny(*overrides))
    scaled_weights(model, plain)
    more = SOURCES if case == "encoder_decoder" else {}
    plain_logits_BSV = plain.whole_logits(TOKENS, POSITIONS, **more)
    expected_BSV = CAP * torch.tanh(LOGITS * plain_logits_BSV / CAP)
    torch.testing.assert_close(
        model.whole_logits(TOKENS, POSITIONS, **more), expected_BSV, rtol=1e-4, atol=1e-5
    )
    assert expected_BSV.abs().max() > 0.7 * CAP  # the bound is felt
    expected_BS = -expected_BSV.log_softmax(-1).gather(-1, LABELS[..., None])[..., 0]
    found_BS: Tensor = model(TOKENS, POSITIONS, LABELS, **more)
    torch.testing.assert_close(found_BS, expected_BS, rtol=1e-4, atol=1e-5)
    sent_BS = torch.linspace(-1, 1, 2 * S).view(2, S)
    (found_BS * sent_BS).sum().backward()
    (expected_BS * sent_BS).sum().backward()
    for (name, weight), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if weight.grad is None:
            assert theirs.grad is None, name
            continue
        factor = RESIDUAL if any(word in name for word in WRITERS) else 1.0
        expected = theirs.grad * (EMBEDDING if "word_embeddings" in name else factor)
        atol = 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(weight.grad, expected, rtol=1e-3, atol=atol, msg=f"gradient of {name}")


def test_a_tied_output_layer_does_not_have_the_embeddings_factor(one_rank: None) -> None:
    model: Any = tiny_model(tiny("moe.layers=none", "model.init_std=0.4", SCALES[1]))
    plain: Any = tiny_model(tiny("moe.layers=none", *WIDE))
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            weight.copy_(weights[name if name in weights else "model.embedding.word_embeddings.weight"])
            if "word_embeddings" in name:
                weight *= EMBEDDING
    found, expected = (it.whole_logits(TOKENS, POSITIONS) for it in (model, plain))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
