"""Canaries of Megatron-Core's transformer."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from packaging.version import Version

from megamoe.compat.megatron_compat import (
    allow_latent_attention,
    ffn_submodules,
    head_norm,
    set_random_tracker,
)
from megamoe.compat.startup import TESTED
from megamoe.model.build import OneStream
from megamoe.model.modules import Norm
from tests.support.tiny import tiny, tiny_gpt

OLDEST = Version(TESTED["megatron-core"][1])
LATENT = "model.latent={key_value_rank: 16, nope_size: 8, rope_size: 4, value_size: 8}"


class AskedError(Exception):
    """The CUDA device was asked for."""


def refuse() -> Any:
    raise AskedError


def test_layers_ask_for_the_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequence parallelism does, for what it gathers; on one rank nothing asks."""
    monkeypatch.setattr(torch.cuda, "current_device", refuse)
    group = SimpleNamespace(size=lambda: 2)
    with pytest.raises(AskedError):
        mappings._gather_along_first_dim(torch.ones(2), group=group)


def test_random_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED"):
        monkeypatch.setattr(megatron_random, name, getattr(megatron_random, name))
    tracker = OneStream()
    set_random_tracker(tracker)
    assert megatron_random.get_cuda_rng_tracker() is tracker
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError)):  # else it would do on the CPU by itself
            megatron_random.CudaRNGStatesTracker().add("a state", 1)


def test_ffn_submodules() -> None:
    submodules = ffn_submodules(get_gpt_layer_local_spec().submodules.mlp)
    assert submodules.linear_fc1 is not None and submodules.linear_fc2 is not None
    assert Version("0.19") > OLDEST, "a functools.partial is all that is left"


def test_latent_attention_without_transformer_engine() -> None:
    """0.16 takes its mocks for classes; 0.19 asks whether Transformer Engine is there."""
    allow_latent_attention()
    linear: Any = getattr(multi_latent_attention, "TELinear", None)
    if not isinstance(linear, type):
        assert not multi_latent_attention.HAVE_TE
        with pytest.raises(TypeError):
            isinstance(None, linear)
    assert Version("0.19") > OLDEST, "this entry can go"


def test_norms_of_latent_attention(one_rank: None) -> None:
    """0.19 refuses a norm of compressed keys and values where `qk_layernorm` is false."""
    attention = tiny_gpt(tiny(LATENT)).model.decoder.layers[0].self_attention
    assert isinstance(attention.kv_layernorm, Norm)
    resolve = getattr(MLASelfAttention, "_resolve_qk_norm_config", None)
    if resolve is not None:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm")
        asked = SimpleNamespace(**dict.fromkeys(names), kv_layernorm=Norm)
        with pytest.raises(ValueError, match="supposed to be disabled"):
            resolve(SimpleNamespace(config=attention.config), asked)


def test_head_norms(one_rank: None) -> None:
    attention = tiny_gpt(tiny()).model.decoder.layers[0].self_attention
    heads = torch.ones(1)
    for norm in (attention.q_layernorm, attention.k_layernorm):
        assert norm is None or isinstance(norm, IdentityOp)
        assert head_norm(norm, heads) is heads
    assert Version("0.19") > OLDEST, "None is all that is left"
