"""The imports of every rank, done once in the process from which the pool's workers are forked."""

import gc
import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these tests are of ranks, not of devices
os.environ["LOCAL_SIZE"] = "1"  # else DeepSpeed counts CPUs by running numactl, at ZeRO 3 again and again

from megamoe.compat.startup import settle_vendors

settle_vendors()

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402, F401
import megatron.core  # noqa: E402, F401
import pytest  # noqa: E402, F401
import torch  # noqa: E402

import megamoe.metrics.report.picture  # noqa: E402
import megamoe.train.loop  # noqa: E402, F401
from tests.distributed.runs import small_run  # noqa: E402

torch.set_num_threads(1)
small_run()  # finds the parts, and builds what checks them
gc.freeze()  # no fork need search all this for garbage
