"""Configurations that cannot run are refused in one line, before anything is allocated."""

import re

import pytest

from megamoe.errors import UserError
from megamoe.train.rotary_rules import check_rotary
from tests.tiny import check_on, tiny

RAMP = "train.batch_rampup={start: 4, increment: 4, samples: 100}"
TWO_STACKS = (
    "model.architecture=encoder_decoder",
    "train.objective=span_corruption",
    "moe.router.selector=expert_choice",
)
LATENT = "model.latent={key_value_rank: 6, nope_size: 4, rope_size: 2, value_size: 4}"
UNEVEN_BIASES = ("moe.expert_bias=true", "model.hidden_size=18", "model.num_attention_heads=1")
REFUSALS = {
    "heads": (["model.num_attention_heads=3"], 1, "model.hidden_size: 16 .* model.num_attention_heads 3"),
    "query groups": (
        ["model.num_attention_heads=4", "model.num_query_groups=3"],
        1,
        "model.num_attention_heads: 4 .* model.num_query_groups 3",
    ),
    "odd rope heads": (
        ["model.hidden_size=18", "model.num_attention_heads=2"],
        1,
        "model.hidden_size 18 over 2 heads .* odd size 9; rope needs an even one",
    ),
    "odd head size": (["model.head_size=9"], 1, "model.head_size: 9 is odd; rope needs an even one"),
    "odd columns that turn": (
        ["model.rotary.share=0.4"],
        1,
        "model.rotary.share: 0.4 of heads of size 8 is 3 columns; expected an even number",
    ),
    "a scaling without its key": (
        ["model.rotary={scaling: llama3, factor: 8, original_length: 16, low_frequency_factor: 1}"],
        1,
        "model.rotary.high_frequency_factor: scaling llama3 needs it, found none",
    ),
    "a key of another scaling": (
        ["model.rotary={scaling: linear, factor: 8, beta_fast: 32}"],
        1,
        "model.rotary.beta_fast: found 32.*, which scaling linear does not read; leave it out",
    ),
    "frequencies the wrong way round": (
        [
            "model.rotary={scaling: llama3, factor: 8, original_length: 16}",
            "model.rotary.low_frequency_factor=4",
            "model.rotary.high_frequency_factor=1",
        ],
        1,
        "model.rotary.low_frequency_factor: found 4.*, expected less than high_frequency_factor 1",
    ),
    "YaRN's bounds the wrong way round": (
        ["model.rotary={scaling: yarn, factor: 8, original_length: 16, beta_slow: 32}"],
        1,
        "model.rotary.beta_fast: found 32, expected more than beta_slow 32",
    ),
    "rotary keys without rotary positions": (
        ["model.position=learned", "model.rotary.interleaved=true"],
        1,
        "model.rotary: found keys, but model.position is learned; leave them out",
    ),
    "latent attention with biases": (
        [LATENT, "model.bias=true"],
        1,
        "model.attention.input_bias .* found true, but latent attention .* has none; set it to false",
    ),
    "latent attention with a share": (
        [LATENT, "model.rotary.share=0.5"],
        1,
        "model.rotary.share: found 0.5, but latent attention .* needs 1, and turns rope_size columns",
    ),
    "odd latent columns": (
        [LATENT, "model.latent.rope_size=3"],
        1,
        "model.latent.rope_size: found 3, expected an even number",
    ),
    "a latent rank on two ranks": (
        [LATENT, "model.latent.query_rank=5", "parallel.tensor=2"],
        2,
        "parallel.tensor: 2 .* model.latent.query_rank 5",
    ),
    "a window of an encoder": (
        ["model.architecture=encoder", "train.objective=masked", "model.attention.window=4"],
        1,
        "model.attention.window: found 4, .* but model.architecture is encoder; leave it out",
    ),
    "sinks with dropout": (
        ["model.attention.sinks=true", "model.attention_dropout=0.1"],
        1,
        "model.attention.sinks: found true beside model.attention_dropout 0.1, .* set model.attention",
    ),
    "blocks without a window": (
        ["model.attention.window_blocks=[1]"],
        1,
        r"model.attention.window_blocks: found \[1\], but model.attention.window is not set",
    ),
    "a block twice": (
        ["model.attention={window: 4, window_blocks: [2, 2]}"],
        1,
        r"model.attention.window_blocks: found \[2, 2\]; expected at least one block, each once",
    ),
    "a block that is not there": (
        ["model.attention={window: 4, window_blocks: [3]}"],
        1,
        r"model.attention.window_blocks: found \[3\], but the model has 2 blocks",
    ),
    "rows of the grouped product": (
        ["moe.expert_ffn_hidden_size=14"],
        1,
        "moe.expert_ffn_hidden_size.*: 14 is not a multiple of 4, .* in fp32",
    ),
    "rows in bf16": (
        ["moe.expert_ffn_hidden_size=12", "parallel.precision=bf16"],
        1,
        "moe.expert_ffn_hidden_size.*: 12 is not a multiple of 8, .* in bf16",
    ),
    "a block beyond the model": (
        ["moe.layers={at: [2, 3]}"],
        1,
        r"moe.layers.at: block 3 does not exist, the model has 2 ",
    ),
    "a layer after a block beyond the model": (
        ["moe.layers={insert_after: [5]}"],
        1,
        r"moe.layers.insert_after: block 5 does not exist, the model has 2 ",
    ),
    "two layers of one number": (
        ["moe.layers={every: 2, insert_after: [1, 2]}"],
        1,
        r"moe.layers.insert_after: block 2 is MoE itself \(moe.layers.at or every\); insert after another",
    ),
    "two factors on the embeddings": (
        ["model.scale_embeddings=true", "model.embedding_scale=12"],
        1,
        "model.embedding_scale: found 12 beside model.scale_embeddings, .*; leave one of them out",
    ),
    "a bound on the logits of labels": (
        ["model.architecture=encoder", "model.num_labels=3", "model.logit_soft_cap=30"],
        1,
        "model.logit_scale, model.logit_soft_cap: are for a head that predicts tokens; with model.num_labels",
    ),
    "tokens ahead of an encoder": (
        ["model.architecture=encoder", "train.objective=masked", "model.multi_token_prediction.depth=1"],
        1,
        "model.multi_token_prediction.depth: 1 is for a decoder, found model.architecture encoder; set",
    ),
    "tokens ahead of all others": (
        ["model.multi_token_prediction.depth=8"],
        1,
        r"model.multi_token_prediction.depth: 8 predicts nothing in sequences of 8 tokens \(data.seq",
    ),
    "residual of nothing": (
        ["moe.shared_expert_mode=residual"],
        1,
        "moe.shared_expert_mode: found residual, but moe.num_shared_experts is 0; set it to 1",
    ),
    "biases that expert tensor parallelism cannot cut": (
        [*UNEVEN_BIASES, "parallel.expert_tensor=4"],
        4,
        r"parallel.expert_tensor: 4 cannot cut the experts' biases of size 18 \(moe.expert_bias\)",
    ),
    "a size of no shared experts": (
        ["moe.shared_expert_ffn_hidden_size=8"],
        1,
        "moe.shared_expert_ffn_hidden_size: found 8, but moe.num_shared_experts is 0; set it to 1",
    ),
    "shared experts without a norm": (
        ["moe.layers={insert_after: [1]}", "moe.expert_sublayers=2", "moe.num_shared_experts=1"],
        1,
        "moe.num_shared_experts: found 1, but an inserted layer .* of 2 sub-layers .*; set it to 0",
    ),
    "no block": (["moe.layers.every=3"], 1, r"moe.layers.every: 3 is more than model.num_layers 2"),
    "experts": (
        ["moe.num_experts=6", "parallel.expert=4"],
        4,
        "parallel.expert: 4 does not divide moe.num_experts 6; legal on 4 ranks .*: 1, 2$",
    ),
    # 12 ranks divide by 1, 2, 3, 4, 6, 12, of which 4 experts divide by 1, 2, 4.
    "ranks": (
        ["parallel.expert=8"],
        12,
        "parallel.expert: 8 does not divide the number of ranks 12; legal on 12 ranks .*: 1, 2, 4$",
    ),
    "k": (
        ["moe.router.selector.k=5"],
        1,
        r"moe.router.selector: top_k: k is 5, .* only 4 experts .*; choose k <= 4",
    ),
    "dense": (
        ["moe.layers=none", "parallel.expert=2"],
        2,
        r"parallel.expert: 2 has nothing to divide: no block is MoE \(moe.layers\); legal .*: 1$",
    ),
    "frozen": (
        ["moe.layers=none", "moe.frozen=[router, experts]"],
        1,
        "moe.frozen: found router, experts, but",
    ),
    "cut from nowhere": (
        ["checkpoint.init.experts=cut"],
        1,
        "checkpoint.init.experts: found cut, but checkpoint.init.path names no dense checkpoint",
    ),
    "copy into a dense model": (
        ["checkpoint.init={path: a, experts: copy}", "moe.layers=none"],
        1,
        "checkpoint.init.experts: found copy, but no block is MoE",
    ),
    "cut where no FFN was": (
        ["checkpoint.init={path: a, experts: cut}", "moe.layers={insert_after: [1], at: [2]}"],
        1,
        "found cut, but moe.layers.insert_after puts MoE layers where a dense model has no FFN",
    ),
    "cut into stacks": (
        ["checkpoint.init={path: a, experts: cut}", "moe.expert_sublayers=3"],
        1,
        "found cut, but experts of 3 sub-layers are no FFN; set moe.expert_sublayers=1",
    ),
    "batch, nearer below": (
        ["train.global_batch_size=17"],
        4,
        r"train.global_batch_size: 17 is not a multiple of 8 \(train.micro_batch_size 2 x 4 .*; nearest: 16$",
    ),
    "batch, nearer above": (["train.global_batch_size=23"], 4, "nearest: 24$"),
    "batch, below one": (["train.global_batch_size=3"], 4, "nearest: 8$"),
    "ramp-up start": (
        ["train.global_batch_size=16", RAMP],
        4,
        "train.batch_rampup.start: 4 is not a multiple of 8 .*; nearest: 8$",
    ),
    "ramp-up": (
        ["train.global_batch_size=18", RAMP],
        1,
        "train.batch_rampup: from 4 by 4 does not reach train.global_batch_size 18",
    ),
    "ramp-down": (["train.global_batch_size=2", RAMP], 1, "does not reach train.global_batch_size 2"),
    "warm-up": (
        ["optimizer.warmup_steps=5"],
        1,
        r"optimizer.warmup_steps: 5 is more than the 4 steps of the schedule",
    ),
    "two warm-ups": (
        ["optimizer.warmup_steps=2", "optimizer.warmup_share=0.5"],
        1,
        "optimizer.warmup_share: found 0.5 beside optimizer.warmup_steps 2; leave one of them out",
    ),
    "a share of warm-up against decay_steps": (
        ["optimizer.warmup_share=0.9", "optimizer.decay_steps=3"],
        1,
        "optimizer.warmup_share: 0.9 of 4 steps, 4, is more than the 3 steps of the schedule",
    ),
    "two lengths": (
        ["train.epochs=2", "data={mock: false, sources: [a]}"],
        1,
        "train.steps: found 4 beside train.epochs 2, .* leave one out .on the command line: train.steps=null",
    ),
    "epochs of mock data": (
        ["train.epochs=2", "train.steps=null"],
        1,
        "train.epochs: data.mock has no end, so no epochs; set train.steps instead",
    ),
    "weights and an exponent": (
        ["data={sources: [a, {path: b, weight: 2}], sampling_exponent: 0.7}"],
        1,
        "data.sampling_exponent: found 0.7, .* data.sources.1 .b. has the weight 2; leave the exponent or",
    ),
    "an exponent for mock data": (
        ["data.sampling_exponent=0.7"],
        1,
        "data.sampling_exponent: found 0.7, but data.mock has no sources to weigh",
    ),
    "warm-up against decay_steps": (
        ["optimizer.warmup_steps=4", "optimizer.decay_steps=3"],
        1,
        "optimizer.warmup_steps: 4 is more than the 3 steps",
    ),
    "experts that choose tokens in a decoder": (
        ["moe.router.selector=expert_choice"],
        1,
        "moe.router.selector: expert_choice: in a decoder .* later tokens, .* allow_non_causal: true .*",
    ),
    "and in the decoder of two stacks": (
        [*TWO_STACKS, "moe.layers={encoder: {every: 1}, decoder: {every: 2}}"],
        1,
        "moe.router.selector: expert_choice: in a decoder ",
    ),
    "min_lr": (
        ["optimizer.lr=1e-3", "optimizer.min_lr=2e-3"],
        1,
        "optimizer.min_lr: 0.002 is more than optimizer.lr 0.001",
    ),
}


def test_latent_attention_is_no_cross_attention() -> None:
    """An encoder_decoder needs pairs of texts, without which the run is refused earlier."""
    model = tiny(LATENT, "model.architecture=encoder_decoder").model
    with pytest.raises(UserError, match="model.architecture: found encoder_decoder, but latent attention"):
        check_rotary(model)


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_in_one_line(case: str) -> None:
    overrides, world_size, pattern = REFUSALS[case]
    with pytest.raises(UserError) as refusal:
        check_on(tiny(*overrides), world_size)
    assert re.search(pattern, str(refusal.value)), str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        ([], 1),
        (["parallel.expert=4", "train.global_batch_size=32"], 8),
        (["moe.layers=none", "moe.router.selector.k=5"], 3),  # no router, so its k does not matter
        (["train.global_batch_size=16", RAMP], 2),
        (["optimizer.warmup_steps=4"], 1),
        (["model.architecture=encoder", "train.objective=masked", "moe.router.selector=expert_choice"], 1),
        ([*TWO_STACKS, "moe.layers={encoder: {every: 1}}"], 1),
        (["optimizer.warmup_share=0.5"], 1),
        (["train.epochs=0.5", "train.steps=null", "data={mock: false, sources: [a]}"], 1),
        (["data={sources: [a, {path: b, weight: 1}], sampling_exponent: 0}"], 1),
        (["moe.layers={at: [2], insert_after: [1]}", "moe.num_shared_experts=1"], 1),
        (["moe.layers={every: 1}", "moe.expert_sublayers=2", "moe.num_shared_experts=1"], 1),
        (["optimizer.warmup_steps=9", "optimizer.schedule=constant"], 1),
        (["model.hidden_size=18", "model.position=learned", "moe.layers=none"], 1),
        (["checkpoint.init={path: a, experts: cut}", "parallel.tensor=2", "parallel.expert_tensor=1"], 2),
        (["checkpoint.init.path=a", "moe.expert_ffn_hidden_size=16", "parallel.expert_tensor=2"], 2),
    ],
)
def test_what_fits_passes(overrides: list[str], world_size: int) -> None:
    check_on(tiny(*overrides), world_size)
