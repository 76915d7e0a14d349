"""A megamoe decoder in plain PyTorch, for evaluation and generation with transformers.

Suffixes of tensors' names are their dimensions: B sequences, S tokens of a sequence, L tokens so far,
T = B * S, H hidden size, N attention heads, D head size, E experts, X an expert's tokens, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast

from megamoe.apps.hf.custom.configuration_megamoe import MegamoeConfig
from megamoe.apps.hf.custom.routing_megamoe import Router

GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": functional.silu,
    "geglu": functional.gelu,
    "reglu": functional.relu,
}
UNGATED: dict[str, Callable[[Tensor], Tensor]] = {"gelu": functional.gelu, "relu": functional.relu}


def activate(rows: Tensor, name: str) -> Tensor:
    """[..., F], or [..., 2F] of the halves gate and value -> [..., F]."""
    if name in UNGATED:
        return UNGATED[name](rows)
    gate, value = rows.chunk(2, dim=-1)
    return GATED[name](gate) * value


def width(size: int, activation: str) -> int:
    """Return the rows of an FFN's first weight."""
    return 2 * size if activation in GATED else size


def parameter(*shape: int) -> nn.Parameter:
    """Return a weight that a checkpoint will fill."""
    return nn.Parameter(torch.empty(*shape))


class Norm(nn.Module):
    """RMSNorm or LayerNorm, of one vector of weights, or of one for each expert."""

    def __init__(self, config: MegamoeConfig, *shape: int) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = parameter(*shape)
        self.bias = parameter(*shape) if config.norm == "layernorm" else None

    def forward(self, rows: Tensor, expert: int | None = None) -> Tensor:
        """[..., H] -> [..., H]."""
        weight = self.weight if expert is None else self.weight[expert]
        if self.bias is None:
            return functional.rms_norm(rows, weight.shape, weight, self.eps)
        bias = self.bias if expert is None else self.bias[expert]
        return functional.layer_norm(rows, weight.shape, weight, bias, self.eps)


class Core(nn.Module):
    """A learnt logit for each head in the softmax's denominator."""

    def __init__(self, config: MegamoeConfig) -> None:
        super().__init__()
        self.softmax_offset = parameter(config.num_attention_heads)


class Attention(nn.Module):
    """Causal attention. The rows of linear_qkv are by group: its heads' queries, its key, its value."""

    def __init__(self, config: MegamoeConfig, block: int) -> None:
        super().__init__()
        self.config, self.block = config, block
        heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.linear_qkv = nn.Linear(config.hidden_size, (heads + 2 * groups) * size, config.input_bias)
        self.linear_proj = nn.Linear(heads * size, config.hidden_size, bias=config.output_bias)
        self.core_attention = Core(config) if config.sinks else None
        if config.query_key_norm != "none":
            whole = config.query_key_norm == "whole"
            self.q_layernorm = Norm(config, heads * size if whole else size)
            self.k_layernorm = Norm(config, groups * size if whole else size)

    def forward(
        self, hidden_BSH: Tensor, tables: tuple[Tensor, Tensor] | None, mask_BSL: Tensor, cache: Any
    ) -> Tensor:
        """[B, S, H] -> [B, S, H]. mask_BSL: which of the L tokens so far each of the S sees, bool."""
        config = self.config
        heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        grouped = self.linear_qkv(hidden_BSH).unflatten(-1, (groups, heads // groups + 2, size))
        query, key, value = grouped.split([heads // groups, 1, 1], dim=3)
        query, key, value = query.flatten(2, 3), key.squeeze(3), value.squeeze(3)
        if config.query_key_norm == "whole":
            query = self.q_layernorm(query.flatten(2)).view_as(query)
            key = self.k_layernorm(key.flatten(2)).view_as(key)
        elif config.query_key_norm == "head":
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        if tables is not None:
            query, key = apply_rotary(query, *tables), apply_rotary(key, *tables)
        if cache is not None:
            key, value = cache.update(key, value, self.block)
            # A static cache returns all its places, of which the later ones are empty.
            key, value = (each[:, :, : mask_BSL.shape[2]] for each in (key, value))
        key, value = (each.repeat_interleave(heads // groups, dim=1) for each in (key, value))
        scores_BNSL = (query @ key.transpose(2, 3)).float() * config.attention_scale
        if config.attention_soft_cap is not None:
            scores_BNSL = torch.tanh(scores_BNSL / config.attention_soft_cap) * config.attention_soft_cap
        weights_BNSL = self._softmax(self._masked(scores_BNSL, mask_BSL)).to(value.dtype)
        return self.linear_proj((weights_BNSL @ value).transpose(1, 2).flatten(2))

    def _masked(self, scores_BNSL: Tensor, mask_BSL: Tensor) -> Tensor:
        window, (size, length) = self.config.windows[self.block], scores_BNSL.shape[2:]
        if window is not None:
            place_L = torch.arange(length).to(mask_BSL.device)
            mask_BSL = mask_BSL & (place_L > place_L[length - size :, None] - window)
        return scores_BNSL.masked_fill(~mask_BSL[:, None], torch.finfo(torch.float32).min)

    def _softmax(self, scores_BNSL: Tensor) -> Tensor:
        if self.core_attention is None:
            return scores_BNSL.softmax(dim=-1)
        sinks_BNS1 = self.core_attention.softmax_offset.float()[:, None, None].expand(
            *scores_BNSL.shape[:3], 1
        )
        return torch.cat([scores_BNSL, sinks_BNS1], dim=-1).softmax(dim=-1)[..., :-1]


def rotary_tables(config: MegamoeConfig, position_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine of the rotary positions, fp32 [B, 1, S, R]; R: the columns that rotate."""
    columns = int(config.head_dim * config.rotary_share)
    exponent = torch.arange(0, columns, 2, device=position_BS.device, dtype=torch.float32) / columns
    angle = position_BS[:, None, :, None].float() * config.rope_base**-exponent
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def apply_rotary(heads_BNSD: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the first columns of each head; column i and column i + R/2 are a pair."""
    rotated, rest = heads_BNSD.float().tensor_split([cosine.shape[-1]], dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cosine + torch.cat([-second, first], dim=-1) * sine
    return torch.cat([rotated, rest], dim=-1).to(heads_BNSD.dtype)


class FFN(nn.Module):
    """A dense FFN."""

    def __init__(self, config: MegamoeConfig) -> None:
        super().__init__()
        self.activation = config.activation
        rows = width(config.ffn_size, config.activation)
        self.linear_fc1 = nn.Linear(config.hidden_size, rows, bias=config.ffn_bias)
        self.linear_fc2 = nn.Linear(config.ffn_size, config.hidden_size, bias=config.ffn_bias)

    def forward(self, hidden_BSH: Tensor, *unused: Any) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        return self.linear_fc2(activate(self.linear_fc1(hidden_BSH), self.activation))


class Experts(nn.Module):
    """E FFNs."""

    def __init__(self, config: MegamoeConfig) -> None:
        super().__init__()
        count, hidden, size = config.num_experts, config.hidden_size, config.expert_size
        self.activation = config.expert_activation
        rows = width(size, self.activation)
        self.up, self.down = parameter(count, rows, hidden), parameter(count, hidden, size)
        self.up_bias = parameter(count, rows) if config.expert_bias else None
        self.down_bias = parameter(count, hidden) if config.expert_bias else None

    def forward(self, rows_XH: Tensor, expert: int) -> Tensor:
        """Return the expert's output for its tokens, [X, H]."""
        up_bias = None if self.up_bias is None else self.up_bias[expert]
        down_bias = None if self.down_bias is None else self.down_bias[expert]
        rows_XF = activate(functional.linear(rows_XH, self.up[expert], up_bias), self.activation)
        return functional.linear(rows_XF, self.down[expert], down_bias)


class ExpertStack(nn.Module):
    """E stacks of residual FFN sub-layers, each with a norm (BASE, X-MoE)."""

    def __init__(self, config: MegamoeConfig) -> None:
        super().__init__()
        shape, count = (config.num_experts, config.hidden_size), config.expert_sublayers
        self.norms = nn.ModuleList(Norm(config, *shape) for _ in range(count))
        self.sublayers = nn.ModuleList(Experts(config) for _ in range(count))

    def forward(self, rows_XH: Tensor, expert: int) -> Tensor:
        """Return what the expert adds to its tokens, [X, H]."""
        change_XH = torch.zeros_like(rows_XH)
        for norm, sublayer in zip(self.norms, self.sublayers, strict=True):
            change_XH = change_XH + sublayer(norm(rows_XH + change_XH, expert), expert)
        return change_XH


class SharedExperts(nn.Module):
    """The experts of every token, as one FFN; added to the routed ones as they are, with a gate, or mixed."""

    def __init__(self, config: MegamoeConfig) -> None:
        super().__init__()
        hidden, self.activation, self.mode = config.hidden_size, config.expert_activation, config.shared_mode
        self.up = parameter(width(config.shared_size, self.activation), hidden)
        self.down = parameter(hidden, config.shared_size)
        if self.mode == "gated":
            self.gate = parameter(hidden)
        elif self.mode == "residual":
            self.mix, self.mix_bias = parameter(2, hidden), parameter(2)

    def forward(self, hidden_TH: Tensor, routed_TH: Tensor) -> Tensor:
        """Return both together, [T, H]."""
        rows_TF = activate(functional.linear(hidden_TH, self.up), self.activation)
        shared_TH = functional.linear(rows_TF, self.down)
        if self.mode == "sum":
            return routed_TH + shared_TH
        if self.mode == "gated":
            gate_T1 = (hidden_TH.float() @ self.gate.float()).sigmoid()[:, None]
            return routed_TH + shared_TH * gate_T1.to(shared_TH.dtype)
        mix_T2 = functional.linear(hidden_TH.float(), self.mix.float(), self.mix_bias.float()).softmax(dim=-1)
        routed_T1, shared_T1 = mix_T2.to(shared_TH.dtype).split(1, dim=1)
        return routed_T1 * routed_TH + shared_T1 * shared_TH


class MoELayer(nn.Module):
    """Router, experts and shared experts."""

    def __init__(self, config: MegamoeConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config) if config.expert_sublayers == 1 else ExpertStack(config)
        self.shared = SharedExperts(config) if config.shared_size else None

    def forward(
        self, hidden_BSH: Tensor, ids_BS: Tensor, is_token_BS: Tensor, routed: list[Tensor]
    ) -> Tensor:
        """[B, S, H] -> [B, S, H]. ids_BS: the tokens. is_token_BS: false for padding, which is not routed.

        routed: gets the router's logits, fp32 [T, E], and which experts compute a token, bool [T, E].
        """
        hidden_TH, output_TH = hidden_BSH.flatten(0, 1), torch.zeros_like(hidden_BSH.flatten(0, 1))
        chosen_TE, weight_TE, logits_TE = self.router(hidden_TH, ids_BS, is_token_BS)
        routed += [logits_TE, chosen_TE]
        for expert in chosen_TE.any(dim=0).nonzero().flatten().tolist():
            token_X = chosen_TE[:, expert].nonzero().flatten()
            rows_XH = self.experts(hidden_TH[token_X], expert)
            weight_X1 = weight_TE[token_X, expert, None].to(rows_XH.dtype)
            output_TH.index_add_(0, token_X, (rows_XH * weight_X1).to(output_TH.dtype))  # under autocast
        if self.shared is not None:
            output_TH = self.shared(hidden_TH, output_TH)
        return output_TH.view_as(hidden_BSH)


class MoEBlock(nn.Module):
    """An MoE layer in place of an FFN, or, with a norm, after a block."""

    def __init__(self, config: MegamoeConfig, has_norm: bool = False) -> None:
        super().__init__()
        self.norm = Norm(config, config.hidden_size) if has_norm else None
        self.layer = MoELayer(config)

    def forward(self, hidden_BSH: Tensor, *tokens: Any) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        return self.layer(hidden_BSH, *tokens)


class Block(GradientCheckpointingLayer):
    """Attention, an FFN or MoE layer, and perhaps a further MoE layer, each with a residual."""

    def __init__(self, config: MegamoeConfig, block: int) -> None:
        super().__init__()
        self.scale, self.is_pre = config.residual_scale, config.norm_position == "pre"
        self.input_layernorm = Norm(config, config.hidden_size)
        self.self_attention = Attention(config, block)
        self.pre_mlp_layernorm = Norm(config, config.hidden_size)
        self.mlp = MoEBlock(config) if block in config.moe_blocks else FFN(config)
        follows = block in config.inserted_after
        self.inserted = MoEBlock(config, config.expert_sublayers == 1) if follows else None

    def forward(self, hidden_BSH: Tensor, attention: Any, tokens: Any) -> tuple[Tensor, ...]:
        """[B, S, H] -> [B, S, H], and what `MoELayer` says of its routing: a pair of tensors for each."""
        routed: list[Tensor] = []
        hidden_BSH = self._add(hidden_BSH, self.input_layernorm, self.self_attention, attention)
        hidden_BSH = self._add(hidden_BSH, self.pre_mlp_layernorm, self.mlp, (*tokens, routed))
        if self.inserted is not None:
            norm = self.inserted.norm or nn.Identity()
            hidden_BSH = self._add(hidden_BSH, norm, self.inserted, (*tokens, routed))
        return hidden_BSH, *routed

    def _add(self, hidden_BSH: Tensor, norm: nn.Module, layer: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
        if self.is_pre:
            return hidden_BSH + self.scale * layer(norm(hidden_BSH), *inputs)
        return norm(hidden_BSH + self.scale * layer(hidden_BSH, *inputs))


class Embedding(nn.Module):
    """Words, and learned or sinusoidal positions."""

    def __init__(self, config: MegamoeConfig) -> None:
        super().__init__()
        self.config = config
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.position == "learned":
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def forward(self, ids_BS: Tensor, position_BS: Tensor) -> Tensor:
        """int64 [B, S] -> [B, S, H]."""
        hidden_BSH = self.word_embeddings(ids_BS)
        if self.config.embedding_scale is not None:
            hidden_BSH = hidden_BSH * self.config.embedding_scale
        if self.config.position == "learned":
            hidden_BSH = hidden_BSH + self.position_embeddings(position_BS)
        elif self.config.position == "sinusoidal":
            even = torch.arange(0, self.config.hidden_size, 2, device=ids_BS.device, dtype=torch.float32)
            rate = torch.exp(even * (-math.log(10000.0) / self.config.hidden_size))
            angle = position_BS[..., None].float() * rate
            waves = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)
            hidden_BSH = hidden_BSH + waves[..., : self.config.hidden_size].to(hidden_BSH.dtype)
        return hidden_BSH


class Decoder(nn.Module):
    """The blocks, and a norm after the last one if norms stand before the layers."""

    def __init__(self, config: MegamoeConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(config, block) for block in range(config.num_hidden_layers))
        is_pre = config.norm_position == "pre"
        self.final_layernorm = Norm(config, config.hidden_size) if is_pre else nn.Identity()


@dataclass
class Output(MoeModelOutputWithPast):
    """The backbone's output. aux_loss: the balance loss of all MoE layers, if their logits are asked for."""

    aux_loss: Tensor | None = None


class Model(nn.Module):
    """Embedding, blocks and output layer; called, it is the backbone that `base_model` names."""

    def __init__(self, config: MegamoeConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding, self.decoder = Embedding(config), Decoder(config)
        self.output_layer = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        **unused: Any,
    ) -> Output:
        """int64 [B, S] -> hidden states behind the last norm, [B, S, H]."""
        config, size = self.config, input_ids.shape[1]
        caches = config.use_cache and not self.training if use_cache is None else use_cache
        if caches and past_key_values is None:
            past_key_values = DynamicCache()
        before = 0 if past_key_values is None else int(past_key_values.get_seq_length())
        is_token_BL = _tokens(attention_mask, input_ids, before)
        if position_ids is None:
            position_ids = (is_token_BL.long().cumsum(-1) - 1).clamp_min(0)[:, before:]
        hidden_BSH = self.embedding(input_ids, position_ids)
        tables = rotary_tables(config, position_ids) if config.position == "rope" else None
        causal_SL = torch.ones(size, before + size, dtype=torch.bool, device=input_ids.device).tril(before)
        attention = (tables, causal_SL & is_token_BL[:, None], past_key_values)
        is_token_BS, routed = is_token_BL[:, before:], list[Tensor]()
        for block in self.decoder.layers:
            hidden_BSH, *of_block = block(hidden_BSH, attention, (input_ids, is_token_BS))
            routed += of_block
        output = Output(self.decoder.final_layernorm(hidden_BSH), past_key_values)
        if config.output_router_logits if output_router_logits is None else output_router_logits:
            output.router_logits = tuple(routed[::2])
            output.aux_loss = balance_loss(routed[::2], routed[1::2], is_token_BS) if routed else None
        return output


def balance_loss(logits: list[Tensor], chosen: list[Tensor], is_token_BS: Tensor) -> Tensor:
    """Return E * sum_e f_e P_e over the tokens of all layers, as `load_balancing_loss_func` of transformers.

    f_e: the share of tokens that chose expert e, by this router's selector. P_e: the mean of the softmax of
    the logits. logits, chosen: of each layer, [T, E].
    """
    device, is_token_T = is_token_BS.device, is_token_BS.flatten()
    logits_TE, chosen_TE = (torch.cat([x.to(device)[is_token_T] for x in each]) for each in (logits, chosen))
    return logits_TE.shape[1] * (logits_TE.softmax(dim=-1).mean(dim=0) * chosen_TE.float().mean(dim=0)).sum()


class MegamoeForCausalLM(PreTrainedModel, GenerationMixin):
    """A decoder with MoE layers."""

    config_class = MegamoeConfig
    base_model_prefix = "model"
    _no_split_modules = ("Block",)
    supports_gradient_checkpointing = True
    _tied_weights_keys = {"model.output_layer.weight": "model.embedding.word_embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: MegamoeConfig) -> None:
        super().__init__(config)
        self.model = Model(config)
        for name, shape in config.training_tensors.items():
            hold(self, name.split("."), torch.empty(shape))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding of tokens."""
        return self.model.embedding.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Set the embedding of tokens, such as one for a larger vocabulary."""
        self.model.embedding.word_embeddings = value  # type: ignore[assignment]

    def get_output_embeddings(self) -> nn.Module:
        """Return the output layer."""
        return self.model.output_layer

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Set the output layer."""
        self.model.output_layer = value  # type: ignore[assignment]

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None, **unused: Any) -> Tensor | None:
        """Keep the mask of tokens [B, L] with a static cache too, whose places `Attention` cuts."""
        return attention_mask

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        num_items_in_batch: Tensor | int | None = None,
        output_router_logits: bool | None = None,
        **unused: Any,
    ) -> MoeCausalLMOutputWithPast:
        """int64 [B, S] -> logits, fp32 [B, S, V], and with labels their mean cross entropy.

        attention_mask: 1 for tokens and 0 for padding, [B, tokens so far]. num_items_in_batch: the labels of
        all accumulated batches, by which transformers' Trainer wants the sum of the losses divided.
        output_router_logits: return the logits of each MoE layer and the auxiliary loss, and add it to the
        loss with `router_aux_loss_coef`; default: the configuration's.
        """
        output: Output = self.model(
            input_ids, attention_mask, position_ids, past_key_values, use_cache, output_router_logits
        )
        logits_BSV = self._logits(output.last_hidden_state[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            logits_NV, label_N = logits_BSV[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            total = functional.cross_entropy(logits_NV, label_N, reduction="sum")
            loss = total / ((label_N != -100).sum() if num_items_in_batch is None else num_items_in_batch)
            if output.aux_loss is not None:
                loss = loss + self.config.router_aux_loss_coef * output.aux_loss.to(loss.device)
        return MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=output.aux_loss,
            logits=logits_BSV,
            past_key_values=output.past_key_values,
            router_logits=output.router_logits,
        )

    def _logits(self, hidden_BSH: Tensor) -> Tensor:
        config, model = self.config, self.model
        logits_BSV = model.output_layer(hidden_BSH * config.logit_scale).float()
        cap = config.logit_soft_cap
        return logits_BSV if cap is None else torch.tanh(logits_BSV / cap) * cap


def _tokens(attention_mask: Tensor | None, input_ids: Tensor, before: int) -> Tensor:
    """Return which of the tokens so far are no padding, bool [B, L]."""
    if attention_mask is None:
        return torch.ones(len(input_ids), before + input_ids.shape[1], dtype=torch.bool).to(input_ids.device)
    if attention_mask.dim() != 2:
        raise ValueError(f"attention_mask: found {attention_mask.dim()} dimensions, expected [B, L]")
    return attention_mask.bool()


def hold(module: nn.Module, path: list[str], tensor: Tensor) -> None:
    """Register a tensor that only megamoe's training needs, so that it is loaded and saved."""
    *owners, last = path
    for name in owners:
        if not hasattr(module, name):
            module.add_module(name, nn.Module())
        module = getattr(module, name)
    module.register_buffer(last, tensor)
