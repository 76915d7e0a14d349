"""The classes that can be converted, each a table of keys and a table of tensors."""

from megamoe.apps.hf.families import deepseek, dense, experts, gpt_oss, granite, mixtral
from megamoe.apps.hf.family import Family

MODULES = (dense, mixtral, experts, granite, deepseek, gpt_oss)
# Classes that cannot be converted: the nearest that can, and what no part of ours computes.
REFUSED = {
    "gemma2": ("llama", "norms after the sub-layers too, and a soft cap of the output logits"),
    "olmo2": ("llama", "norms of what the sub-layers return instead of what they get"),
    "flex_olmo": ("olmoe", "norms of what the sub-layers return instead of what they get"),
    "granitemoehybrid": ("granitemoeshared", "blocks with Mamba-2 layers instead of attention"),
    "hunyuan_v1_moe": ("qwen2_moe", "norms of queries and keys after the rotary positions"),
    "nemotron_h": ("glm4_moe", "blocks with Mamba-2 layers, and FFNs of squared ReLU without a gate"),
    "phimoe": ("mixtral", "the router's masked softmax for each of the two experts (SparseMixer)"),
}
# By model_type; the first that fits is the class of an export.
FAMILIES: dict[str, Family] = {family.model_type: family for module in MODULES for family in module.FAMILIES}
