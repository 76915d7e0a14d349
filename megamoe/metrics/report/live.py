"""Serves the page of runs that are being written, to this machine alone; the page fetches its content again.

Only what has been appended to metrics.jsonl is read again. A request from a page of another origin is refused
by its Host header, so that no web site can read the runs through the reader's browser.
"""

import errno
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from megamoe.errors import UserError
from megamoe.metrics.recorder import METRICS_FILE
from megamoe.metrics.report.page import document, live_main
from megamoe.metrics.report.run_statistics import CONFIG_FILE, Record, read_run

ADDRESS = "127.0.0.1"
REFRESH_S = 3.0


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
                self._main = live_main([read_run(folder, record) for folder, record in folders])
                self._version = version
            return self._version, self._main

    def title(self) -> str:
        """Return the title of the page."""
        return ", ".join(folder.resolve().name for folder in self._folders)


def _state(folder: Path) -> tuple[Any, ...]:
    found: list[Any] = []
    for name in (METRICS_FILE, CONFIG_FILE, "summary.json"):
        try:
            status = (folder / name).stat()
        except OSError:
            found.append(None)
        else:
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)


class LiveServer(ThreadingHTTPServer):
    """A server on ADDRESS. `/` is the page, `/content` its `<main>`, or 304 for a version already known."""

    daemon_threads = True

    def __init__(self, folders: list[Path], port: int, refresh_s: float = REFRESH_S) -> None:
        """Read the runs and open the port; 0 takes any free one.

        Raises:
            UserError: as `read_run`; if the port is in use or may not be opened.
        """
        self.runs, self.refresh_s = LiveRuns(folders), refresh_s
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
        return f"http://{ADDRESS}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in (ADDRESS, "localhost"):
            self._answer(HTTPStatus.FORBIDDEN, "only for this machine")
            return
        if self.path not in ("/", "/content"):
            self._answer(HTTPStatus.NOT_FOUND, "no such page")
            return
        try:
            version, main = self.server.runs.content()
        except UserError as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
            return
        if self.path == "/":
            page = document(self.server.runs.title(), main, self.server.refresh_s)
            self._answer(HTTPStatus.OK, page, "text/html")
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
