"""The search of layouts, in a process where the fake CUDA device is loaded: prints what the test compares."""

from megamoe.apps.plan import cuda_device

if __name__ == "__main__":
    cuda_device.load()

import json
import sys
from typing import Any
from unittest.mock import patch

from megamoe.apps.plan import layout_search
from megamoe.apps.plan.hardware import GPUS
from megamoe.apps.plan.layout_search import search, search_record
from megamoe.apps.plan.plan import Cluster, make_plan
from megamoe.apps.plan.plan_page import record
from megamoe.config import load_config

MODEL = (
    "data.mock=true", "data.sequence_length=2048", "model.num_layers=2", "model.hidden_size=1024",
    "model.num_attention_heads=8", "model.vocab_size=32768", "moe.layers.every=1", "moe.num_experts=6",
    "moe.expert_ffn_hidden_size=1408", "train.steps=4", "train.global_batch_size=16",
    "parallel.deepspeed=ds_configs/zero1_bf16_cuda.json",
)  # fmt: skip
CLUSTER = Cluster(2, 2, GPUS["h100"])
FEWER: dict[str, Any] = {
    "recomputations": lambda config: ("none",),
    "SLICES": (1, 2),
    "CHUNKS": (1,),
    "CONTEXT": (1,),
    "ZERO_FILES": {"bf16": []},
}


def searched(simulated: int) -> dict[str, Any]:
    return search_record(search(load_config(None, [*MODEL]), CLUSTER, simulated=simulated))


if __name__ == "__main__":
    with patch.multiple(layout_search, **FEWER):
        found = [searched(int(number)) for number in sys.argv[1:]]
    first = load_config(None, [*MODEL, *found[0]["layouts"][0]["overrides"]])
    print(json.dumps({"found": found, "plan": record(make_plan(first, CLUSTER))}))
