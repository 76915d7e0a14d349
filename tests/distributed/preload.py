"""What every rank has imported: loaded once into the process of which the pool's workers are forks."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these tests are of ranks, not of devices

from megamoe.vendors import settle_vendors

settle_vendors()

import deepspeed  # noqa: E402, F401
import megatron.core  # noqa: E402, F401
import torch  # noqa: E402

import megamoe.train.trainer  # noqa: E402, F401

torch.set_num_threads(1)
