"""Configurations that cannot run are refused in one line, before anything is allocated."""

import random

import pytest

from megamoe.errors import UserError
from megamoe.parallel.zero.deepspeed_config import resolve_parallel
from megamoe.validation.architecture import size_problems
from megamoe.validation.run import validate
from tests.support.tiny import check_on, tiny

RAMP = "train.batch_rampup={start: 4, increment: 4, samples: 100}"
TWO_STACKS = (
    "model.architecture=encoder_decoder",
    "train.objective=span_corruption",
    "moe.router.selector=expert_choice",
)
LATENT = "model.latent={key_value_rank: 6, nope_size: 4, rope_size: 2, value_size: 4}"
UNEVEN_BIASES = ("moe.expert_bias=true", "model.hidden_size=18", "model.num_attention_heads=1")
# By what is wrong: the message, then the overrides.
REFUSALS = {
    "one expert with weight one": (
        "moe.router.selector: with k: 1 the weights 'renormalised' are always 1 .*set weights: raw, or",
        "moe.router.selector={name: top_k, k: 1}",
    ),
    "one expert with a softmax of one": (
        "moe.router.selector: with k: 1 the weights 'kept_softmax' are always 1",
        "moe.router.selector={name: top_k, k: 1, weights: kept_softmax}",
    ),
    "query groups": (
        "model.num_attention_heads: 4 .* model.num_query_groups 3",
        "model.num_attention_heads=4",
        "model.num_query_groups=3",
    ),
    "odd rope heads": (
        "model.hidden_size: 18 over 2 heads .* odd size 9; rope needs an even one",
        "model.hidden_size=18",
        "model.num_attention_heads=2",
    ),
    "odd head size": ("model.head_size: 9 is odd; rope needs an even one", "model.head_size=9"),
    "odd columns that turn": (
        "model.rotary.share: 0.4 of heads of size 8 is 3 columns; expected an even number",
        "model.rotary.share=0.4",
    ),
    "a scaling without its key": (
        "model.rotary.high_frequency_factor: scaling llama3 needs it, found none",
        "model.rotary={scaling: llama3, factor: 8, original_length: 16, low_frequency_factor: 1}",
    ),
    "a key of another scaling": (
        "model.rotary.beta_fast: found 32.*, which scaling linear does not read; leave it out",
        "model.rotary={scaling: linear, factor: 8, beta_fast: 32}",
    ),
    "frequencies the wrong way round": (
        "model.rotary.low_frequency_factor: found 4.*, expected less than high_frequency_factor 1",
        "model.rotary={scaling: llama3, factor: 8, original_length: 16}",
        "model.rotary.low_frequency_factor=4",
        "model.rotary.high_frequency_factor=1",
    ),
    "YaRN's bounds the wrong way round": (
        "model.rotary.beta_fast: found 32, expected at least beta_slow 33",
        "model.rotary={scaling: yarn, factor: 8, original_length: 16, beta_slow: 33}",
    ),
    "rotary keys without rotary positions": (
        "model.rotary: found keys, but model.position is learned; leave them out",
        "model.position=learned",
        "model.rotary.interleaved=true",
    ),
    "latent attention with biases": (
        "model.attention.input_bias: found true .*, but latent attention .* has none; set it to false",
        LATENT,
        "model.bias=true",
    ),
    "latent attention with a share": (
        "model.rotary.share: found 0.5, but latent attention .* needs 1, and turns rope_size columns",
        LATENT,
        "model.rotary.share=0.5",
    ),
    "odd latent columns": (
        "model.latent.rope_size: found 3, expected an even number",
        LATENT,
        "model.latent.rope_size=3",
    ),
    "a window of an encoder": (
        "model.attention.window: found 4, .* but model.architecture is encoder; leave it out",
        "model.architecture=encoder",
        "train.objective=masked",
        "model.attention.window=4",
    ),
    "sinks with dropout": (
        "model.attention.sinks: found true beside model.attention_dropout 0.1, .* set model.attention",
        "model.attention.sinks=true",
        "model.attention_dropout=0.1",
    ),
    "blocks without a window": (
        r"model.attention.window_blocks: found \[1\], but model.attention.window is not set",
        "model.attention.window_blocks=[1]",
    ),
    "a block twice": (
        r"model.attention.window_blocks: found \[2, 2\]; expected at least one block, each once",
        "model.attention={window: 4, window_blocks: [2, 2]}",
    ),
    "a block that is not there": (
        r"model.attention.window_blocks: found \[3\], but the model has 2 blocks",
        "model.attention={window: 4, window_blocks: [3]}",
    ),
    "rows of the grouped product": (
        "moe.expert_ffn_hidden_size.*: 14 is not a multiple of 4, .* in fp32",
        "moe.expert_ffn_hidden_size=14",
    ),
    "rows in bf16": (
        "moe.expert_ffn_hidden_size.*: 12 is not a multiple of 8, .* in bf16",
        "moe.expert_ffn_hidden_size=12",
        "parallel.precision=bf16",
    ),
    "a block beyond the model": (
        r"moe.layers.at: block 3 does not exist, the model has 2 ",
        "moe.layers={at: [2, 3]}",
    ),
    "a layer after a block beyond the model": (
        r"moe.layers.insert_after: block 5 does not exist, the model has 2 ",
        "moe.layers={insert_after: [5]}",
    ),
    "two layers of one number": (
        r"moe.layers.insert_after: block 2 is MoE itself \(moe.layers.at or every\); insert after another",
        "moe.layers={every: 2, insert_after: [1, 2]}",
    ),
    "two factors on the embeddings": (
        "model.embedding_scale: found 12 beside model.scale_embeddings, .*; leave one of them out",
        "model.scale_embeddings=true",
        "model.embedding_scale=12",
    ),
    "a bound on the logits of labels": (
        "model.logit_scale, model.logit_soft_cap: are for a head that predicts tokens; with model.num_labels",
        "model.architecture=encoder",
        "model.num_labels=3",
        "model.logit_soft_cap=30",
    ),
    "tokens ahead of an encoder": (
        "model.multi_token_prediction.depth: 1 is for a decoder, found model.architecture encoder; set",
        "model.architecture=encoder",
        "train.objective=masked",
        "model.multi_token_prediction.depth=1",
    ),
    "tokens ahead of all others": (
        r"model.multi_token_prediction.depth: 8 predicts nothing in sequences of 8 tokens \(data.seq",
        "model.multi_token_prediction.depth=8",
    ),
    "residual of nothing": (
        "moe.shared_expert_mode: found residual, but moe.num_shared_experts is 0; set it to 1",
        "moe.shared_expert_mode=residual",
    ),
    "a size of no shared experts": (
        "moe.shared_expert_ffn_hidden_size: found 8, but moe.num_shared_experts is 0; set it to 1",
        "moe.shared_expert_ffn_hidden_size=8",
    ),
    "shared experts without a norm": (
        "moe.num_shared_experts: found 1, but an inserted layer .* of 2 sub-layers .*; set it to 0",
        "moe.layers={insert_after: [1]}",
        "moe.expert_sublayers=2",
        "moe.num_shared_experts=1",
    ),
    "a wide latent space": (
        "moe.latent_size: found 16, expected less than model.hidden_size, 16: .* set it to null",
        "moe.latent_size=16",
    ),
    "sub-layers in a latent space": (
        "moe.latent_size: found 8, but 2 residual sub-layers .* set it to null, or the sub-layers to 1",
        "moe.latent_size=8",
        "moe.expert_sublayers=2",
    ),
    "cut into latent experts": (
        "found cut, but a dense FFN computes hidden states, .* size 8; set moe.latent_size=null",
        "checkpoint.init={path: a, experts: cut}",
        "moe.latent_size=8",
    ),
    "no block": (r"moe.layers.every: 3 is more than model.num_layers 2", "moe.layers.every=3"),
    "k": (
        r"moe.router.selector: top_k: k is 5, .* only 4 experts .*; choose k <= 4",
        "moe.router.selector.k=5",
    ),
    "frozen": ("moe.frozen: found router, experts, but", "moe.layers=none", "moe.frozen=[router, experts]"),
    "cut from nowhere": (
        "checkpoint.init.experts: found cut, but checkpoint.init.path names no dense checkpoint",
        "checkpoint.init.experts=cut",
    ),
    "copy into a dense model": (
        "checkpoint.init.experts: found copy, but no block is MoE",
        "checkpoint.init={path: a, experts: copy}",
        "moe.layers=none",
    ),
    "cut where no FFN was": (
        "found cut, but moe.layers.insert_after puts MoE layers where a dense model has no FFN",
        "checkpoint.init={path: a, experts: cut}",
        "moe.layers={insert_after: [1], at: [2]}",
    ),
    "cut into stacks": (
        "found cut, but experts of 3 sub-layers are no FFN; set moe.expert_sublayers=1",
        "checkpoint.init={path: a, experts: cut}",
        "moe.expert_sublayers=3",
    ),
    "ramp-up": (
        "train.batch_rampup: from 4 by 4 does not reach train.global_batch_size 18",
        "train.global_batch_size=18",
        RAMP,
    ),
    "ramp-down": ("does not reach train.global_batch_size 2", "train.global_batch_size=2", RAMP),
    "warm-up": (
        r"optimizer.warmup_steps: 5 is more than the 4 steps of the schedule",
        "optimizer.warmup_steps=5",
    ),
    "a stop at a spike that nothing says": (
        "train.loss_spike.action: found stop, but no sigmas say what a spike is; set train.loss_spike.sigmas",
        "train.loss_spike.action=stop",
    ),
    "two warm-ups": (
        "optimizer.warmup_share: found 0.5 beside optimizer.warmup_steps 2; leave one of them out",
        "optimizer.warmup_steps=2",
        "optimizer.warmup_share=0.5",
    ),
    "a share of warm-up against decay_steps": (
        "optimizer.warmup_share: 0.9 of 4 steps, 4, is more than the 3 steps of the schedule",
        "optimizer.warmup_share=0.9",
        "optimizer.decay_steps=3",
    ),
    "two lengths": (
        "train.steps: found 4 beside train.epochs 2, .* leave one out .on the command line: train.steps=null",
        "train.epochs=2",
        "data={mock: false, sources: [a]}",
    ),
    "epochs of mock data": (
        "train.epochs: data.mock has no end, so no epochs; set train.steps instead",
        "train.epochs=2",
        "train.steps=null",
    ),
    "weights and an exponent": (
        "data.sampling_exponent: found 0.7, .* data.sources.1 .b. has the weight 2; leave the exponent or",
        "data={sources: [a, {path: b, weight: 2}], sampling_exponent: 0.7}",
    ),
    "an exponent for mock data": (
        "data.sampling_exponent: found 0.7, but data.mock has no sources to weigh",
        "data.sampling_exponent=0.7",
    ),
    "warm-up against decay_steps": (
        "optimizer.warmup_steps: 4 is more than the 3 steps",
        "optimizer.warmup_steps=4",
        "optimizer.decay_steps=3",
    ),
    "experts that choose tokens in a decoder": (
        "moe.router.selector: expert_choice: in a decoder .* later tokens, .* allow_non_causal: true .*",
        "moe.router.selector=expert_choice",
    ),
    "and in the decoder of two stacks": (
        "moe.router.selector: expert_choice: in a decoder ",
        *TWO_STACKS,
        "moe.layers={encoder: {every: 1}, decoder: {every: 2}}",
    ),
    "min_lr": (
        "optimizer.min_lr: 0.002 is more than optimizer.lr 0.001",
        "optimizer.lr=1e-3",
        "optimizer.min_lr=2e-3",
    ),
    "a latent rank on two ranks": (
        "parallel.tensor: 2 .* model.latent.query_rank 5",
        LATENT,
        "model.latent.query_rank=5",
        "parallel.tensor=2",
    ),
    "biases that expert tensor parallelism cannot cut": (
        r"parallel.expert_tensor: 4 cannot cut the experts' biases of size 18 \(moe.expert_bias\)",
        *UNEVEN_BIASES,
        "parallel.expert_tensor=4",
    ),
    "batch, nearer below": (
        r"train.global_batch_size: 17 is not a multiple of 8 \(train.micro_batch_size 2 x 4 .*; nearest: 16$",
        "train.global_batch_size=17",
    ),
    "batch, nearer above": ("nearest: 24$", "train.global_batch_size=23"),
    "batch, below one": ("nearest: 8$", "train.global_batch_size=3"),
    "ramp-up start": (
        "train.batch_rampup.start: 4 is not a multiple of 8 .*; nearest: 8$",
        "train.global_batch_size=16",
        RAMP,
    ),
}
# Of the cases that take more than one.
RANKS = {"a latent rank on two ranks": 2, "biases that expert tensor parallelism cannot cut": 4}
RANKS |= dict.fromkeys(("batch, nearer below", "batch, nearer above", "batch, below one", "ramp-up start"), 4)


def test_latent_attention_is_no_cross_attention() -> None:
    """An encoder_decoder needs pairs of texts, without which the run is refused earlier."""
    model = tiny(LATENT, "model.architecture=encoder_decoder").model
    assert [problem.key for problem in size_problems(model)] == ["model.architecture"]


def test_many_problems_do_not_disturb_each_other() -> None:
    """Five cases at a time: no check fails because of what another one refuses, and none says it again."""
    draws = random.Random(1)
    for _ in range(60):
        overrides = [each for case in draws.sample(sorted(REFUSALS), 5) for each in REFUSALS[case][1:]]
        config = tiny(*overrides)
        found = list(validate(config, 1, resolve_parallel(config, 1)))
        assert len({str(problem) for problem in found}) == len(found) > 0


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_in_one_line(case: str) -> None:
    message, *overrides = REFUSALS[case]
    with pytest.raises(UserError, match=message) as refusal:
        check_on(tiny(*overrides), RANKS.get(case, 1))
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
