"""A wrong address of rank 0, a port in use, and a rank 0 that does not come are told."""

import resource
import socket
from pathlib import Path

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


@pytest.mark.parametrize("text", ["abc", "99999", "-1", "", "0"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_port_that_is_none(text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", text)
    world = World(0, size, 0, torch.device("cpu"), "gloo")
    for begin in (lambda: open_store(world, 60), lambda: launch.start(world, 1)):
        with pytest.raises(UserError, match=f"MASTER_PORT is '{text}', expected 1 to 65535;"):
            begin()


def test_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(UserError, match=f"MASTER_PORT: {port} is in use on"):
            open_store(HOST, 60)


def test_the_stores_host_may_open_many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a socket to each rank, and the usual limit is 1,024."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setenv("MASTER_PORT", str(launch.free_port()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        open_store(HOST, 60)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 512
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


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
        with pytest.raises(UserError, match=f"MASTER_PORT: 127.0.0.1:{port} accepts the connection of rank "):
            open_store(WAITING, 1)


def listens_at(port: int) -> set[str]:
    """The addresses at which this machine listens at the port, as in /proc: hexadecimal, in reverse."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                found.add(local.rpartition(":")[0])
    return found


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_the_store_listens_at_its_address_alone(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = launch.free_port()
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", str(port))
    store = open_store(HOST, 60)
    assert listens_at(port) == {"0100007F"}
    store.set("key", "value")
    assert open_store(WAITING, 60).get("key") == b"value"


def test_so_it_does_in_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    port = launch.free_port()
    monkeypatch.setenv("MASTER_PORT", str(port))
    launch.start(World(0, 1, 0, torch.device("cpu"), "gloo"), timeout_minutes=1)
    try:
        assert listens_at(port) == {"0100007F"}
    finally:
        launch.stop()


def test_a_name_and_an_address_of_another_machine_are_left_to_pytorch() -> None:
    """Other nodes may know the name as another address; 192.0.2.1 is nobody's (RFC 5737)."""
    for address in ("node-1", "192.0.2.1"):
        assert launch._listener(address, launch.free_port()) is None
