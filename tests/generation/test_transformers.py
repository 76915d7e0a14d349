"""Models with the same weights in transformers: the same logits, and the same tokens from `generate`."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.analysis.trained_model import TrainedModel
from megamoe.config import RunConfig
from megamoe.data.tokenizers import ByteTokenizer
from megamoe.data.vocabulary import Vocabulary
from megamoe.generation.beam_search import BeamOptions
from megamoe.generation.beams import continued
from megamoe.generation.generate import generate
from megamoe.generation.sampling import Sampling
from tests.analysis.routing.tiny_model import opened
from tests.tiny import VOCABULARY

pytestmark = pytest.mark.usefixtures("one_rank")

NEW = 40  # tokens
PROMPTS = [[5, 7, 11, 2], [40], [3, 9, 27, 33, 3, 9, 27, 33, 1]]
SHAPE = (
    "data.sequence_length=64",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "model.hidden_size=32",
    "model.tie_embeddings=false",
    "model.rope_base=5000",
    "model.init_std=0.2",
)
DENSE = ("moe.layers.every=null", "moe.losses={}")
GRANITE = (
    "model.residual_scale=0.4",
    "model.embedding_scale=6",
    "model.logit_scale=0.25",
)
SPARSE = ("moe.router={scorer: linear, selector: {name: top_k, k: 2}}", "moe.losses={}")


def counterpart(config: RunConfig) -> Any:
    """A Llama of the same shape; a Mixtral if every block is MoE; a Granite if there are factors."""
    transformers = pytest.importorskip("transformers")  # here: its import takes two seconds
    model, moe = config.model, config.moe
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "max_position_embeddings": config.data.sequence_length,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(model.rope_base)},
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    if model.residual_scale != 1:
        kind = transformers.GraniteConfig(
            **shape,
            intermediate_size=model.ffn_hidden_size,
            residual_multiplier=model.residual_scale,
            embedding_multiplier=model.embedding_scale,
            logits_scaling=1 / model.logit_scale,
            attention_multiplier=(model.hidden_size // model.num_attention_heads) ** -0.5,
        )
    elif moe.layers.every is None:
        kind = transformers.LlamaConfig(**shape, intermediate_size=model.ffn_hidden_size)
    else:
        kind = transformers.MixtralConfig(
            **shape,
            intermediate_size=moe.expert_ffn_hidden_size,
            num_local_experts=moe.num_experts,
            num_experts_per_tok=moe.router.selector.options.k,
        )
    return transformers.AutoModelForCausalLM.from_config(kind, dtype=torch.float32).eval()


def copied(trained: TrainedModel) -> Any:
    """The counterpart with our weights, every one of them."""
    config, model = trained.config.model, counterpart(trained.config)
    ours = {name.removeprefix("model."): weight for name, weight in trained.model.named_parameters()}
    theirs: dict[str, Tensor] = {
        "model.embed_tokens.weight": ours.pop("embedding.word_embeddings.weight"),
        "model.norm.weight": ours.pop("decoder.final_layernorm.weight"),
        "lm_head.weight": ours.pop("output_layer.weight"),
    }
    groups, heads = config.num_query_groups or 0, config.num_attention_heads
    size = config.hidden_size // heads
    for number in range(config.num_layers):
        mine, its = f"decoder.layers.{number}.", f"model.layers.{number}."
        # Megatron-Core has the rows of the queries, the key and the value of each group together.
        qkv_GRH = ours.pop(f"{mine}self_attention.linear_qkv.weight").view(groups, -1, config.hidden_size)
        parts = qkv_GRH.split([heads // groups * size, size, size], dim=1)
        for name, part_GRH in zip("qkv", parts, strict=True):
            theirs[f"{its}self_attn.{name}_proj.weight"] = part_GRH.flatten(0, 1)
        theirs[f"{its}self_attn.o_proj.weight"] = ours.pop(f"{mine}self_attention.linear_proj.weight")
        theirs[f"{its}input_layernorm.weight"] = ours.pop(f"{mine}input_layernorm.weight")
        theirs[f"{its}post_attention_layernorm.weight"] = ours.pop(f"{mine}pre_mlp_layernorm.weight")
        if f"{mine}mlp.linear_fc1.weight" in ours:
            gate_FH, up_FH = ours.pop(f"{mine}mlp.linear_fc1.weight").chunk(2)
            theirs |= {f"{its}mlp.gate_proj.weight": gate_FH, f"{its}mlp.up_proj.weight": up_FH}
            theirs[f"{its}mlp.down_proj.weight"] = ours.pop(f"{mine}mlp.linear_fc2.weight")
        else:
            layer = f"{mine}mlp.layer."
            theirs[f"{its}mlp.gate.weight"] = ours.pop(f"{layer}router.scorer.weight")
            theirs[f"{its}mlp.experts.gate_up_proj"] = ours.pop(f"{layer}experts.up")
            theirs[f"{its}mlp.experts.down_proj"] = ours.pop(f"{layer}experts.down")
    assert not ours
    model.load_state_dict(theirs, strict=True)
    return model


def their_tokens(model: Any, prompt: list[int], beams: int = 1, most: int = NEW) -> list[int]:
    """Greedy or by a beam search, without the prompt."""
    tokens_BS = torch.tensor([prompt])
    found_BS: Tensor = model.generate(
        tokens_BS,
        attention_mask=torch.ones_like(tokens_BS),
        max_new_tokens=most,
        do_sample=False,
        num_beams=beams,
    )
    new: list[int] = found_BS[0, len(prompt) :].tolist()
    return new


@pytest.mark.parametrize(
    "overrides", [DENSE, SPARSE, (*DENSE, *GRANITE)], ids=["Llama", "Mixtral", "Granite"]
)
@torch.no_grad()
def test_greedy_tokens_and_logits_are_those_of_transformers(overrides: tuple[str, ...]) -> None:
    trained = opened(*SHAPE, *overrides)
    trained = dataclasses.replace(trained, vocabulary=Vocabulary(VOCABULARY, 0, ByteTokenizer()))
    model = copied(trained)
    expected = [their_tokens(model, prompt) for prompt in PROMPTS]
    longest = max(range(len(PROMPTS)), key=lambda place: len(expected[place]))
    assert len(expected[longest]) == NEW, "all end early"
    assert len({token for tokens in expected for token in tokens}) > 10, "they repeat themselves"
    for size, cached in ((3, True), (1, False)):
        sampling = Sampling(max_tokens=NEW, temperature=0.0)
        found = generate(trained, PROMPTS, sampling, batch_size=size, cached=cached, show_experts=False)
        assert [result.tokens for result in found] == expected
    short = [their_tokens(model, prompt, 3, 8) for prompt in PROMPTS[:2]]
    for size, cached in ((2, True), (1, False)):
        options = BeamOptions(3, min_length=0)
        searched = continued(trained, PROMPTS[:2], options, 8, batch_size=size, cached=cached)
        assert [result.tokens for result in searched] == short
    whole_BS = torch.tensor([[*PROMPTS[longest], *expected[longest]]])
    ours_BSV = trained.decoder.logits(whole_BS, torch.arange(whole_BS.shape[1])[None])
    theirs_BSV = model(whole_BS).logits
    assert ours_BSV.std() > 0.1
    assert (ours_BSV - theirs_BSV).abs().max() < 1e-5
