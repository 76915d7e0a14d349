"""The classes that can be converted, each a table of keys and a table of tensors."""

from megamoe.apps.hf.families import deepseek, dense, experts, mixtral
from megamoe.apps.hf.family import Family

# By model_type; the first that fits is the class of an export.
ORDER = (*dense.FAMILIES, *mixtral.FAMILIES, *experts.FAMILIES, *mixtral.FURTHER, *deepseek.FAMILIES)
FAMILIES: dict[str, Family] = {family.model_type: family for family in ORDER}
