"""Checks of Triton's kernels without a GPU, in a process of their own: Triton decides once how to run.

    TRITON_INTERPRET=1 python -m tests.kernels.triton_checks NAME ...    # the kernels, run on CPU tensors

prints, as JSON, each check's name and its traceback, empty where it passed. The checks are in
triton_products.py and triton_block.py; passes over rows of an MoE layer are in on_interpreter.py.
"""

from tests.in_subprocess import checks_of, run_checks
from tests.kernels import triton_block, triton_products

CHECKS = checks_of(vars(triton_products)) | checks_of(vars(triton_block))

if __name__ == "__main__":
    print(run_checks(CHECKS))
