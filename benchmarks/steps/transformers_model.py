"""Transformers' Mixtral of the same shape, trained the way that its users would train it by hand.

Its weights and AdamW's moments are in the dtype of the model. So in bf16 they are bf16, where ours keeps
fp32 master weights and moments: its update moves a third of the bytes of ours, and loses what is rounded.
"""

from typing import Any

import torch

from common.timers import clock
from layers.candidate import NotMeasured
from megamoe.config import RunConfig, parse_config, to_dict
from megamoe.config.shapes import expert_ffn_size, padded_vocab_size
from megamoe.data.vocabulary import resolve_vocabulary
from megamoe.optim.optimizers import adamw_options
from megamoe.parallel.zero.deepspeed_config import resolve_parallel
from steps.candidate import StepTime

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Of the sections `model` and `moe`: what a Mixtral may have as it likes, or what says only how we compute.
TRAINING_ONLY = {
    *(f"model.{size}" for size in ("num_layers", "hidden_size", "ffn_hidden_size", "vocab_size")),
    *(f"model.{heads}" for heads in ("num_attention_heads", "num_query_groups", "rope_base", "norm_eps")),
    *(f"model.{key}" for key in ("vocab_multiple", "tie_embeddings", "init_std", "init_scale")),
    *(f"model.{how}" for how in ("backend", "norm_kernel", "cpu_kernels")),
    *(f"moe.{size}" for size in ("num_experts", "expert_ffn_hidden_size", "router.selector.k")),
}
LOSSES = {"switch_balance", "z_loss"}  # it has no z-loss: ours is work that it does not have


class TransformersModel:
    """`MixtralForCausalLM` with grouped experts and its balance loss, on random tokens.

    Raises (when built):
        NotMeasured: if the configuration cannot be had there, or if transformers is missing.
    """

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        precision = resolve_parallel(config, 1).precision
        refuse_what_it_lacks(config, precision)
        self.clip = config.optimizer.grad_clip
        self.sizes = config.train.micro_batch_size, config.data.sequence_length
        self.accumulation = (config.train.global_batch_size or self.sizes[0]) // self.sizes[0]
        self.device = device
        torch.manual_seed(config.seed)
        self.model = build(config, DTYPES[precision]).to(device)
        self.parameters = self.updated = sum(parameter.numel() for parameter in self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **adamw_options(config.optimizer))

    def step(self, _: int) -> StepTime:
        """Forward, backward, clip, update, clear; the tokens are there before the clock starts."""
        forward = backward = 0.0
        words = self.model.config.vocab_size
        batches = [torch.randint(words, self.sizes, device=self.device) for _ in range(self.accumulation)]
        started = clock()
        for tokens_BS in batches:
            before = clock()
            loss = self.model(input_ids=tokens_BS, labels=tokens_BS).loss / self.accumulation
            between = clock()
            loss.backward()
            forward, backward = forward + between - before, backward + clock() - between
        before = clock()
        if self.clip > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        clipped = clock()
        self.optimizer.step()
        update = clock() - clipped
        self.optimizer.zero_grad(set_to_none=True)
        ended = clock()
        return StepTime(0.0, forward, backward, ended - before, update, ended - started)

    def close(self) -> None:
        """Nothing is open."""


def build(config: RunConfig, dtype: torch.dtype) -> Any:
    """Build the model on the CPU, in training mode.

    Raises:
        NotMeasured: if transformers is missing.
    """
    try:
        from transformers import AutoModelForCausalLM, MixtralConfig
    except ImportError as error:
        raise NotMeasured("transformers is not installed") from error
    model, moe = config.model, config.moe
    vocabulary = resolve_vocabulary(config.data, model.vocab_size)
    balance = moe.losses.get("switch_balance")
    mixtral = MixtralConfig(
        vocab_size=padded_vocab_size(vocabulary.size, model.vocab_multiple),
        hidden_size=model.hidden_size,
        intermediate_size=expert_ffn_size(config),
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_query_groups or model.num_attention_heads,
        num_local_experts=moe.num_experts,
        num_experts_per_tok=moe.router.selector.options.k,
        max_position_embeddings=config.data.sequence_length,
        rope_parameters={"rope_type": "default", "rope_theta": float(model.rope_base)},
        rms_norm_eps=model.norm_eps,
        initializer_range=model.init_std,
        tie_word_embeddings=model.tie_embeddings,
        output_router_logits=balance is not None,
        router_aux_loss_coef=float(balance.options.weight) if balance else 0.0,
        use_cache=False,
    )
    how = {"attn_implementation": "sdpa", "experts_implementation": "grouped_mm"}
    return AutoModelForCausalLM.from_config(mixtral, dtype=dtype, **how).train()


def refuse_what_it_lacks(config: RunConfig, precision: str) -> None:
    """NotMeasured, naming the first key that no Mixtral can have."""
    if precision not in DTYPES:
        raise NotMeasured(f"{precision} needs a loss scale there")
    wanted = _flat(to_dict(parse_config({"moe": {"layers": {"every": 1}}})))
    found = _flat(to_dict(config))
    for key, value in found.items():
        if _matters(key) and value != wanted.get(key):
            raise NotMeasured(f"{key} is {value}, a Mixtral has {wanted.get(key)}")
    names = {choice.name for choice in config.moe.losses.values()}
    if names - LOSSES:
        raise NotMeasured(f"it has no loss {sorted(names - LOSSES)[0]}")


def _matters(key: str) -> bool:
    if key.startswith(("model.", "moe.")):
        return key not in TRAINING_ONLY and not key.startswith("moe.losses")
    return key in ("data.document_aware", "train.label_smoothing")


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys -> values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
