"""Beam search is transformers' `generate` on a Marian (post-norm) and a Pegasus (pre-norm) of our weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megamoe.apps.evaluation.trained_model import TrainedModel
from megamoe.apps.generation.beam_search import BeamOptions, beam_search
from megamoe.apps.generation.runner import Runner
from megamoe.config import RunConfig
from tests.support.apps.encoder_decoders import END, SOURCES, opened, whole_logits
from tests.support.model.plain import sinusoids

pytestmark = pytest.mark.usefixtures("one_rank")

WORDS, PAD, NEW = 16, 15, 10
EOS = 3  # a token that these models like, so that hypotheses end at different places
SHAPE = (
    "model.position=sinusoidal",
    "model.norm=layernorm",
    "model.activation=relu",
    "model.bias=true",
    "model.scale_embeddings=true",
)
FAMILIES = {"Marian": "post", "Pegasus": "pre"}
CASES = [(4, 1.0), (3, 0.6), (4, 2.0), (5, -1.0), (2, 0.0), (1, 1.0)]  # beams, length penalty


def counterpart(family: str, config: RunConfig) -> Any:
    """A model of transformers of the same shape."""
    transformers = pytest.importorskip("transformers")  # here: its import takes two seconds
    model = config.model
    sides = ("encoder", "decoder")
    kind = getattr(transformers, f"{family}Config")(
        vocab_size=WORDS,
        d_model=model.hidden_size,
        **{f"{side}_layers": 2 for side in sides},
        **{f"{side}_attention_heads": model.num_attention_heads for side in sides},
        **{f"{side}_ffn_dim": model.ffn_hidden_size for side in sides},
        activation_function=model.activation,
        max_position_embeddings=config.data.sequence_length,
        scale_embedding=True,
        tie_word_embeddings=True,
        decoder_start_token_id=END,
        eos_token_id=EOS,
        pad_token_id=PAD,
        bos_token_id=None,
        forced_eos_token_id=None,
        attn_implementation="eager",
    )
    names = {"Marian": "MarianMTModel", "Pegasus": "PegasusForConditionalGeneration"}
    return getattr(transformers, names[family])(kind).eval()


def copied(family: str, trained: TrainedModel) -> Any:
    """The counterpart with our weights, every one of them."""
    config, model = trained.config.model, counterpart(family, trained.config)
    ours = dict(trained.model.named_parameters())
    words = ours.pop("embedding.word_embeddings.weight")
    positions = sinusoids(trained.config.data.sequence_length, config.hidden_size)
    theirs: dict[str, Tensor] = {"lm_head.weight": words, "model.shared.weight": words}
    theirs["final_logits_bias"] = torch.zeros(1, WORDS)
    for stack in ("encoder", "decoder"):
        theirs[f"model.{stack}.embed_tokens.weight"] = words
        theirs[f"model.{stack}.embed_positions.weight"] = positions
        if config.norm_position == "pre":
            for part in ("weight", "bias"):
                name = f"{stack}.final_layernorm.{part}"
                theirs[f"model.{stack}.layer_norm.{part}"] = ours.pop(name)
        for number in range(2):
            mine, its = f"{stack}.layers.{number}.", f"model.{stack}.layers.{number}."
            theirs |= block_of(ours, mine, its, stack == "decoder", config.num_attention_heads)
    assert not ours
    missing, unexpected = model.load_state_dict(theirs, strict=False)
    assert not unexpected and all("final_logits_bias" in name for name in missing), (missing, unexpected)
    return model


def block_of(ours: dict[str, nn.Parameter], mine: str, its: str, is_decoder: bool, heads: int) -> dict:
    """Take a block's weights out of `ours`, under their names."""
    found: dict[str, Tensor] = {}
    names = {"input_layernorm": "self_attn_layer_norm", "pre_mlp_layernorm": "final_layer_norm"}
    names |= {
        "mlp.linear_fc1": "fc1",
        "mlp.linear_fc2": "fc2",
        "self_attention.linear_proj": "self_attn.out_proj",
    }
    if is_decoder:
        names |= {"pre_cross_attn_layernorm": "encoder_attn_layer_norm"}
        names |= {"cross_attention.linear_q": "encoder_attn.q_proj"}
        names |= {"cross_attention.linear_proj": "encoder_attn.out_proj"}
    for part in ("weight", "bias"):
        for our_name, their_name in names.items():
            found[f"{its}{their_name}.{part}"] = ours.pop(f"{mine}{our_name}.{part}")
        # Megatron-Core has the rows of a head's query, key and value together.
        mixed = {"self_attention.linear_qkv": ("self_attn", "qkv")}
        if is_decoder:
            mixed["cross_attention.linear_kv"] = ("encoder_attn", "kv")
        for our_name, (attention, sides) in mixed.items():
            rows = ours.pop(f"{mine}{our_name}.{part}").unflatten(0, (heads, len(sides), -1))
            for place, side in enumerate(sides):
                found[f"{its}{attention}.{side}_proj.{part}"] = rows[:, place].flatten(0, 1)
    return found


def their_best(model: Any, beams: int, penalty: float) -> Any:
    """All hypotheses of `generate` for all sources in one batch: (tokens without padding, score)."""
    longest = max(map(len, SOURCES))
    tokens_BS = torch.tensor([source + [PAD] * (longest - len(source)) for source in SOURCES])
    options = {"length_penalty": penalty} if beams > 1 else {}
    found = model.generate(
        tokens_BS,
        attention_mask=(tokens_BS != PAD).long(),
        num_beams=beams,
        num_return_sequences=beams,
        max_new_tokens=NEW,
        min_new_tokens=1,
        suppress_tokens=[PAD],
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    scores = found.sequences_scores.tolist() if beams > 1 else [None] * len(SOURCES)
    rows = [[token for token in row[1:] if token != PAD] for row in found.sequences.tolist()]
    return list(zip(rows, scores, strict=True))


@pytest.mark.parametrize("family", ["Marian", pytest.param("Pegasus", marks=pytest.mark.full)])
@torch.no_grad()
def test_logits_and_hypotheses_are_those_of_transformers(family: str) -> None:
    trained = opened(*SHAPE, f"model.norm_position={FAMILIES[family]}", vocabulary=WORDS, bumps=0.05)
    model = copied(family, trained)
    target = [END, 3, 9, 9, 4]
    theirs = model(input_ids=torch.tensor([SOURCES[2]]), decoder_input_ids=torch.tensor([target])).logits[0]
    assert theirs.std() > 0.1
    assert (whole_logits(trained, SOURCES[2], target) - theirs).abs().max() < 1e-4
    lengths = set()
    for beams, penalty in CASES:
        wanted = their_best(model, beams, penalty)
        options = BeamOptions(beams, penalty, n_best=beams)
        runner = Runner(trained, [[END]] * len(SOURCES), NEW, sources=SOURCES)
        found = beam_search(runner, [NEW] * len(SOURCES), options, end=EOS, forbidden=[PAD])
        flat = [hypothesis for row in found for hypothesis in row]
        assert [each.tokens for each in flat] == [tokens for tokens, _ in wanted], (beams, penalty)
        if beams > 1:
            assert [each.score for each in flat] == pytest.approx([score for _, score in wanted], abs=1e-4)
        lengths |= {len(each.tokens) for each in flat if each.tokens[-1] == EOS}
    assert len(lengths) > 3, "hypotheses end at few places"
