"""A wrong address of rank 0, a port in use, and a rank 0 that does not come are told."""

import socket

import pytest
import torch

from megamoe.errors import UserError
from megamoe.parallel import launch
from megamoe.parallel.launch import World, open_store

WAITING = World(1, 2, 0, torch.device("cpu"), "gloo")
HOST = World(0, 2, 0, torch.device("cpu"), "gloo")


@pytest.fixture(autouse=True)
def _nothing_is_left(restored_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_store", None)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


@pytest.mark.parametrize("world", [HOST, WAITING])
def test_an_address_that_does_not_resolve(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no-such-node.invalid")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(UserError, match="MASTER_ADDR: 'no-such-node.invalid' does not resolve on"):
        open_store(world, 60)


def test_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(UserError, match=f"MASTER_PORT: {port} is in use on"):
            open_store(HOST, 60)


def test_a_rank_that_waits_tells_for_whom(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(launch, "LATE_S", 0.1)
    with pytest.raises(RuntimeError):
        open_store(WAITING, 1)
    told = capsys.readouterr().err
    assert told.startswith("rank 1 (") and f"for rank 0 at 127.0.0.1:{port}: has it started" in told


def test_a_program_that_is_silent_at_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own client waits for its answer without a limit."""
    monkeypatch.setattr(launch, "LATE_S", 0.1)
    monkeypatch.setattr(launch, "SILENT_S", 0.1)
    with socket.create_server(("", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(
            UserError, match=f"MASTER_PORT: 127.0.0.1:{port} accepts the connection of rank 1"
        ):
            open_store(WAITING, 1)
