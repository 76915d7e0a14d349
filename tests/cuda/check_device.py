"""Checks of the pretended device itself: what it must notice, and what it must not.

    python -m tests.cuda.check_device waits_are_found ...

Run by test_device.py in a process of their own: the device is one of a whole process.
"""

from tests.cuda import pretended

DEVICES = 2
DEVICE = pretended.start(DEVICES)

import os  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from megamoe.checkpoint import writer  # noqa: E402
from megamoe.moe.timers import LocalComputeTimer  # noqa: E402
from tests.support.in_subprocess import checks_of, run_checks  # noqa: E402


def found(kind: str, work: Callable[[], object]) -> list[pretended.Finding]:
    """What `work` makes the device tell, of that kind."""
    torch.cuda.synchronize()
    before = len(pretended.findings)
    work()
    return pretended.of_kind(kind, before)


def produce_and_read(waits: bool, on_event: bool = False) -> None:
    """A side stream reads what the main stream wrote."""
    side = torch.cuda.Stream()
    values = torch.ones(8, device="cuda") * 2
    if waits and on_event:
        event = torch.cuda.Event()
        event.record()
        side.wait_event(event)
    elif waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        doubled = values + values
    values.record_stream(side)
    torch.cuda.current_stream().wait_stream(side)
    assert doubled.sum().item() == 32


def check_a_missing_wait_is_found() -> None:
    assert not found("race", lambda: produce_and_read(waits=True))
    assert not found("race", lambda: produce_and_read(waits=True, on_event=True))
    (race,) = found("race", lambda: produce_and_read(waits=False))
    assert "without waiting" in race.detail and race.where[0].startswith("tests/cuda/check_device.py:")


def check_an_event_before_the_write_does_not_help() -> None:
    def work() -> None:
        side = torch.cuda.Stream()
        values = torch.zeros(8, device="cuda")
        event = torch.cuda.current_stream().record_event()
        values += 1
        side.wait_event(event)
        with torch.cuda.stream(side):
            torch.add(values, 1)
        torch.cuda.current_stream().wait_stream(side)

    assert len(found("race", work)) == 1


def check_a_write_over_what_is_still_read_is_found() -> None:
    def work(waits: bool) -> None:
        side = torch.cuda.Stream()
        values = torch.ones(8, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            kept = values + 1
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        values.zero_()
        torch.cuda.current_stream().wait_stream(side)
        del kept

    assert not found("race", lambda: work(True))
    assert any("is read on stream" in race.detail for race in found("race", lambda: work(False)))


def check_a_missing_record_stream_is_found() -> None:
    def work(records: bool, waits: bool) -> None:
        side = torch.cuda.Stream()
        values = torch.ones(8, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            kept = values + 1
        if records:
            values.record_stream(side)
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        del values
        other = torch.ones(8, device="cuda")  # may get the memory
        torch.cuda.current_stream().wait_stream(side)
        del kept, other

    assert not found("race", lambda: work(records=True, waits=False))
    assert not found("race", lambda: work(records=False, waits=True))
    (race,) = found("race", lambda: work(records=False, waits=False))
    assert "no record_stream" in race.detail


def check_a_collective_that_nobody_waits_for_is_found() -> None:
    def work(waits: bool) -> None:
        values = torch.ones(8, device="cuda")
        handle = dist.all_reduce(values, async_op=True)
        if waits:
            handle.wait()
        values.mul_(2)
        handle.wait()

    _one_rank()
    assert not found("race", lambda: work(True))
    assert found("race", lambda: work(False))
    assert not found("race", lambda: dist.all_reduce(torch.ones(8, device="cuda")))


def _one_rank() -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


def check_nccl_takes_no_cpu_tensor() -> None:
    _one_rank()
    assert refusal(lambda: dist.all_reduce(torch.ones(2))).startswith("dist.all_reduce: No backend")
    gloo = dist.new_group([0], backend="gloo")
    dist.all_reduce(torch.ones(2), group=gloo)


def refusal(work: Callable[[], object]) -> str:
    """What RuntimeError says; a failure where there is none."""
    try:
        work()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("not refused")


def check_mixed_devices_are_refused() -> None:
    here = torch.ones(2, device="cuda")
    for other in (torch.ones(2), torch.ones(2, device="cuda:1")):
        assert "same device" in refusal(lambda other=other: here + other)  # type: ignore[misc]
        told = found("mixed", lambda other=other: refusal(lambda: torch.dot(here, other)))  # type: ignore[misc]
        assert [finding.name for finding in told] == ["aten::dot"]
    assert not found("mixed", lambda: here + torch.tensor(1.0))  # a scalar may be anywhere


def check_wrong_ordinals_are_refused() -> None:
    wrong: list[Callable[[], Any]] = [
        lambda: torch.cuda.set_device(DEVICES),
        lambda: torch.cuda.set_device(f"cuda:{DEVICES}"),
        lambda: torch.ones(2, device=f"cuda:{DEVICES}"),
        lambda: torch.ones(2).to(f"cuda:{DEVICES}"),
    ]
    for work in wrong:
        assert "invalid device ordinal" in refusal(work)
    torch.cuda.set_device(1)
    assert torch.ones(2, device="cuda").device.index == 1
    torch.cuda.set_device(0)


def check_waits_of_the_host_are_found() -> None:
    values = torch.arange(4.0, device="cuda")
    mask = values > 1
    pinned = torch.empty(4, pin_memory=True)
    waiting: list[Callable[[], Any]] = [
        lambda: values.sum().item(),
        lambda: float(values[0]),
        lambda: bool(mask.any()),
        lambda: values.tolist(),
        lambda: values.cpu(),
        lambda: torch.empty(4).copy_(values, non_blocking=True),
        lambda: torch.tensor(1.0, device="cuda"),
        lambda: torch.ones(4).cuda(),
        lambda: mask.nonzero(),
        lambda: values[mask],
        lambda: values.masked_select(mask),
        lambda: values[torch.tensor([0, 1])],
        lambda: values.clone().index_put_((mask,), values[0]),
        lambda: mask.long().bincount(),
        lambda: torch.repeat_interleave(mask.long()),
        lambda: torch.cuda.synchronize(),
        lambda: torch.cuda.current_stream().synchronize(),
        lambda: torch.equal(values, values),
    ]
    for number, work in enumerate(waiting):
        told = found("sync", work)
        assert len(told) == 1, (number, [*map(str, told)])
        assert told[0].where[0].startswith("tests/cuda/check_device.py:")
    free: list[Callable[[], Any]] = [
        lambda: values + 1,
        lambda: torch.full((4,), 1.0, device="cuda"),
        lambda: pinned.copy_(values, non_blocking=True),
        lambda: torch.repeat_interleave(mask.long(), output_size=2),
        lambda: torch.where(mask, values, 0.0),
        lambda: values.index_select(0, mask.long()),
        lambda: values.sort(),
        lambda: values.clone().__setitem__(mask, 0.0),
    ]
    for number, work in enumerate(free):
        assert not found("sync", work), number


def check_grouped_products_wait_unless_in_bf16() -> None:
    def product(dtype: torch.dtype) -> None:
        rows, weights = torch.ones(32, 16, device="cuda"), torch.ones(2, 16, 16, device="cuda")
        ends = torch.full((2,), 16, dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)
        torch.nn.functional.grouped_mm(rows.to(dtype), weights.to(dtype), offs=ends)

    assert not found("sync", lambda: product(torch.bfloat16))
    assert len(found("sync", lambda: product(torch.float32))) == 1


def check_kernels_are_counted() -> None:
    device = DEVICE
    many = [torch.ones(3, device="cuda") for _ in range(5)]
    device.kernels()
    many[0].add_(many[1])
    assert device.kernels() == {"aten::add.out": 1}
    torch._foreach_mul_(many, 2.0)
    assert device.kernels() == {"aten::_foreach_mul_.Scalar": 1}
    many[0].view(3, 1).t().expand(2, 3)
    assert device.kernels() == {}


def check_gradients_are_the_cpus() -> None:
    def gradients(device: str) -> list[torch.Tensor]:
        torch.manual_seed(1)
        layers = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
        inputs = torch.randn(5, 6)
        layers, inputs = layers.to(device), inputs.to(device)
        layers(inputs).square().mean().backward()
        return [parameter.grad.cpu() for parameter in layers.parameters() if parameter.grad is not None]

    for ours, theirs in zip(gradients("cuda"), gradients("cpu"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def check_pinned_memory_is_a_power_of_two() -> None:
    DEVICE.most_pinned_bytes()
    kept = torch.empty(1025, dtype=torch.uint8, pin_memory=True)
    assert kept.is_pinned() and kept[7:].is_pinned() and not torch.empty(8).is_pinned()
    assert DEVICE.most_pinned_bytes() == 2048


def check_saves_take_two_pinned_pieces() -> None:
    """Of whatever sizes, dtypes and strides the tensors are; the copies are complete after `finish`."""
    plain, writer.PIECE_BYTES = writer.PIECE_BYTES, 256
    try:
        pipe = writer.PinnedPipe()
        DEVICE.most_pinned_bytes()
        for _ in range(2):  # the second save takes the same memory
            sources = [torch.randn(sizes) for sizes in ((), (0, 3), (64,), (65,), (40, 50), (7, 3, 11))]
            sources += [torch.randn(30, 9).bfloat16(), torch.arange(1000), torch.randn(20, 30).t()]
            sources.append(torch.randn(20, 30)[3:9, 5:21])
            copies = [torch.empty(source.shape, dtype=source.dtype) for source in sources]

            def save(sources: list[Any] = sources, copies: list[Any] = copies) -> None:
                for source, copy in zip(sources, copies, strict=True):
                    pipe.copy(source.cuda(), copy)
                pipe.finish()

            assert not found("race", save)
            assert all(torch.equal(copy, source) for copy, source in zip(copies, sources, strict=True))
        assert DEVICE.most_pinned_bytes() == writer.NUM_PIECES * writer.PIECE_BYTES
    finally:
        writer.PIECE_BYTES = plain


def check_own_times_do_not_wait() -> None:
    """The host reads the events of a step at the beginning of the next, and waits for none."""
    own = LocalComputeTimer(torch.device("cuda"))

    def two_steps() -> None:
        for _ in range(2):
            own.begin()
            own.pause()
            own.resume()
            own.end()

    assert not found("sync", two_steps) and own.seconds == 0.0


if __name__ == "__main__":
    print(run_checks(checks_of(globals())))
