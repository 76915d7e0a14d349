"""Megatron-Core's configuration and specifications of the blocks, with our modules and MoE layers."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.attention import CrossAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn

from megamoe.config import shapes
from megamoe.config.layer_kinds import config_by_layer, scores_before, with_weights_of_layer
from megamoe.config.mup import Scaling, attention_scale, output_std, residual_scale
from megamoe.config.schema import ModelConfig, MoEConfig, RunConfig
from megamoe.kernels.choice import Kernels
from megamoe.kernels.experts.ffn import LIMIT, OFFSET
from megamoe.model.attention.caches import CachingCrossAttention
from megamoe.model.attention.context_parallel import ContextShard
from megamoe.model.attention.core import BlockConfig
from megamoe.model.attention.latent import LatentBlockConfig, latent_attention, latent_options
from megamoe.model.attention.rotary import position_options
from megamoe.model.embedding import Built
from megamoe.model.modules import Modules, fp8_options
from megamoe.model.moe_block import Block, MoEBlock
from megamoe.moe import rng
from megamoe.moe.experts.activations import CLAMPED, is_gated, pointwise
from megamoe.moe.layer import LayerShape, MoELayer

MoEFactory = Callable[[MoEConfig, LayerShape], MoELayer]


@dataclass(frozen=True)
class BlockMaker:
    """Makes the configuration and the specifications of a model's stacks of blocks.

    vocab_size: after padding. init: the initialisation of Megatron-Core's weights, see `init_methods`. built:
    called with each part as soon as its weights are complete. context: of context parallelism.
    """

    config: RunConfig
    modules: Modules
    vocab_size: int
    make_moe_layer: MoEFactory
    kernels: Kernels
    init: dict[str, Callable[[Tensor], None]]
    built: Built
    context: ContextShard | None = None

    @property
    def recomputed(self) -> frozenset[str]:
        """Return the modules that the backward pass computes again."""
        return shapes.recomputed_modules(self.config.model)

    def transformer(self, num_layers: int) -> BlockConfig:
        """Return Megatron-Core's configuration of a stack of so many blocks."""
        model, parallel, modules = self.config.model, self.config.parallel, self.modules
        kind = BlockConfig if model.latent is None else LatentBlockConfig
        options: dict[str, Any] = {**position_options(model, modules), **latent_options(model)}
        options |= {**_init_options(model, num_layers), **self.init}
        return kind(
            **options,
            kernels=self.kernels,
            recomputed=self.recomputed,
            num_layers=num_layers,
            hidden_size=model.hidden_size,
            num_attention_heads=model.num_attention_heads,
            num_query_groups=model.num_query_groups,
            kv_channels=shapes.head_size(model),
            add_qkv_bias=shapes.has_input_bias(model),
            attention_output_bias=shapes.has_output_bias(model),
            qk_layernorm=model.attention.query_key_norm != "none",
            softmax_scale=attention_scale(model),
            windows=tuple(shapes.window_of(model, block) for block in range(1, num_layers + 1)),
            sinks=model.attention.sinks,
            soft_cap=model.attention.soft_cap,
            context=self.context,
            ffn_hidden_size=shapes.ffn_size(model),
            normalization="RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
            layernorm_epsilon=model.norm_eps,
            activation_func=pointwise(model.activation),
            gated_linear_unit=is_gated(model.activation),
            **_clamps(model),
            add_bias_linear=model.bias,
            hidden_dropout=model.hidden_dropout,
            attention_dropout=model.attention_dropout,
            tensor_model_parallel_size=parallel.tensor,
            sequence_parallel=parallel.sequence and parallel.tensor > 1,
            # On the CPU every layout draws the same weights; the engine moves them to the device.
            use_cpu_initialization=True,
            # Fusions that need Megatron-Core's CUDA kernels.
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            deterministic_mode=self.config.train.deterministic,
            **fp8_options(model),
        )

    def specs(
        self, stack: shapes.Stack, transformer: BlockConfig, has_source: bool = False, of_source: bool = False
    ) -> TransformerBlockSubmodules:
        """Return the specification of a stack.

        has_source: its blocks have cross attention. of_source: it is the encoder that they attend to.
        """
        moe_blocks, specs, of_layer = set(stack.moe_blocks), [], config_by_layer(self.config)
        before = scores_before(self.config)
        layers = f"{stack.name}.layers"
        names = [f"{layers}.{place}." for place in range(stack.num_layers)]
        if stack.name == "prediction":
            names = [f"prediction.depths.{place}.blocks.layers.0." for place in range(stack.num_layers)]
        elif self.config.model.architecture == "decoder":
            names = [f"model.{name}" for name in names]
        for number in range(1, stack.num_layers + 1):
            spec = self._block(stack.name, transformer, has_source)
            spec.params["built"] = functools.partial(self.built, names[number - 1])
            specs.append(spec)
            config = of_layer.get(stack.first - 1 + number)
            if config is None:
                continue
            layer = stack.first - 1 + number
            shape = self._layer_shape(config, layer, of_source, transformer.num_layers)
            shape = replace(shape, before=before.get(layer))
            moe_config = with_weights_of_layer(config.moe, len(of_layer))
            build = functools.partial(self.make_moe_layer, moe_config, shape)
            moe: dict[str, Any] = {"build": build, "recompute": "moe_layer" in self.recomputed}
            moe["output_activation"] = moe_config.output_activation
            if number in moe_blocks:
                spec.submodules.mlp = ModuleSpec(module=MoEBlock, params=moe)
            if number in stack.layers.insert_after:
                has_norm = shapes.inserted_has_norm(config.moe)
                norm = functools.partial(self.norm, transformer) if has_norm else None
                spec.params["build_inserted"] = functools.partial(
                    MoEBlock,
                    transformer,
                    build_norm=norm,
                    norm_position=self.config.model.norm_position,
                    **moe,
                )
        last_norm = self.modules.norm if self.config.model.norm_position == "pre" else None
        return TransformerBlockSubmodules(layer_specs=specs, layer_norm=last_norm)

    def _block(self, stack: str, transformer: BlockConfig, has_source: bool) -> ModuleSpec:
        """Return the specification of a block with a dense FFN."""
        model, modules = self.config.model, self.modules
        spec = get_gpt_layer_local_spec(normalization=transformer.normalization)
        spec.module = Block
        spec.params = {
            "recompute": "block" in self.recomputed,
            "norm_position": model.norm_position,
            "residual_scale": residual_scale(model),
        }
        modules.put_into(spec, model)
        block = spec.submodules
        if model.latent is not None:
            block.self_attention = latent_attention(block.self_attention, modules)
        if stack == "encoder":
            block.self_attention.params = {"attn_mask_type": AttnMaskType.padding}
        if has_source:
            own = block.self_attention.submodules
            block.pre_cross_attn_layernorm = modules.norm
            block.cross_attention = ModuleSpec(
                module=CachingCrossAttention,
                params={"attn_mask_type": AttnMaskType.padding},
                submodules=CrossAttentionSubmodules(
                    linear_q=own.linear_qkv,
                    linear_kv=own.linear_qkv,
                    core_attention=own.core_attention,
                    linear_proj=own.linear_proj,
                ),
            )
            block.cross_attn_bda = block.self_attn_bda
        return spec

    def norm(self, transformer: BlockConfig) -> nn.Module:
        """Return a norm of the model's kind."""
        size, eps = transformer.hidden_size, transformer.layernorm_epsilon
        return self.modules.norm(config=transformer, hidden_size=size, eps=eps)

    def _layer_shape(self, config: RunConfig, layer: int, of_source: bool, num_layers: int) -> LayerShape:
        """Return the sizes of an MoE layer; config: its own, see `LayerKind.config`."""
        model = config.model
        return LayerShape(
            hidden_size=model.hidden_size,
            ffn_size=shapes.expert_ffn_size(config),
            layer=layer,
            activation=shapes.expert_activation(config),
            init_std=model.init_std,
            output_std=output_std(model, num_layers),
            width=Scaling.of(model).width,
            seed=config.seed,
            init_scale=model.init_scale,
            vocab_size=self.vocab_size,
            of_source=of_source,
            norm=model.norm,
            norm_eps=model.norm_eps,
            products=self.modules.products,
            kernels=self.kernels,
            recomputed=self.recomputed,
            exchange=self.config.parallel.exchange,
            exchange_fp8=self.config.parallel.exchange_dtype == "fp8",
        )


def _init_options(model: ModelConfig, num_layers: int) -> dict[str, Any]:
    """Return Megatron-Core's options of the initial weights, which `init_methods` replaces."""
    return {
        "init_method_std": model.init_std * Scaling.of(model).hidden_std,
        "embedding_init_method_std": model.init_std,
        "output_layer_init_method": functools.partial(nn.init.normal_, std=output_std(model, num_layers)),
    }


def _clamps(model: ModelConfig) -> dict[str, Any]:
    """Return Megatron-Core's options of a dense FFN with the activation of gpt-oss."""
    if model.activation != CLAMPED:
        return {}
    return {"activation_func_clamp_value": LIMIT, "glu_linear_offset": OFFSET}


def init_methods(model: ModelConfig, seed: int) -> dict[str, Callable[[Tensor], None]]:
    """Return the initialisation of Megatron-Core's weights under model.init_scale, with a key for each
    weight.
    """
    if model.init_scale is None:
        return {}
    weights = itertools.count(1)

    def start(weight: Tensor) -> None:
        key = rng.key(seed, 0, 0, f"weight {next(weights)} of the model")
        rng.init_weight(weight, key, model.init_std, model.init_scale)

    return dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), start)
