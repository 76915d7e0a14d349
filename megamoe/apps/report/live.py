"""Serves the page of runs that are being written, to this machine alone; the page fetches its content again.

Only what has been appended to metrics.jsonl is read again. A request whose Host header is not the server's
own address is refused, so that no web site can read the runs through the reader's browser. With a token, the
paths begin with it: other users of this machine can connect, but do not know it.
"""

import errno
import hmac
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from megamoe.apps.report.page import content_of, document, main_of
from megamoe.apps.report.run_statistics import Record, read_run
from megamoe.errors import UserError
from megamoe.io import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, real

ADDRESS = "127.0.0.1"
REFRESH_S = 3.0
SILENT_S = 10.0  # without a byte read or written, after which a connection is closed
LONGEST_S = 60.0  # after which a connection is closed, whatever it does
MOST_CONNECTIONS = 16  # at a time, with a thread each; a further one is closed at once


class LiveRuns:
    """The content of the page of some runs, made anew when a file of theirs has changed."""

    def __init__(self, folders: list[Path]) -> None:
        """Read the runs once.

        Raises:
            UserError: as `read_run`.
        """
        self._folders = folders
        self._records = [Record(folder / METRICS_FILE) for folder in folders]
        self._lock = threading.Lock()
        self._version, self._main = "", ""
        self.content()

    def content(self) -> tuple[str, str]:
        """Return (the version of the files, the `<main>` of the page).

        Raises:
            UserError: as `read_run`.
        """
        with self._lock:
            version = f'"{hash(tuple(map(_state, self._folders))) & 0xFFFFFFFFFFFF:x}"'
            if version != self._version:
                folders = zip(self._folders, self._records, strict=True)
                self._main = main_of(*content_of([read_run(folder, record) for folder, record in folders]))
                self._version = version
            return self._version, self._main

    def title(self) -> str:
        """Return the title of the page."""
        return ", ".join(real(folder).name for folder in self._folders)


def _state(folder: Path) -> tuple[Any, ...]:
    found: list[Any] = []
    for name in (METRICS_FILE, CONFIG_FILE, SUMMARY_FILE):
        try:
            status = (folder / name).stat()
        except OSError:
            found.append(None)
        else:
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)


class LiveServer(ThreadingHTTPServer):
    """A server on ADDRESS. `/` is the page, `/content` its `<main>`, or 304 for a version already known.

    path: what stands before both, `/` or `/<token>/`.
    """

    daemon_threads = True

    def __init__(
        self, folders: list[Path], port: int, refresh_s: float = REFRESH_S, with_token: bool = False
    ) -> None:
        """Read the runs and open the port; 0 takes any free one. with_token: draw a token of 128 bits.

        Raises:
            UserError: as `read_run`; if the port is in use or may not be opened.
        """
        self.runs, self.refresh_s = LiveRuns(folders), refresh_s
        self.path = f"/{secrets.token_urlsafe(16)}/" if with_token else "/"
        self._begun: dict[socket.socket, float] = {}  # open connections, and when they began
        self._lock = threading.Lock()
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            raise UserError(
                f"--port: {port} cannot be opened ({error.strerror}); name a free port, or 0 for any"
            ) from None

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{ADDRESS}:{self.server_port}{self.path}"

    @property
    def hosts(self) -> list[str]:
        """The Host headers of a browser that was given `url`; it leaves out port 80."""
        port = "" if self.server_port == 80 else f":{self.server_port}"
        return [f"{ADDRESS}{port}", f"localhost{port}"]

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether the connection is served: not if there are MOST_CONNECTIONS already."""
        with self._lock:
            if len(self._begun) >= MOST_CONNECTIONS:
                return False
            self._begun[request] = time.monotonic()
        return True

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, at its end or because it is not served."""
        with self._lock:
            self._begun.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End the connections that have lasted too long; called twice a second while the server waits."""
        with self._lock:
            oldest = time.monotonic() - LONGEST_S
            late = [request for request, begun in self._begun.items() if begun < oldest]
            for request in late:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)  # its thread then reads the end, and closes it

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went away or was too slow."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    timeout = SILENT_S

    def do_GET(self) -> None:
        if len(names := self.headers.get_all("Host", [])) != 1 or names[0] not in self.server.hosts:
            problem = f"only for this machine, at {self.server.hosts[0]}; give a tunnel the same port"
            self._answer(HTTPStatus.FORBIDDEN, problem)
            return
        if not hmac.compare_digest(self.path[: len(self.server.path)].encode(), self.server.path.encode()):
            self._answer(HTTPStatus.FORBIDDEN, "the address needs the token that the command printed")
            return
        page = self.path[len(self.server.path) :]
        if page not in ("", "content"):
            self._answer(HTTPStatus.NOT_FOUND, "no such page")
            return
        try:
            version, main = self.server.runs.content()
        except UserError as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
            return
        if page == "":
            whole = document(self.server.runs.title(), main, self.server.refresh_s)
            self._answer(HTTPStatus.OK, whole, "text/html")
        elif self.headers.get("If-None-Match") == version:
            self._answer(HTTPStatus.NOT_MODIFIED, "", version=version)
        else:
            self._answer(HTTPStatus.OK, main, "text/html", version)

    def _answer(
        self, status: HTTPStatus, text: str, kind: str = "text/plain", version: str | None = None
    ) -> None:
        content = text.encode(errors="backslashreplace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        if version is not None:
            self.send_header("ETag", version)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print no line for each request."""
