"""Builds Megatron-Core's GPTModel with our MoE layers from the configuration; computes the loss of each
token.
"""

import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn

from megamoe.compat.megatron_compat import stand_in_for_cuda
from megamoe.config.schema import ModelConfig, RunConfig
from megamoe.config.shapes import (
    expert_activation,
    expert_ffn_size,
    ffn_size,
    inserted_has_norm,
    moe_block_numbers,
    padded_vocab_size,
)
from megamoe.kernels.choice import Kernels
from megamoe.kernels.documents import Documents
from megamoe.model.attention import BlockConfig, SDPAttention
from megamoe.model.block import Block, MoEBlock
from megamoe.model.key_value_cache import KeyValueCache
from megamoe.model.loss import token_losses
from megamoe.model.modules import Modules, choose_modules, fp8_options
from megamoe.model.random_streams import use_one_stream
from megamoe.model.units import Built, embedding_handed_on
from megamoe.moe import rng
from megamoe.moe.experts.activations import is_gated, pointwise
from megamoe.moe.layer import LayerShape, MoELayer

MoEFactory = Callable[[LayerShape], MoELayer]
POSITIONS = {"rope": "rope", "learned": "learned_absolute"}  # Megatron-Core's names


class Decoder(GPTModel):
    """Megatron-Core's model with our loss on the logits [S, B, this rank's vocabulary slice].

    label_smoothing: of the next forward pass.
    """

    label_smoothing = 0.0

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """int64 [B, S] and [S, B, vocabulary slice] -> fp32 [B, S]; may write into the logits."""
        labels_SB = labels.transpose(0, 1).contiguous()
        losses_SB = token_losses(logits, labels_SB, self.label_smoothing, self.config.kernels)
        return losses_SB.transpose(0, 1)


class GPT(nn.Module):
    """A decoder-only language model that returns the loss of each token."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        tokens_BS: Tensor,
        position_ids_BS: Tensor,
        labels_BS: Tensor,
        documents: Documents | None = None,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """int64 [B, S] -> cross entropy of each label, fp32 [B, S], in nats.

        documents: attention is causal within each of them; None: within each sequence. Label smoothing gives
        a share of the target to all the other words evenly, as Megatron-Core does.
        """
        self.model.label_smoothing = label_smoothing
        # Megatron-Core hands its argument `attention_mask` on to the core attention as it is (SDPAttention).
        losses_BS: Tensor = self.model(tokens_BS, position_ids_BS, documents, labels=labels_BS)
        return losses_BS

    def logits(
        self, tokens_BS: Tensor, position_ids_BS: Tensor, documents: Documents | None = None
    ) -> Tensor:
        """int64 [B, S] -> [B, S, padded vocabulary]; under tensor parallelism, this rank's part of it."""
        output: Tensor = self.model(tokens_BS, position_ids_BS, documents)
        return output

    def whole_logits(
        self, tokens_BS: Tensor, position_ids_BS: Tensor, cache: KeyValueCache | None = None
    ) -> Tensor:
        """int64 [B, S] -> fp32 [B, S, padded vocabulary] on every tensor-parallel rank.

        cache: the tokens continue those that it holds; None: they are whole sequences.
        """
        output: Tensor = self.model(tokens_BS, position_ids_BS, cache)
        whole: Tensor = gather_from_tensor_model_parallel_region(output)
        return whole.float()

    def problem_with_cache(self) -> str | None:
        """Return why this model cannot use a `KeyValueCache`, as the end of a sentence; None if it can."""
        blocks = self.model.decoder.layers
        if any(not isinstance(block.self_attention.core_attention, SDPAttention) for block in blocks):
            return "model.backend: transformer_engine computes the attention"
        if self.model.position_embedding_type == "rope":
            return "Megatron-Core applies the rotary positions, from 0 in each forward pass"
        return None

    def moe_layers(self) -> Iterator[tuple[int, MoELayer]]:
        """Yield (number, layer) of every MoE layer; the number, from 1, is that of its block or of the
        block before it.
        """
        for block in self.model.decoder.layers:
            for layer in block.moe_layers():
                yield block.layer_number, layer


def build_gpt(
    config: RunConfig, vocab_size: int, make_moe_layer: MoEFactory, built: Built | None = None
) -> GPT:
    """Build the model on the CPU in fp32, from `config.seed` alone.

    vocab_size: before padding. make_moe_layer: builds a block's MoE layer, of a class that the caller
    chooses. built: called with the embedding and with each block as soon as it is built, before the next one
    is; it may change their weights, and must not draw from torch's random state. torch.distributed and
    Megatron-Core's parallel state must be initialised.
    """
    stand_in_for_cuda()
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    torch.manual_seed(config.seed)
    model = config.model
    use_one_stream()
    modules = choose_modules(config)
    transformer = _transformer_config(config, modules)
    position = "none" if transformer.own_rotary_base is not None else POSITIONS[model.position]
    padded = padded_vocab_size(vocab_size, model.vocab_multiple)
    with embedding_handed_on(built):
        decoder = Decoder(
            transformer,
            _block_specs(config, modules, transformer, padded, make_moe_layer, built),
            vocab_size=padded,
            max_sequence_length=config.data.sequence_length,
            parallel_output=True,
            share_embeddings_and_output_weights=model.tie_embeddings,
            position_embedding_type=position,
            rotary_base=model.rope_base,
        )
    return GPT(decoder)


def _transformer_config(config: RunConfig, modules: Modules) -> BlockConfig:
    model, parallel = config.model, config.parallel
    rotates = model.position == "rope"
    return BlockConfig(
        own_rotary_base=model.rope_base if rotates and modules.own_rotation else None,
        kernels=_kernels(model),
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        ffn_hidden_size=ffn_size(model),
        normalization="RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        layernorm_epsilon=model.norm_eps,
        activation_func=pointwise(model.activation),
        gated_linear_unit=is_gated(model.activation),
        add_bias_linear=model.bias,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        init_method_std=model.init_std,
        **_init_methods(model, config.seed),
        tensor_model_parallel_size=parallel.tensor,
        sequence_parallel=parallel.sequence and parallel.tensor > 1,
        # On the CPU every layout draws the same weights; the engine moves them to the device.
        use_cpu_initialization=True,
        # Fusions that need Megatron-Core's CUDA kernels.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=rotates and modules.fused_rotation,
        **fp8_options(model),
    )


def _kernels(model: ModelConfig) -> Kernels:
    return Kernels.of(model.cpu_kernels, model.gpu_kernels)


def _init_methods(model: ModelConfig, seed: int) -> dict[str, Callable[[Tensor], None]]:
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


def _block_specs(
    config: RunConfig,
    modules: Modules,
    transformer: BlockConfig,
    vocab_size: int,
    make_moe_layer: MoEFactory,
    built: Built | None,
) -> TransformerBlockSubmodules:
    moe_blocks = set(moe_block_numbers(config.moe, config.model.num_layers))
    recompute = config.model.recompute
    specs = []
    for number in range(1, config.model.num_layers + 1):
        build = _builder(make_moe_layer, _layer_shape(config, modules, number, vocab_size))
        moe: dict[str, Any] = {"build": build, "recompute": recompute == "selective"}
        spec = get_gpt_layer_local_spec(normalization=transformer.normalization)
        spec.module, spec.params = Block, {"recompute": recompute == "full"}
        if built is not None:
            spec.params["built"] = functools.partial(built, f"model.decoder.layers.{number - 1}.")
        modules.put_into(spec)
        if number in moe_blocks:
            spec.submodules.mlp = ModuleSpec(module=MoEBlock, params=moe)
        if number in config.moe.layers.insert_after:
            norm = functools.partial(_norm, modules, transformer) if inserted_has_norm(config.moe) else None
            spec.params["build_inserted"] = functools.partial(MoEBlock, transformer, build_norm=norm, **moe)
        specs.append(spec)
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=modules.norm)


def _norm(modules: Modules, transformer: BlockConfig) -> nn.Module:
    size, eps = transformer.hidden_size, transformer.layernorm_epsilon
    norm: nn.Module = modules.norm(config=transformer, hidden_size=size, eps=eps)
    return norm


def _builder(make_moe_layer: MoEFactory, shape: LayerShape) -> Callable[[], Any]:
    return lambda: make_moe_layer(shape)


def _layer_shape(config: RunConfig, modules: Modules, number: int, vocab_size: int) -> LayerShape:
    model = config.model
    return LayerShape(
        hidden_size=model.hidden_size,
        ffn_size=expert_ffn_size(config),
        layer=number,
        activation=expert_activation(config),
        init_std=model.init_std,
        output_std=model.init_std / math.sqrt(2 * model.num_layers),
        seed=config.seed,
        init_scale=model.init_scale,
        vocab_size=vocab_size,
        norm=model.norm,
        norm_eps=model.norm_eps,
        products=modules.products,
        kernels=_kernels(model),
    )
