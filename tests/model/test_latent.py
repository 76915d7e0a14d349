"""Multi-head latent attention against transformers' DeepSeek-V2 and V3, alone and in a model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megamoe.data.batches import document_items
from megamoe.kernels.attention.documents import Documents
from megamoe.kernels.library import find_library
from megamoe.model.architectures.encoder import Encoder
from megamoe.model.attention.caches import KeyValueCache
from tests.model.test_attention_of_transformers import HIDDEN, S, assert_same, of_transformers, same_gradient
from tests.support.moe.build import gradient_of
from tests.support.tiny import VOCABULARY, tiny, tiny_gpt, tiny_model

pytestmark = pytest.mark.usefixtures("one_rank")

HEADS = 4
SHAPE = (f"model.hidden_size={HIDDEN}", f"model.num_attention_heads={HEADS}", f"data.sequence_length={S}")
COMPRESSED = {"query_rank": 10, "key_value_rank": 14, "nope_size": 8, "rope_size": 6, "value_size": 9}
WHOLE = {"key_value_rank": 14, "nope_size": 6, "rope_size": 4, "value_size": 16}  # wide values
YARN = {"factor": 6, "original_length": 32, "mscale": 1.5, "mscale_all_dim": 0.7}
PLACES = {
    "q_proj": "linear_q_proj",
    "q_a_proj": "linear_q_down_proj",
    "q_a_layernorm": "q_layernorm",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_a_layernorm": "kv_layernorm",
    "kv_b_proj": "linear_kv_up_proj",
    "o_proj": "linear_proj",
}
# Their model, our sizes, our rotary positions.
PAIRS: dict[str, Any] = {"interleaved": True}
SCALED = {**PAIRS, "scaling": "yarn", **YARN}
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "V2": ("deepseek_v2.DeepseekV2", COMPRESSED, PAIRS),
    "V2, whole queries, yarn": ("deepseek_v2.DeepseekV2", WHOLE, SCALED),
    "V3": ("deepseek_v3.DeepseekV3", WHOLE, PAIRS),
    "V3, yarn": ("deepseek_v3.DeepseekV3", COMPRESSED, SCALED),
    "V3, halves": ("deepseek_v3.DeepseekV3", COMPRESSED, {}),
}


def overrides_of(latent: dict[str, int], rotary: dict[str, Any]) -> list[str]:
    keys = [f"model.latent.{key}={value}" for key, value in latent.items()]
    return keys + [f"model.rotary.{key}={str(value).lower()}" for key, value in rotary.items()]


def theirs_of(name: str, latent: dict[str, int], rotary: dict[str, Any]) -> tuple[nn.Module, nn.Module, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if "scaling" in rotary:
        rope |= {key: YARN[key] for key in ("factor", "mscale", "mscale_all_dim")}
        rope |= {"rope_type": "yarn", "original_max_position_embeddings": YARN["original_length"]}
    return of_transformers(
        name,
        0,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        rope_parameters=rope,
        attention_bias=False,
        q_lora_rank=latent.get("query_rank"),
        kv_lora_rank=latent["key_value_rank"],
        qk_nope_head_dim=latent["nope_size"],
        qk_rope_head_dim=latent["rope_size"],
        v_head_dim=latent["value_size"],
        **({"rope_interleave": rotary.get("interleaved", False)} if "V3" in name else {}),
    )


@pytest.mark.parametrize("kernels", ["compiled", "plain"])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients(case: str, kernels: str) -> None:
    if kernels == "compiled" and find_library()[0] is None:
        pytest.skip(find_library()[1])
    name, latent, rotary = CASES[case]
    theirs, positions, _ = theirs_of(name, latent, rotary)
    keys = [*overrides_of(latent, rotary), f"model.cpu_kernels={kernels}", "model.norm_eps=1e-6"]
    ours = tiny_gpt(tiny(*SHAPE, *keys)).model.decoder.layers[0].self_attention
    places = {}
    for each, _ in theirs.named_parameters():
        module, _, kind = each.rpartition(".")
        places[each] = f"{PLACES[module]}.{kind}"
    parameters = dict(ours.named_parameters())
    assert sorted(places.values()) == sorted(parameters)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for each, parameter in theirs.named_parameters():
            drawn = torch.randn(parameter.shape, generator=random) * (0.3 if parameter.dim() > 1 else 1)
            parameter.copy_(drawn)
            parameters[places[each]].copy_(drawn)
    assert_same(ours, theirs, positions, torch.full((S, S), float("-inf")).triu(1)[None, None])
    for each, parameter in theirs.named_parameters():
        same_gradient(gradient_of(parameters[places[each]]), gradient_of(parameter), each)


MODEL = [*overrides_of(COMPRESSED, SCALED), "model.init_std=0.3"]


def text(rows: int, size: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, size), generator=torch.Generator().manual_seed(5))


def test_documents_begin_anew() -> None:
    """The second document's losses are those of the same document by itself."""
    model, tokens_BS = tiny_gpt(tiny(*MODEL)), text(1, 8)
    tokens_BS[0, 2] = 0  # ends the first document, three tokens long
    documents = Documents.of(document_items(tokens_BS[0], eod=0)["document_start"][None])
    positions_BS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    together = model(tokens_BS, positions_BS, tokens_BS, documents)[0, 3:]
    alone = model(tokens_BS[:, 3:], positions_BS[:, 3:], tokens_BS[:, 3:])[0]
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_generation_from_a_cache() -> None:
    """Prompts of two lengths, then token by token: the logits of whole sequences."""
    model, tokens_BS = tiny_gpt(tiny(*MODEL)).eval(), text(2, 8)
    assert model.problem_with_cache() is None
    with torch.no_grad():
        rows = (tokens_BS[0], tokens_BS[1, 2:])
        whole = [model.whole_logits(row[None], torch.arange(len(row))[None]) for row in rows]
        cache = KeyValueCache(torch.tensor([0, 2]), 8)
        found = []
        for first, last in ((0, 5), (5, 6), (6, 7), (7, 8)):
            places = cache.positions_BS(last - first)
            found.append(model.whole_logits(tokens_BS[:, first:last], places, cache))
            cache.advance(last - first)
    found_BSV = torch.cat(found, dim=1)
    torch.testing.assert_close(found_BSV[0], whole[0][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found_BSV[1, 2:], whole[1][0], rtol=1e-4, atol=1e-5)


def test_recomputation_changes_nothing() -> None:
    tokens_BS = text(2, 8)
    gradients: list[dict[str, Any]] = []
    for recompute in ("none", "full"):
        model = tiny_gpt(tiny(*MODEL, f"model.recompute={recompute}"))
        model(tokens_BS, torch.arange(8)[None], tokens_BS).mean().backward()
        gradients.append({name: each.grad for name, each in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_an_encoder_sees_both_sides() -> None:
    model = tiny_model(tiny(*MODEL, "model.architecture=encoder", "train.objective=masked"))
    assert isinstance(model, Encoder)
    tokens_BS, other_BS = text(1, 8), text(1, 8)
    other_BS[0, -1] = (other_BS[0, -1] + 1) % VOCABULARY
    first, second = (model.whole_logits(each, torch.arange(8)[None])[0, 0] for each in (tokens_BS, other_BS))
    assert (first - second).abs().max() > 1e-4
