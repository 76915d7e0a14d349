"""Small runs on 1, 2 and 4 ranks, and what the simulation says that their first rank holds and sends.

Run with a device (cuda, cpu), a folder and numbers of cases, it prints that as JSON. The folder may have
counts.json: by the number of a case, the numbers of rows that a real rank has exchanged in a step.
"""

import sys

from megamoe.apps.plan import cuda_device

if __name__ == "__main__" and sys.argv[1] == "cuda":
    cuda_device.load()

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megamoe.apps.plan.stand_ins import without_data
from megamoe.config import RunConfig
from megamoe.kernels import router
from megamoe.kernels.experts import grouped_gemm
from megamoe.moe.experts import grouped
from megamoe.parallel.layout import Layout
from tests.support.moe.part_layers import moe_tree
from tests.support.ranks.runs import CUT_ALL, ds_variant, small_run

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


STAGES = {"train__micro_batch_size": 2, "train__global_batch_size": 6, "model__num_layers": 4}
CHUNKS = {**STAGES, "train__global_batch_size": 16}  # 4 micro batches on each of two ranks
# ranks, DeepSpeed file (cut: with ZeRO 3 cutting small parameters too), sizes of `parallel` (stage: the one
# whose first rank is compared), other changes
CONTEXT_HEADS = {"model__num_attention_heads": 4}
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
    (2, "zero1_fp32", {"context": 2}, {}),
    (4, "zero1_bf16", {"context": 2, "tensor": 2, "sequence": True, "expert": 4}, CONTEXT_HEADS),
    (2, "zero0_fp32", {"pipeline": 2}, STAGES),
    (2, "zero1_fp32", {"pipeline": 2, "stage": 1}, STAGES),
    (2, "zero2_bf16", {"pipeline": 2, "stage": 1}, {**STAGES, "model__tie_embeddings": False}),
    (4, "zero1_bf16", {"pipeline": 2, "pipeline_chunks": 2, "expert": 2}, CHUNKS),
]
QUICK = 7
# Large enough that activations are most of what a step holds beside the states. DeepSpeed's own sizes of
# buckets are larger than all of them.
SIZES = {"data__sequence_length": 128, "train__micro_batch_size": 2}
BUCKETS = {"reduce_bucket_size": 20_000, "allgather_bucket_size": 20_000}
STATES = ("parameters", "optimizer", "gradients", "buffers")


def run_of(number: int, folder: str, **further: Any) -> RunConfig:
    """The configuration of a case, with nothing in it that a plan replaces. folder: for a DeepSpeed file."""
    ranks, file, sizes, changes = CASES[number]
    sizes = {name: size for name, size in sizes.items() if name != "stage"}
    name, *cut = file.split()
    zero = {**BUCKETS, **(CUT_ALL if cut else {})} if "zero0" not in name else {}
    path = ds_variant(Path(folder), name, zero_optimization=zero)
    parallel = {**sizes, "deepspeed": path}
    run: dict[str, Any] = {
        "data__document_aware": False,
        "model__cpu_kernels": "plain",
        "train__global_batch_size": SIZES["train__micro_batch_size"]
        * ranks
        // (sizes.get("tensor", 1) * sizes.get("context", 1)),
        "name": f"run{number}",
        **SIZES,
        **changes,
    }
    return without_data(small_run(folder, parallel=parallel, **run, **further))[0]


def planned(
    number: int, folder: str, device: str = "cuda", counts: list[dict[str, list[int]]] | None = None
) -> dict[str, Any]:
    """What the simulation says of a case; see `tests.support.ranks.watched.measure`.

    counts: of its exchanges; without them all ranks send and receive alike.
    """
    from megamoe.apps.plan import rank

    with ExitStack() as stack:
        if counts:
            stack.enter_context(exchanged(counts))
        if device == "cpu":
            stack.enter_context(counts_are_not_read())
        config, stage = run_of(number, folder), CASES[number][2].get("stage", 0)
        layout = Layout.of(config.parallel, CASES[number][0])
        assert config.train.global_batch_size is not None
        micro_batches = config.train.global_batch_size // (config.train.micro_batch_size * layout.data)
        costs = rank.simulate_step(
            config, layout.ranks, micro_batches=micro_batches, device=device, stage=stage
        )
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


@contextmanager
def exchanged(counts: list[dict[str, list[int]]]) -> Iterator[None]:
    """Inside, the simulated layers exchange so many rows, one after the other."""
    from megamoe.apps.plan.stand_ins import CountedDispatch

    in_turn = cycle(counts)
    with patch.object(CountedDispatch, "_counts", lambda self, vectors: next(in_turn)):
        yield


@contextmanager
def counts_are_not_read() -> Iterator[None]:
    """Inside, the experts' products on a CPU read no counts: neither to check them, nor to pad rows in bf16.
    Sums of a token's p are not read either.

    PyTorch's grouped product has a form for fakes in bf16 alone.
    """
    with ExitStack() as stack:
        stack.enter_context(rows_are_not_padded())
        stack.enter_context(patch.object(router, "none_small", lambda total: True))
        stack.enter_context(
            patch.object(grouped_gemm, "checked_ends", lambda rows, weight, counts_E: counts_E)
        )
        stack.enter_context(patch.object(grouped_gemm, "_grouped_mm", grouped_result))
        yield


def grouped_result(left: Tensor, right: Tensor, ends_E: Tensor) -> Tensor:
    """A tensor of the shape of `torch.nn.functional.grouped_mm`, without values."""
    experts = ends_E.to(torch.int32).shape if right.dim() == 2 else ()
    return left.new_empty(*experts, left.shape[0], right.shape[-1])


@contextmanager
def rows_are_not_padded() -> Iterator[None]:
    """Inside, a CPU does not pad the rows of each expert in bf16, which depends on their numbers."""
    with patch.object(grouped, "PADDED_ROWS", 1):
        yield


def main(device: str, folder: str, *numbers: str) -> None:
    """Print what the simulation says of cases."""
    path = Path(folder) / "counts.json"
    counts = json.loads(path.read_text()) if path.exists() else {}
    print(json.dumps([planned(int(number), folder, device, counts.get(number)) for number in numbers]))


if __name__ == "__main__":
    main(*sys.argv[1:])
