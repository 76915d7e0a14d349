"""Checks of apps.plan.fake_cuda in a process where the fake CUDA device was loaded before torch."""

from megamoe.apps.plan import cuda_device

cuda_device.load()

import sys  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from megamoe.apps.plan.fake_cuda import (  # noqa: E402
    FakeCudaMode,
    FakeProperties,
    fake_torch_cuda,
    fakes_are_drawn,
    fused_operators,
    join_fake_group,
    modules_move_fakes,
    objects_are_alike,
    on_cuda,
    ranks_of_collective,
    running_node,
    schema_of,
    sequence_number,
    storage_key,
    unknown_sizes_raise,
)
from tests.support.in_subprocess import checks_of, run_checks  # noqa: E402

COMPILER = "torch._dynamo" in sys.modules  # before any check imports it


class Called(TorchDispatchMode):
    """Keeps the operators that are called, and the numbers of the autograd nodes that they belong to."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any, Any]] = []
        self.nodes: list[tuple[str, int | None, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().partition(".")[0]
        self.calls.append((name, function, args))
        self.nodes.append((name, running_node(), sequence_number()))
        return function(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]


def check_the_compiler_is_imported_before_the_device_answers() -> None:
    assert COMPILER
    with fake_torch_cuda():
        FakeTensorMode()


def check_torch_cuda_answers() -> None:
    with fake_torch_cuda(FakeProperties(total_memory=7)):
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1
        assert torch.cuda.get_device_properties(0).total_memory == 7
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda.Event().record()
    assert not torch.cuda.is_available() or torch.version.cuda


def check_modules_of_fakes() -> None:
    with FakeTensorMode():
        linear = nn.Linear(2, 2)
        with modules_move_fakes():
            weight = linear.weight
            linear.bfloat16()
            assert linear.weight is weight and weight.dtype == torch.bfloat16
        try:
            linear.float()
        except RuntimeError:
            return
    raise AssertionError("torch casts fake modules by itself; modules_move_fakes can go")


def check_constants_stay_fake() -> None:
    with fake_torch_cuda(), FakeCudaMode():
        tensor = torch.tensor(1.0, device="cuda")
        assert tensor.is_cuda
        tensor.record_stream(torch.cuda.current_stream())
        pinned = torch.ones(3).pin_memory()
        assert pinned.shape == (3,) and not pinned.is_cuda


def check_operators_are_fused() -> None:
    with (
        torch.autograd.set_multithreading_enabled(False),
        fake_torch_cuda(),
        FakeCudaMode(),
        fused_operators(),
    ):
        hidden = torch.empty(1, 2, 16, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with Called() as called:
            functional.silu(hidden).sum().backward()
            functional.rms_norm(hidden, (8,), torch.ones_like(hidden[0, 0, 0])).sum().backward()
            functional.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)
            mask = torch.ones(16, 16, dtype=torch.bool, device="cuda")
            functional.scaled_dot_product_attention(hidden, hidden, hidden, mask)
    wanted = {"aten::silu_backward", "aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"}
    wanted |= {"aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention"}
    assert wanted <= set(called.names)
    assert not {"aten::sigmoid", "aten::rsqrt", "aten::bmm"} & set(called.names)


def check_fake_group() -> None:
    join_fake_group(1, 4)
    assert (dist.get_rank(), dist.get_world_size()) == (1, 4)
    dist.destroy_process_group()


def check_objects_of_fakes() -> None:
    join_fake_group(1, 2)
    objects: list[str] = ["", ""]
    try:
        with FakeTensorMode():
            with pytest.raises(DataDependentOutputException):
                dist.all_gather_object(objects, "mine")
            with objects_are_alike():
                dist.all_gather_object(objects, "mine")
    finally:
        dist.destroy_process_group()
    assert objects == ["mine", "mine"]


def check_ranks_of_collective() -> None:
    join_fake_group(0, 4)
    try:
        pair = dist.new_group([0, 2])
        with FakeTensorMode(), Called() as called:
            dist.all_reduce(torch.empty(4), group=pair)
        (found,) = [call for call in called.calls if call[0] == "c10d::allreduce_"]
        assert ranks_of_collective(found[1], found[2]) == [0, 2]
    finally:
        dist.destroy_process_group()


def check_backward_nodes_are_found() -> None:
    tensor = torch.ones(3, requires_grad=True)
    with torch.autograd.set_multithreading_enabled(False), Called() as called:
        tensor.tanh().sigmoid().sum().backward()
    forward = {name: number for name, node, number in called.nodes if node is None}
    backward = {name: node for name, node, _ in called.nodes if node is not None}
    assert backward["aten::tanh_backward"] == forward["aten::tanh"]
    assert backward["aten::sigmoid_backward"] == forward["aten::sigmoid"]
    assert running_node() is None


def check_storage_key() -> None:
    with FakeTensorMode():
        tensor = torch.empty(4)
        assert storage_key(tensor) == storage_key(tensor[1:]) != storage_key(tensor.clone())


def check_fakes_are_drawn() -> None:
    with FakeTensorMode(), fakes_are_drawn():
        assert nn.init.trunc_normal_(torch.empty(3)).shape == (3,)
    try:
        with FakeTensorMode():
            nn.init.trunc_normal_(torch.empty(3))
    except DataDependentOutputException:
        return
    raise AssertionError("trunc_normal_ reads no values now")


def check_on_cuda() -> None:
    with fake_torch_cuda(), FakeCudaMode():
        for device in ("cpu", "cuda"):
            tensor = torch.empty(2, device=device)
            assert on_cuda(tensor) == tensor.is_cuda == (device == "cuda")
    assert not on_cuda(torch.empty(2))


def check_unknown_sizes_raise() -> None:
    try:
        with FakeTensorMode(), unknown_sizes_raise(KeyError("told")):
            torch.ones(3).nonzero()
    except KeyError:
        return
    raise AssertionError("nonzero of a fake tensor has a size now")


def check_schema() -> None:
    assert schema_of(torch.ops.aten.add_.Tensor).is_mutable
    assert not schema_of(torch.ops.aten.add.Tensor).is_mutable


if __name__ == "__main__":
    print(run_checks(checks_of(globals())))
