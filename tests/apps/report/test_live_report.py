"""The report of a running run, served to this machine: what it answers, and what it reads again."""

import http.client
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from megamoe.apps.report import command as tool
from megamoe.apps.report import live
from megamoe.apps.report.live import LiveServer
from megamoe.errors import UserError
from megamoe.metrics import reader
from megamoe.metrics.reader import Record
from tests.support.tiny import ROOT, one_line


def line(step: int, loss: float = 2.0) -> str:
    return json.dumps({"step": step, "train/lm_loss": loss}) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("name: run\n")
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[LiveServer]:
    with LiveServer([folder], 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: LiveServer, path: str, **headers: str) -> tuple[int, str, str | None]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", path, headers={key.replace("_", "-"): value for key, value in headers.items()})
    answer = connection.getresponse()
    found = (answer.status, answer.read().decode(), answer.getheader("ETag"))
    connection.close()
    return found


def test_the_content_follows_the_run(server: LiveServer, folder: Path) -> None:
    status, page, _ = ask(server, "/")
    assert status == 200 and "No step is recorded yet" in page and 'data-live="3"' in page
    metrics = folder / "metrics.jsonl"
    metrics.write_text(line(1) + line(2)[:9])  # half a line is being written
    status, main, version = ask(server, "/content")
    assert status == 200 and "<p>1 steps" in main and main.startswith("<main>") and version is not None
    assert ask(server, "/content", If_None_Match=version)[:2] == (304, "")
    with metrics.open("a") as file:
        file.write(line(2)[9:])
    assert "<p>2 steps" in ask(server, "/content", If_None_Match=version)[1]
    metrics.write_text("nonsense\n" + line(3))
    assert ask(server, "/content")[0] == 503 and "line 1 is no record" in ask(server, "/content")[1]
    metrics.write_text(line(4))
    assert "<p>4 steps" in ask(server, "/content")[1]


def test_only_this_machine_and_no_other_path(server: LiveServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, "/", Host=f"evil.example:{server.server_port}")[0] == 403
    assert ask(server, "/", Host=f"localhost:{server.server_port}")[0] == 200
    for host in ("localhost:", f"localhost:{server.server_port + 1}", "127.0.0.1:evil.example", "127.0.0.1"):
        assert ask(server, "/", Host=host)[0] == 403
    assert ask(server, "/../config.yaml")[0] == 404


def talk(server: LiveServer, request: bytes) -> bytes:
    """Everything that the server answers until it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_two_hosts_are_refused(server: LiveServer) -> None:
    mine = f"Host: localhost:{server.server_port}\r\n"
    request = f"GET / HTTP/1.0\r\n{mine}Host: evil.example\r\n\r\n"
    assert b" 403 " in talk(server, request.encode()).splitlines()[0]


def test_a_token_is_part_of_every_address(folder: Path) -> None:
    with LiveServer([folder], 0, with_token=True) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            token = server.url.split("/")[3]
            assert len(token) == 22 and server.url == f"http://127.0.0.1:{server.server_port}/{token}/"
            assert ask(server, f"/{token}/")[0] == ask(server, f"/{token}/content")[0] == 200
            assert ask(server, f"/{token}/other")[0] == 404
            for path in ("/", "/content", f"/{token}", f"/{token[:-1]}x/content", f"//{token}é/"):
                status, text, _ = ask(server, quote(path))
                assert status == 403 and token not in text and "the token that the command" in text
        finally:
            server.shutdown()
            thread.join()


def test_a_token_without_a_server_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert one_line(tool.main([str(folder), "--token"]), capsys).startswith("error: --token: found without")


def test_silent_and_slow_connections_are_closed(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live._Handler, "timeout", 0.2)
    assert talk(server, b"") == b""  # says nothing
    assert talk(server, b"GET / HTTP/1.0\r\nHost:") == b""  # stops in the middle
    monkeypatch.setattr(live, "LONGEST_S", 0.4)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
        connection.settimeout(0.05)
        with pytest.raises(ConnectionError):  # a byte each 50 ms is never silent
            for _ in range(400):
                with suppress(TimeoutError):
                    connection.sendall(b"G")
                    if connection.recv(1) == b"":
                        raise ConnectionError
    assert ask(server, "/")[0] == 200


def test_connections_above_the_bound_are_closed(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_CONNECTIONS", 3)
    before = threading.active_count()
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.server_port)))
        with suppress(ConnectionError):  # closed, with what it sent unread
            assert talk(server, b"GET / HTTP/1.0\r\n\r\n") == b""
        assert threading.active_count() <= before + 3
    for _ in range(400):  # until the three are closed
        with suppress(ConnectionError, http.client.HTTPException):
            if ask(server, "/")[0] == 200:
                return
        time.sleep(0.02)
    pytest.fail("the server does not answer again")


def test_a_client_that_goes_away_leaves_no_traceback(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, gone, ended = threading.Event(), threading.Event(), threading.Event()
    whole, shutdown_request = live.document, server.shutdown_request

    def late(*arguments: Any) -> str:
        asked.set()
        gone.wait(20)
        return whole(*arguments) + "x" * (16 << 20)  # more than the socket's buffers hold

    def closed(request: Any) -> None:
        shutdown_request(request)
        ended.set()

    monkeypatch.setattr(live, "document", late)
    monkeypatch.setattr(server, "shutdown_request", closed)
    with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )  # close by a reset
        connection.sendall(f"GET / HTTP/1.0\r\nHost: localhost:{server.server_port}\r\n\r\n".encode())
        assert asked.wait(20)
    gone.set()
    assert ended.wait(20)
    assert capsys.readouterr().err == ""


def test_a_used_port_is_refused_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = one_line(tool.main([str(folder), "--live", f"--port={port}"]), capsys)
    assert told.startswith(f"error: --port: {port} cannot be opened (Address already in use)")


def test_a_live_report_of_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot read" in one_line(tool.main([str(tmp_path), "--live", "--port=0"]), capsys)


@pytest.mark.parametrize("port", ["-1", "65536", "http"])
def test_what_is_no_port_is_refused(folder: Path, port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        tool.main([str(folder), "--live", f"--port={port}"])
    assert ended.value.code == 2 and "expected a number from 0 to 65535" in capsys.readouterr().err


def test_a_record_reads_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2) + line(3).rstrip())  # the last line has no end yet
    parsed: list[bytes] = []
    parse = reader._parse

    def counted(text: bytes) -> dict[str, Any] | None:
        parsed.append(text)
        return parse(text)

    monkeypatch.setattr(reader, "_parse", counted)
    record = Record(path)

    def read() -> tuple[list[int], int]:
        parsed.clear()
        return [row["step"] for row in record.read()], len(parsed)

    assert read() == ([1, 2, 3], 3)
    assert read() == ([1, 2, 3], 1)
    with path.open("a") as file:
        file.write("\n" + line(4))
    assert read() == ([1, 2, 3, 4], 2)
    assert read() == ([1, 2, 3, 4], 0)
    path.write_text(line(1) + line(5))  # shorter: a resumed run has cut it
    assert read() == ([1, 5], 2)
    fresh = tmp_path / "fresh"
    fresh.write_text((line(7) + line(8)) * 9)
    fresh.replace(path)
    assert read()[0] == [7, 8]


def test_a_grown_record_names_the_line_of_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2))
    record = Record(path)
    record.read()
    with path.open("a") as file:
        file.write('{"step": 3, "train/lm_loss": "x"}\n')
    with pytest.raises(UserError, match="line 3: train/lm_loss"):
        record.read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_interrupted(folder: Path, number: signal.Signals) -> None:
    (folder / "metrics.jsonl").write_text(line(1))
    command = [sys.executable, str(ROOT / "tools/report.py"), str(folder), "--live", "--port=0"]
    # A shell starts what runs in its background with SIGINT ignored, and children inherit that.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        signal.signal(signal.SIGINT, handler)
        assert process.stdout is not None and process.stderr is not None
        url: Any = process.stdout.readline().split(" ")[0]
        assert url.startswith("http://127.0.0.1:")
        process.send_signal(number)
        assert process.wait(30) == 0 and process.stderr.read() == ""
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "metrics.jsonl"], (
        "nothing written"
    )
