"""A pass that cannot allocate its scratch memory raises MemoryError; the process goes on."""

import os
import subprocess
import sys

import pytest

from megamoe.kernels.library import Library

# In a process of its own, with a limit on its address space; `attention` needs 2 x 0.5 MB for each thread.
SCRIPT = """
import resource
import torch
from megamoe.kernels.library import find_library

torch.set_num_threads(2)
library = find_library()[0]
S, D, N = 1024, 64, 2**14
heads = [torch.randn(S, 1, 2, D) for _ in range(3)]
output, log_sum = torch.zeros(S, 1, 2 * D), torch.zeros(1, 2, S)
sides = [(side, *side.stride()[:3]) for side in heads]
W = 2**20
rows, weight, scale = torch.randn(4, W), torch.ones(W), torch.ones(4)
to_rows, to_weight = torch.zeros_like(rows), torch.zeros(W)
x, up, down = torch.randn(N, 4), torch.randn(1, 1024, 4), torch.randn(1, 4, 512)
ends, hidden, out = torch.tensor([N]), torch.zeros(N, 1024), torch.zeros(N, 4)

def attention():
    settings = ((S, 1, 2, 2, D), None, None, 0.125, None, S, 0.0)
    library.attention(*sides, *settings, output, log_sum, None)
    return output

def norm():
    library.rms_norm_backward(rows, rows, weight, scale, 4, W, to_rows, to_weight)
    return to_rows

def experts():
    library.experts(x, up, down, ends, 1, 4, 512, hidden, x, out)
    return out

for each in (attention, norm, experts):
    expected = each().clone()
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 4096, limit[1]))
    try:
        each()
        print("nothing was raised")
    except MemoryError as error:
        print(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert torch.equal(each(), expected)
"""


def test_missing_memory_is_an_error_with_one_line(library: Library) -> None:
    if library.sgemm is None:
        pytest.skip("PyTorch's BLAS has no sgemm")
    # glibc then asks the system for every large block, which the limit refuses, and reuses none.
    variables = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", SCRIPT]
    found = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    sizes = {
        "attention_fp32": 2 * 4 * (2 * 1024 * 64 + 128 * 64 + 64 * 1024),
        "rms_norm_backward_fp32": 2**22,
    }
    lines = found.stdout.splitlines()
    assert len(lines) == 3
    for line, (name, size) in zip(lines, sizes.items(), strict=False):
        assert line.startswith(f"the CPU pass {name} cannot allocate {size} bytes of scratch memory; take ")
    assert lines[2].startswith("the CPU pass experts_fp32 cannot allocate ")
