"""The classes that can be converted, each a table of keys and a table of tensors."""

from megamoe.apps.hf.families import deepseek, dense, experts, gpt_oss, granite, mixtral
from megamoe.apps.hf.family import Family

MODULES = (dense, mixtral, experts, granite, deepseek, gpt_oss)
# By model_type; the first that fits is the class of an export.
FAMILIES: dict[str, Family] = {family.model_type: family for module in MODULES for family in module.FAMILIES}
