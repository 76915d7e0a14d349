"""Checks of Triton's kernels without a GPU, in a process of their own: Triton decides once how to run.

    TRITON_INTERPRET=1 python -m tests.support.kernels.triton_checks NAME ...  # run on CPU tensors

prints, as JSON, each check's name and its traceback, empty where it passed. The checks are in
triton_products.py, triton_block.py, triton_adamw.py, triton_late.py, triton_ties.py and, of an MoE layer's
rows and router, triton_rows.py.
"""

from tests.support.in_subprocess import checks_of, run_checks
from tests.support.kernels import (
    triton_adamw,
    triton_block,
    triton_late,
    triton_products,
    triton_rows,
    triton_ties,
)

CHECKS = {
    name: check
    for module in (triton_products, triton_block, triton_adamw, triton_late, triton_rows, triton_ties)
    for name, check in checks_of(vars(module)).items()
}

if __name__ == "__main__":
    print(run_checks(CHECKS))
