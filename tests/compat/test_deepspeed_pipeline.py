"""Canaries of DeepSpeed's engine and ZeRO 1 and 2, as pipeline stages use them."""

from typing import Any

import pytest
import torch
from deepspeed.runtime import bf16_optimizer
from torch import Tensor, nn

from megamoe.compat.deepspeed_pipeline import accumulated_gradient, reduce_on_request, replace_norm
from megamoe.parallel.zero.engine import Engine
from tests.support.ranks.runs import ds_config
from tests.support.tiny import VOCABULARY, tiny, tiny_engine

FILES = ("zero0_fp32", "zero0_bf16", "zero1_fp32", "zero1_bf16")


def built(file: str) -> Engine:
    engine = tiny_engine(tiny(f"parallel.deepspeed={ds_config(file)}", "moe.expert_ffn_hidden_size=16"))
    engine.train(True)
    return engine


def backward(engine: Engine, last: bool = True) -> None:
    text = torch.arange(16).view(2, 8) % VOCABULARY
    positions = torch.arange(8).expand_as(text)
    losses = engine.forward(tokens_BS=text, position_ids_BS=positions, labels_BS=text.roll(-1, 1))
    engine.backward(losses.mean(), last)


def words(engine: Engine) -> nn.Parameter:
    return dict(engine.model.named_parameters())["model.embedding.word_embeddings.weight"]


@pytest.mark.parametrize("file", FILES)
def test_places_of_gradients(one_rank: None, file: str) -> None:
    """Two backward passes give twice the gradient of one, in a place that a change of it reaches the step."""
    engine = built(file)
    reduce_on_request(engine._engine)
    backward(engine, last=False)
    optimizer: Any = engine._engine.optimizer
    once = accumulated_gradient(optimizer, words(engine)).float().clone()
    assert once.abs().max() > 0
    backward(engine)
    gradient = accumulated_gradient(optimizer, words(engine))
    assert torch.allclose(gradient.float(), 2 * once, rtol=1e-2)
    for parameter in engine.model.parameters():
        if parameter.requires_grad:
            accumulated_gradient(optimizer, parameter).zero_()
    gradient.fill_(2.0)
    engine._engine.allreduce_gradients()
    norm = engine.step(1e-3)
    assert norm == pytest.approx(2.0 * gradient.numel() ** 0.5, rel=1e-3)


def test_reduction_in_the_last_backward_pass(one_rank: None) -> None:
    """DeepSpeed's switch for it, which its engine reads in each backward pass."""
    engine = built("zero1_fp32")
    calls: list[int] = []
    engine._engine.allreduce_gradients = lambda *args, **kwargs: calls.append(1)
    backward(engine)
    assert calls
    calls.clear()
    reduce_on_request(engine._engine)
    backward(engine)
    assert not calls


@pytest.mark.parametrize("file", ["zero1_fp32", "zero2_fp32", "zero1_bf16"])
def test_norm_of_each_group(one_rank: None, file: str) -> None:
    """Ours gets every gradient once, whole or in part, and the step clips by what it returns."""
    engine = built(file)
    optimizer: Any = engine._engine.optimizer
    assert hasattr(optimizer, "scaled_global_norm") or hasattr(bf16_optimizer, "get_norm_with_moe_layers")
    seen: list[int] = []

    def norm(gradients: Any, are_partitioned: bool) -> Tensor:
        assert are_partitioned == (file != "zero1_bf16")
        seen.extend(gradient.numel() for _, gradient in gradients)
        return torch.tensor(7.0)

    replace_norm(optimizer, norm)
    backward(engine)
    assert engine.step(1e-3) == 7.0
    assert sum(seen) == sum(p.numel() for p in engine.model.parameters() if p.requires_grad)
