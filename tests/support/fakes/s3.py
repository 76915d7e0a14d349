"""A real S3 server on this machine (moto's), and a proxy before it that is slow, fails, cuts or is full."""

import http.client
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

BUCKET = "runs"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class Faults:
    """What the proxy does to a request: share: of them that fail. kind: slow, busy (503), cut, full."""

    def __init__(self) -> None:
        self.kind = ""
        self.share = 0.0
        self.failed = 0
        self._random = random.Random(1)
        self._lock = threading.Lock()

    def strikes(self, method: str) -> bool:
        with self._lock:
            hit = bool(self.kind) and self._random.random() < self.share
            hit = hit and (self.kind != "full" or method in ("PUT", "POST"))
            self.failed += hit
            return hit


def _handler(faults: Faults, server_port: int) -> type[BaseHTTPRequestHandler]:
    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *unused: Any) -> None:
            pass

        def _forward(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            if faults.strikes(self.command):
                if faults.kind == "cut":
                    self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True
                    return
                if faults.kind == "slow":
                    time.sleep(0.3)
                else:
                    code, name = (503, "SlowDown") if faults.kind == "busy" else (507, "QuotaExceeded")
                    self._answer(code, {}, f"<Error><Code>{name}</Code><Message>m</Message></Error>".encode())
                    return
            server = http.client.HTTPConnection("127.0.0.1", server_port, timeout=30)
            headers = {key: value for key, value in self.headers.items() if key.lower() != "expect"}
            server.request(self.command, self.path, body, headers)
            answer = server.getresponse()
            self._answer(answer.status, dict(answer.getheaders()), answer.read())
            server.close()

        def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            length = str(len(body))
            for key, value in headers.items():
                if key.lower() == "content-length" and self.command == "HEAD":
                    length = value
                elif key.lower() not in (
                    "transfer-encoding",
                    "connection",
                    "content-length",
                    "date",
                    "server",
                ):
                    self.send_header(key, value)
            self.send_header("Content-Length", length)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward

    return Proxy


@contextmanager
def s3_server(patch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """Start the server and the proxy, make the bucket, and let the environment lead to the proxy."""
    import s3fs

    port, proxy_port = free_port(), free_port()
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    faults = Faults()
    proxy = ThreadingHTTPServer(("127.0.0.1", proxy_port), _handler(faults, port))
    proxy.daemon_threads = True
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        patch.delenv(name)
    patch.setenv("AWS_ACCESS_KEY_ID", "testing")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "testing-secret")
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy_port}")
    try:
        _wait_for(port)
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir(BUCKET)
        yield faults
    finally:
        proxy.shutdown()
        server.kill()
        server.wait()


def _wait_for(port: int) -> None:
    for _ in range(300):
        with socket.socket() as found:
            if found.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError("the S3 server did not start")
