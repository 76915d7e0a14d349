"""`train.deterministic`: the same losses to the bit where a GPU would add in any order."""

import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megamoe.config import RunConfig
from megamoe.train.summary import summary_rows
from megamoe.train.trainer import Trainer
from tests.support.tiny import tiny

# What adds in any order on CUDA, unless PyTorch's deterministic algorithms are chosen.
ADDS = ("index_add", "index_add_", "scatter_add", "scatter_add_")
MANY_ROWS = (
    "moe.router.selector={name: top_k, k: 4}",
    "moe.num_experts=8",
    "model.gpu_kernels=plain",
    "model.cpu_kernels=plain",
)


class AnyOrder(TorchDispatchMode):
    """Shuffles what these operators add, as a GPU's atomic additions do."""

    def __init__(self) -> None:
        super().__init__()
        self.shuffled = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ADDS and not torch.are_deterministic_algorithms_enabled():
            self.shuffled += 1
            _, dim, index, values = args[:4]
            dim = dim if index.dim() > 1 else 0
            order = torch.randperm(index.shape[dim])
            shuffled = index.index_select(dim, order), values.index_select(args[1], order)
            args = (*args[:2], *shuffled, *args[4:])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def own_mode() -> Any:
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def run(deterministic: bool, folder: Path) -> RunConfig:
    return tiny(f"train.deterministic={deterministic}", f"output={folder}", "overwrite=true", *MANY_ROWS)


def trained(config: RunConfig, seed: int) -> tuple[int, list[Tensor]]:
    """How many additions were shuffled, and the weights after two steps."""
    trainer = Trainer(config)
    torch.manual_seed(seed)
    with AnyOrder() as order:
        for _ in range(2):
            trainer.step()
    trainer.release()
    return order.shuffled, [parameter.detach().clone() for parameter in trainer.model.parameters()]


@pytest.mark.parametrize("deterministic", [False, True])
def test_two_runs_are_the_same_to_the_bit(
    one_rank: None, own_mode: None, tmp_path: Path, deterministic: bool
) -> None:
    """With the order of a GPU's additions left open they are not."""
    (shuffled, one), (_, other) = (trained(run(deterministic, tmp_path), seed) for seed in (1, 2))
    assert (shuffled == 0) == deterministic
    assert all(map(torch.equal, one, other)) == deterministic


def test_blocks_and_summary_know(one_rank: None, own_mode: None, tmp_path: Path) -> None:
    trainer = Trainer(run(True, tmp_path))
    [blocks, *_] = [module.config for module in trainer.model.modules() if hasattr(module, "config")]
    assert cast(Any, blocks).deterministic_mode
    rows = dict(summary_rows(trainer.run, trainer.world, 0, 0)["ranks"])
    assert rows["order of additions"] == "fixed, which costs nothing on a CPU"
    trainer.release()


def test_kernels_add_in_one_order() -> None:
    """No atomic addition, and no choice of a kernel by its time."""
    import megamoe.kernels.triton as kernels

    for path in Path(kernels.__path__[0]).glob("*.py"):
        assert not re.search(r"tl\.atomic|autotune", path.read_text()), path
