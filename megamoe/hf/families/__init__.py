"""The classes that can be converted, each a table of keys and a table of tensors."""

from megamoe.hf.families import deepseek, dense, experts, mixtral
from megamoe.hf.family import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (*dense.FAMILIES, *mixtral.FAMILIES, *experts.FAMILIES, *deepseek.FAMILIES)
}
