"""Megatron-Core's transformer: machines without CUDA, its second random state, and what 0.19 changed."""

from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor


def patch_current_device_for_cpu() -> None:
    """Let `torch.cuda.current_device()` answer the CPU where no CUDA device exists.

    Reason: Megatron-Core's sequence parallelism asks it where to put what it gathers, and so do several of
        its modules that megamoe does not use. Nothing else of it needs replacing.
    Seen with: Megatron-Core 0.16.1 and 0.19.2.
    Without it: sequence parallelism on a machine without CUDA fails in PyTorch's CUDA initialisation.
    Canary: test_megatron.py::test_layers_ask_for_the_cuda_device
    """
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]


def set_random_tracker(tracker: megatron_random.CudaRNGStatesTracker) -> None:
    """Let Megatron-Core's modules draw what tensor parallelism cuts by this tracker.

    Reason: its own keeps CUDA random states beside torch's, which need CUDA, and would have to be saved.
    Seen with: Megatron-Core 0.16.1 and 0.19.2.
    Without it: dropout within attention heads fails on the CPU, and is not the same after a resume.
    Canary: test_megatron.py::test_random_tracker
    """
    megatron_random._CUDA_RNG_STATE_TRACKER = tracker
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


def allow_latent_attention() -> None:
    """Let Megatron-Core's multi-head latent attention be built without Transformer Engine.

    Reason: its module takes Transformer Engine for installed, because the import of the wrappers succeeds;
        they are mocks, and `isinstance(layer, mock)` fails.
    Seen with: Megatron-Core 0.16.1.
    Without it: latent attention fails on every machine without Transformer Engine.
    Canary: test_megatron.py::test_latent_attention_without_transformer_engine
    """
    if not isinstance(getattr(multi_latent_attention, "TELinear", None), type):
        multi_latent_attention.HAVE_TE = False


class NormsAsSpecified:
    """A base before Megatron-Core's latent attention: it builds the layers and norms of its specification.

    Reason: 0.19 decides by `qk_layernorm` what to build instead. It refuses a norm of compressed keys and
        values where queries are not compressed, except in Transformer Engine's layers.
    Seen with: Megatron-Core 0.19.2; 0.16.1 builds what the specification says, and does not call this.
    Without it: latent attention fails under 0.19.
    Canary: test_megatron.py::test_norms_of_latent_attention
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) or IdentityOp for name in names}


def ffn_submodules(mlp: Any) -> Any:
    """Return the submodules of the dense FFN in a local layer specification.

    Reason: the FFN's specification is a ModuleSpec in Megatron-Core 0.16, a functools.partial in 0.19.
    Seen with: Megatron-Core 0.16.1 and 0.19.2.
    Without it: Transformer Engine's linear layers cannot be put into a dense FFN under one of the two.
    Canary: test_megatron.py::test_ffn_submodules
    """
    return mlp.submodules if isinstance(mlp, ModuleSpec) else mlp.keywords["submodules"]


def head_norm(norm: Any, heads: Tensor) -> Tensor:
    """Apply self-attention's `q_layernorm` or `k_layernorm`.

    Reason: without norms Megatron-Core 0.16 has identities there, 0.19 has None.
    Seen with: Megatron-Core 0.16.1 and 0.19.2.
    Without it: attention fails under 0.19.
    Canary: test_megatron.py::test_head_norms
    """
    if norm is None:
        return heads
    return norm(heads)
