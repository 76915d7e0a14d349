"""Small runs on 1, 2 and 4 ranks, and what the simulation says that their first rank holds and sends.

Run with a folder and numbers of cases, it prints that as JSON, in a process with the fake CUDA device.
"""

from megamoe.simulation import cuda_device

if __name__ == "__main__":
    cuda_device.load()

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from megamoe.config import RunConfig
from megamoe.simulation.stand_ins import without_data
from tests.distributed.runs import CUT_ALL, ds_config, ds_variant, small_run
from tests.moe.part_layers import moe_tree

LATENT = {"query_rank": 8, "key_value_rank": 6, "nope_size": 4, "rope_size": 2, "value_size": 5}
ENCODER = {"model__architecture": "encoder", "train__objective": {"name": "masked"}}
TRANSLATOR: dict[str, Any] = {
    "model__architecture": "encoder_decoder",
    "moe__layers": {"encoder": {"at": [2]}, "decoder": {"at": [1]}},
    "train__objective": {"name": "span_corruption"},
}
AHEAD = {"model__multi_token_prediction": {"depth": 1, "weight": 0.5}}
SINKS = {"query_key_norm": "head", "window": 4, "window_blocks": [1], "sinks": True, "input_bias": True}


def part(kind: str, name: str) -> dict[str, Any]:
    """An MoE layer with this part."""
    return {"moe": {**moe_tree(kind, name), "layers": {"at": [1, 2]}, "expert_ffn_hidden_size": 32}}


# ranks, DeepSpeed file (cut: with ZeRO 3 cutting small parameters too), sizes of `parallel`, other changes
CASES: list[tuple[int, str, dict[str, Any], dict[str, Any]]] = [
    (1, "zero0_fp32", {}, part("scorer", "stable")),
    (1, "zero0_bf16", {}, part("scorer", "policy")),
    (1, "zero1_fp32", {}, {"model__latent": LATENT, **AHEAD}),
    (1, "zero2_bf16", {}, part("scorer", "noisy")),
    (1, "zero3_bf16", {}, part("scorer", "hash")),
    (2, "zero0_bf16", {"expert": 2}, part("scorer", "cosine")),
    (2, "zero0_fp32", {"tensor": 2}, {"model__attention": SINKS}),
    (2, "zero1_bf16", {"expert_tensor": 2}, {"moe__shared_expert_mode": "gated"}),
    (2, "zero1_bf16", {}, part("score_function", "sigmoid")),
    (2, "zero1_fp32", {"expert": 2}, {"moe__expert_bias": True}),
    (2, "zero2_fp32", {"tensor": 2, "sequence": True}, part("scorer", "hierarchical")),
    (2, "zero2_bf16", {"expert": 2}, ENCODER),
    (2, "zero3_fp32", {"tensor": 2}, {"moe__shared_expert_mode": "residual"}),
    (2, "zero3_bf16 cut", {"expert": 2}, TRANSLATOR),
    (4, "zero0_bf16", {"tensor": 2, "sequence": True, "expert": 2}, {}),
    (4, "zero0_fp32", {"expert": 2, "expert_tensor": 2}, {}),
    (4, "zero1_bf16", {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 2}, {}),
    (4, "zero1_fp32", {"tensor": 4}, {"model__num_attention_heads": 4}),
    (4, "zero2_bf16", {"tensor": 2, "expert": 4}, {}),
    (4, "zero2_fp32", {"expert": 4}, {"model__tie_embeddings": False}),
    (4, "zero3_bf16 cut", {"expert": 2}, AHEAD),
    (4, "zero3_fp32 cut", {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 2}, {}),
    (4, "zero3_bf16 cut", {"expert": 4}, {"model__latent": LATENT}),
]
QUICK = 7
STATES = ("parameters", "optimizer", "gradients", "buffers")


def run_of(number: int, folder: str, **further: Any) -> RunConfig:
    """The configuration of a case, with nothing in it that a plan replaces. folder: for a DeepSpeed file."""
    ranks, file, sizes, changes = CASES[number]
    name, *cut = file.split()
    path = ds_variant(Path(folder), name, zero_optimization=CUT_ALL) if cut else ds_config(name)
    parallel = {**sizes, "deepspeed": path}
    run: dict[str, Any] = {
        "data__document_aware": False,
        "model__cpu_kernels": "plain",
        "train__global_batch_size": ranks // sizes.get("tensor", 1),
        "name": f"run{number}",
        **changes,
    }
    return without_data(small_run(folder, parallel=parallel, **run, **further))[0]


def planned(number: int, folder: str) -> dict[str, Any]:
    """What the simulation says of a case; see `tests.distributed.watched.measure`."""
    from megamoe.simulation import rank

    costs = rank.simulate_step(run_of(number, folder), CASES[number][0])
    sent: Counter[str] = Counter()
    for key, total in costs.counts.collectives.items():
        sent[f"{key.kind} of {len(key.ranks)}"] += total.bytes
    return {
        "parameters": costs.parameter_bytes,
        "optimizer": costs.optimizer_bytes,
        "gradients": costs.gradient_bytes,
        "buffers": costs.buffer_bytes,
        "most": costs.peak.bytes - costs.parameter_bytes - costs.optimizer_bytes - costs.buffer_bytes,
        "sent": dict(sent),
    }


if __name__ == "__main__":
    print(json.dumps([planned(int(number), sys.argv[1]) for number in sys.argv[2:]]))
