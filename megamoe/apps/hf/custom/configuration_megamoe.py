"""The configuration of a megamoe decoder for transformers."""

from typing import Any

from transformers import PreTrainedConfig


class MegamoeConfig(PreTrainedConfig):
    """Everything that decides what the model computes. Blocks are counted from 0.

    norm: rmsnorm or layernorm; norm_position: pre or post. position: rope, learned or sinusoidal.
    rotary_share: the share of a head's columns, from the first, that are rotated. activation: swiglu, geglu,
    reglu, gelu or relu. query_key_norm: none, head or whole. windows: for each block, the tokens that
    attention sees, or null. attention_scale: of the scores. moe_blocks: those whose FFN is an MoE layer.
    inserted_after: those that an MoE layer follows. expert_sublayers: above 1, an expert is a stack of
    residual FFNs. shared_size: the FFN size of the shared experts, 0 for none; shared_mode: sum, gated or
    residual. router: the options of scorer, score_function and selector by name, and group_limit or null.
    output_router_logits, router_aux_loss_coef: whether the balance loss is added, and its weight.
    training_tensors: shapes of tensors that only megamoe's training needs, by name. megamoe: its sections
    `model` and `moe`, for an import.
    """

    model_type = "megamoe"
    keys_to_ignore_at_inference = ("past_key_values",)
    attribute_map = {"final_logit_softcapping": "logit_soft_cap"}  # noqa: RUF012 (TRL computes the logits itself)

    def __init__(
        self,
        vocab_size: int = 64,
        hidden_size: int = 32,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 2,
        num_key_value_heads: int = 2,
        head_dim: int = 16,
        ffn_size: int = 64,
        max_position_embeddings: int = 64,
        position: str = "rope",
        rope_base: float = 10000.0,
        rotary_share: float = 1.0,
        norm: str = "rmsnorm",
        norm_position: str = "pre",
        norm_eps: float = 1e-5,
        activation: str = "swiglu",
        ffn_bias: bool = False,
        input_bias: bool = False,
        output_bias: bool = False,
        query_key_norm: str = "none",
        windows: list[int | None] | None = None,
        sinks: bool = False,
        attention_scale: float = 0.25,
        attention_soft_cap: float | None = None,
        embedding_scale: float | None = None,
        residual_scale: float = 1.0,
        logit_scale: float = 1.0,
        logit_soft_cap: float | None = None,
        moe_blocks: list[int] | None = None,
        inserted_after: list[int] | None = None,
        num_experts: int = 4,
        num_experts_per_tok: int = 1,
        expert_size: int = 64,
        expert_activation: str = "swiglu",
        expert_bias: bool = False,
        expert_sublayers: int = 1,
        shared_size: int = 0,
        shared_mode: str = "sum",
        router: dict[str, Any] | None = None,
        output_router_logits: bool = False,
        router_aux_loss_coef: float = 0.0,
        training_tensors: dict[str, list[int]] | None = None,
        megamoe: dict[str, Any] | None = None,
        tie_word_embeddings: bool = True,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        own = {name: value for name, value in locals().items() if name not in ("self", "kwargs", "__class__")}
        for name, value in own.items():
            setattr(self, name, value)
        self.windows = windows or [None] * num_hidden_layers
        self.moe_blocks, self.inserted_after = moe_blocks or [], inserted_after or []
        self.router, self.training_tensors = router or {}, training_tensors or {}
        super().__init__(**kwargs)
