"""How errors are told apart, and the line of each."""

import pytest
import torch

from megamoe.errors import ExitCode, PluginError
from megamoe.resilience.error_reporting import explain


@pytest.fixture(autouse=True)
def one_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank's number stands before a line."""
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError("experts: cannot allocate 80 bytes"), "experts: cannot allocate 80 bytes"),
        (MemoryError(), "no memory is left"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "CUDA out of memory"),
    ],
)
def test_missing_memory_is_a_line_with_the_way_out(error: Exception, reason: str) -> None:
    code, line = explain(error)
    assert code is ExitCode.UNEXPECTED
    assert line is not None
    assert line.startswith(f"out of memory ({reason}")
    assert line.endswith(
        "lower train.micro_batch_size or data.sequence_length, set model.recompute, or use more ranks"
    )


def test_so_is_the_memory_that_pytorch_asks_the_host_for() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60)
    code, line = explain(raised.value)
    assert code is ExitCode.UNEXPECTED
    assert line is not None and line.startswith("out of memory (")


def test_an_error_that_nobody_has_foreseen_has_no_line() -> None:
    assert explain(ValueError("x")) == (ExitCode.UNEXPECTED, None)


@pytest.mark.parametrize(
    ("cause", "code", "line"),
    [
        (RuntimeError("Connection closed by peer"), ExitCode.UNEXPECTED, "lost contact with another rank"),
        (torch.OutOfMemoryError("CUDA out of memory."), ExitCode.UNEXPECTED, "out of memory (CUDA"),
        (IndexError("5"), ExitCode.MISTAKE, "scorer 'mine': forward failed"),
    ],
)
def test_what_a_plugins_part_meets_is_not_its_mistake(cause: Exception, code: ExitCode, line: str) -> None:
    error = PluginError("scorer 'mine': forward failed")
    error.__cause__ = cause
    found, told = explain(error)
    assert found is code and told is not None and told.startswith(line)
