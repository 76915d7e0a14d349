"""The imports of every rank, done once in the process from which the pool's workers are forked."""

import gc
import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these tests are of ranks, not of devices
os.environ["LOCAL_SIZE"] = "1"  # else DeepSpeed counts CPUs by running numactl, at ZeRO 3 again and again

from megamoe.compat.startup import configure_libraries

gc.disable()  # what is imported stays
configure_libraries()

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402, F401
import megatron.core  # noqa: E402, F401
import pytest  # noqa: E402, F401
import torch  # noqa: E402
import torch._dynamo  # noqa: E402  # which PyTorch imports for the first optimizer

import megamoe.apps.report.figures  # noqa: E402
import megamoe.train.loop  # noqa: E402, F401
from megamoe.kernels.library import find_library  # noqa: E402
from megamoe.parallel.launch import World  # noqa: E402
from megamoe.train.rank_facts import facts_of_start  # noqa: E402
from megamoe.train.resolved import resolve_run  # noqa: E402
from tests.support.ranks.runs import small_run  # noqa: E402

torch.set_num_threads(1)
run = small_run()  # finds the parts, and builds what checks them
world = World(0, 1, 0, torch.device("cpu"), "gloo")
resolve_run(run, 1, world)
facts_of_start(run, world)  # hashes the package's files
find_library()  # asks the compiler for its version
gc.freeze()  # no fork need search all this for garbage
gc.enable()
