"""A run of one rank that is both simulated and real."""

from tests.tiny import BASE

ONE_RANK = (
    *BASE,
    "moe.expert_ffn_hidden_size=16",
    "parallel.deepspeed=ds_configs/zero1_bf16.json",
    "model.cpu_kernels=plain",
    "model.attention={query_key_norm: head, window: 4, window_blocks: [1], sinks: true, input_bias: true}",
)
