"""Megatron-Core's MoE layer on one rank, with experts one after the other or as a grouped product."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from layers.candidate import NotMeasured, Shape, Weights
from layers.world import start_one_rank
from megamoe.compat.megatron_compat import patch_current_device_for_cpu


class MegatronLayer(nn.Module):
    """`MoELayer` with scores in fp32; its all-gather dispatcher, the one that needs no CUDA stream.

    Raises:
        NotMeasured: if its specification without Transformer Engine has no grouped experts.
    """

    def __init__(self, grouped: bool, shape: Shape, dtype: torch.dtype, weights: Weights) -> None:
        super().__init__()
        start_one_rank()
        patch_current_device_for_cpu()
        from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
        from megatron.core.transformer.moe import moe_utils
        from megatron.core.transformer.spec_utils import build_module

        # 0.16.1 asks for this name, but defines it only where Transformer Engine is installed.
        vars(moe_utils).setdefault("te_general_gemm", None)
        spec = get_moe_module_spec(use_te=False, num_experts=shape.experts, moe_grouped_gemm=grouped)
        config = _config(grouped, shape, dtype)
        # A function since 0.19.
        self.layer = spec(config=config) if callable(spec) else build_module(spec, config=config)
        if grouped and hasattr(self.layer.experts, "local_experts"):
            raise NotMeasured("has no grouped experts without Transformer Engine")
        self.layer.router.weight.data.copy_(weights.router_EH)
        _copy_experts(self.layer.experts, weights)

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return self.layer(hidden_TH[:, None])[0][:, 0]


def _config(grouped: bool, shape: Shape, dtype: torch.dtype) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=shape.hidden,
        num_attention_heads=1,
        ffn_hidden_size=shape.ffn,
        moe_ffn_hidden_size=shape.ffn,
        num_moe_experts=shape.experts,
        moe_router_topk=shape.choices,
        moe_router_pre_softmax=shape.choices == 1,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type="allgather",
        moe_grouped_gemm=grouped,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )


def _copy_experts(experts: nn.Module, weights: Weights) -> None:
    if hasattr(experts, "weight1"):  # stacked, [in, out] each
        up, down = experts.get_parameter("weight1"), experts.get_parameter("weight2")
        up.data.copy_(weights.up_EGH.transpose(1, 2).reshape_as(up))
        down.data.copy_(weights.down_EHF.transpose(1, 2).reshape_as(down))
        return
    local = experts.get_submodule("local_experts").children()
    for expert, up_GH, down_HF in zip(local, weights.up_EGH, weights.down_EHF, strict=True):
        expert.get_parameter("linear_fc1.weight").data.copy_(up_GH)
        expert.get_parameter("linear_fc2.weight").data.copy_(down_HF)


sequential = partial(MegatronLayer, False)
grouped = partial(MegatronLayer, True)
