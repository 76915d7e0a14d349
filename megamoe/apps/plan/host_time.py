"""The host's time of a training step, measured; the command that measures it anew is

python benchmarks/host_time.py
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class HostTime:
    """Of one step of moe_1b on one rank, tuned, all experts on each rank, one micro batch.

    seconds: of the processor, without CUDA's driver, kernels and collectives. launches: of PyTorch's kernels
    and of Triton's. calls, own_calls: of PyTorch's operators and of ours, as the plan counts them in this
    step; the rows `aten_call_s` and `own_call_s` of `rates.json` are such that they take `seconds`. machine:
    where it was measured.
    """

    seconds: float
    launches: int
    triton_launches: int
    calls: int
    own_calls: int
    machine: str

    @property
    def launch_s(self) -> float:
        """Seconds of the host for a launch, with all Python code around it."""
        return self.seconds / (self.launches + self.triton_launches)


# The least of 25 steps; 2026-11-24, torch 2.13, triton 3.7.1, Python 3.11. With other work beside it on the
# machine the medians were 55 to 63 ms. A host of H100s may be faster; nobody has measured one.
MEASURED = HostTime(51.2e-3, 806, 401, 602, 268, "AMD EPYC Zen 4, one thread, other processes beside it")
# The same code with operators of `torch.library.custom_op` and Triton's `cdiv`, measured in turn with it.
BEFORE = HostTime(68.5e-3, 806, 401, 602, 268, MEASURED.machine)
