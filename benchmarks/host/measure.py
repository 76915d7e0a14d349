"""One process: the host's time of the steps of a small moe_1b on the pretended CUDA device, as JSON.

    python benchmarks/host/measure.py STEPS [--profile] [section.key=value ...]

The device's library takes the processor's time inside kernels and collectives away: what is left is Python,
PyTorch's dispatch and autograd, Triton's preparation of launches, Megatron-Core, DeepSpeed and megamoe.
"""

import cProfile
import json
import os
import pstats
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.cuda import pretended  # noqa: E402

device = pretended.start(1)

import torch  # noqa: E402
from torch.nn import functional  # noqa: E402

from host.null_kernels import NullKernel, launch_nothing  # noqa: E402
from megamoe.compat.startup import configure_libraries  # noqa: E402
from megamoe.config import load_config, to_dict  # noqa: E402
from megamoe.kernels.attention import core as attention  # noqa: E402
from tests.cuda.training import run_tree, watch_steps  # noqa: E402

MODEL = ROOT / "benchmarks/rooflines/models/moe_1b.yaml"
# The calls of moe_1b; numbers so small that the processor's kernels take little of its caches.
SMALL = ["data.sequence_length=16", "data.workers=0", "train.micro_batch_size=1", "model.hidden_size=64"]
SMALL += ["model.num_attention_heads=4", "model.ffn_hidden_size=64", "moe.expert_ffn_hidden_size=32"]
SMALL += ["model.vocab_size=128", "parallel.expert=1", "model.gpu_kernels=triton", "log.report=false"]
SMALL += ["parallel.deepspeed=ds_configs/zero1_bf16_cuda.json", "evaluation.batches=0"]
WARM_UP = 5  # steps; DeepSpeed and Triton prepare in the first ones
LISTED = 40  # functions of the profile


class Watch:
    """The processor's time of each step, and what it launched."""

    def __init__(self, profile: cProfile.Profile | None) -> None:
        self.steps: list[dict[str, Any]] = []
        self.begin: float | None = None
        self.profile = profile

    def mark(self) -> None:
        """Before and after a step."""
        now, inside, kernels = (
            time.process_time(),
            device.library.pretended_inside_ns() / 1e9,
            device.kernels(),
        )
        triton_launches, NullKernel.launches = NullKernel.launches, 0
        if self.begin is not None:
            took = now - self.begin - inside
            waits = len(pretended.of_kind("sync"))
            found = {"seconds": took, "inside": inside, "kernels": kernels, "triton": triton_launches}
            self.steps.append({**found, "waits": waits})
            self.begin = None
            if self.profile is not None:
                self.profile.disable()
            return
        pretended.findings.clear()
        if self.profile is not None and len(self.steps) >= WARM_UP:
            self.profile.enable()
        self.begin = time.process_time()


def one_operator(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool = False, **options: Any
) -> torch.Tensor:
    """Attention as on CUDA: one operator in each pass. PyTorch takes a dozen where it finds no fused one."""
    attended: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal
    )[0]
    return attended


def functions_of(profile: cProfile.Profile, steps: int) -> list[dict[str, Any]]:
    """Return the functions that take most, by their own time: calls and microseconds a step."""
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    rows = [
        {"name": f"{Path(file).parent.name}/{Path(file).name}:{line} {name}", "calls": calls / steps}
        | {"us": own / steps * 1e6, "with_callees_us": whole / steps * 1e6}
        for (file, line, name), (_, calls, own, whole, _) in stats.items()
    ]
    return sorted(rows, key=lambda row: -float(row["us"]))[:LISTED]


def main() -> None:
    """Train, and print what was found."""
    steps, *overrides = sys.argv[1:]
    profile = cProfile.Profile() if "--profile" in overrides else None
    overrides = [each for each in overrides if each != "--profile"]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = overrides.pop(0) if overrides and overrides[0].isdigit() else "29611"
    configure_libraries()
    torch.set_num_threads(1)
    # One thread for both passes, whose time and functions are then known.
    torch.autograd.set_multithreading_enabled(False)
    attention.fits_varlen = lambda query_SBND: False
    setattr(functional, "scaled_dot_product_attention", one_operator)  # noqa: B010
    launch_nothing()
    device.library.pretended_zeroed()
    watch = Watch(profile)
    watch_steps(watch.mark)
    config = load_config(MODEL, [*SMALL, f"train.steps={WARM_UP + int(steps)}", *overrides])
    with tempfile.TemporaryDirectory() as folder:
        run_tree(to_dict(config), folder)
    measured = watch.steps[WARM_UP:]
    found = {"steps": measured}
    if profile is not None:
        found["functions"] = functions_of(profile, len(measured))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
