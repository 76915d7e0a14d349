"""A W&B server on the loopback address: keeps what runs and views are sent to it, in memory.

It takes the GraphQL calls of wandb 0.31 and wandb-workspaces 0.4 by the name of their first field, the file
stream of a run (`/files/<entity>/<project>/<run>/file_stream`: lines of files at offsets), and uploads of
files. A call that it does not know is answered with an error and kept in `unknown`.
"""

import gzip
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Tree = dict[str, Any]
ENTITY = "somebody"
KEY = "0123456789abcdef" * 2 + "01234567"  # 40 characters, as W&B's keys
HISTORY, EVENTS, SUMMARY, OUTPUT = (
    "wandb-history.jsonl",
    "wandb-events.jsonl",
    "wandb-summary.json",
    "output.log",
)
STREAM = re.compile(r"/files/([^/]+)/([^/]+)/([^/]+)/file_stream")
TELEMETRY = "/sdk/otel/"  # numbers about W&B's own client
FIRST_FIELD = re.compile(r"\{\s*(?:(\w+)\s*:\s*)?(\w+)")  # with its alias


@dataclass
class SentRun:
    """What arrived of one run. values: the inputs of its upsertBucket calls; lines: of the streamed files."""

    project: str
    name: str
    values: Tree = field(default_factory=dict)
    lines: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    exits: list[int] = field(default_factory=list)

    @property
    def history(self) -> list[Tree]:
        """The rows of the history, in the order in which they were sent."""
        return [json.loads(line) for line in self.lines.get(HISTORY, [])]

    @property
    def config(self) -> Tree:
        """The configuration, without W&B's own entry."""
        found = json.loads(self.values.get("config") or "{}")
        return {key: item["value"] for key, item in found.items() if key != "_wandb"}

    def bucket(self) -> Tree:
        """The run as a GraphQL object."""
        lines = {name: self.lines.get(name, []) for name in (HISTORY, EVENTS, SUMMARY, OUTPUT)}
        own = json.loads(self.values.get("config") or "{}").get("_wandb", {}).get("value", {})
        return {
            "id": f"id-{self.name}",
            "name": self.name,
            "displayName": self.values.get("displayName") or self.name,
            "description": None,
            "config": self.values.get("config") or "{}",
            "sweepName": None,
            "tags": self.values.get("tags") or [],
            "notes": None,
            "project": {"id": "p", "name": self.project, "entity": {"id": "e", "name": ENTITY}},
            "historyLineCount": len(lines[HISTORY]),
            "eventsLineCount": len(lines[EVENTS]),
            "logLineCount": len(lines[OUTPUT]),
            "historyTail": json.dumps(lines[HISTORY][-1:]),
            "eventsTail": json.dumps(lines[EVENTS][-1:]),
            "summaryMetrics": (lines[SUMMARY] or ["{}"])[-1],
            "wandbConfig": json.dumps({"t": own.get("t")}),  # without it a run has not started,
        }


class WandbServer:
    """The state of the server, and its answers. url: where it listens."""

    def __init__(self) -> None:
        self.runs: dict[str, SentRun] = {}
        self.projects: set[str] = set()
        self.unknown: list[str] = []
        self.unauthorized: list[str] = []
        self.refuses = False  # every run
        self.url = ""
        self._lock = threading.Lock()

    def graphql(self, query: str, values: Tree) -> Tree:
        """Answer one call."""
        found = FIRST_FIELD.search(query)
        alias, name = (found[1] or found[2], found[2]) if found else ("", "")
        answer = getattr(self, f"_{name}", None)
        if answer is None or (self.refuses and name == "upsertBucket"):
            self.unknown.append(query)
            return {"errors": [{"message": f"refused: {name}"}], "data": None}
        with self._lock:
            return {"data": {alias: answer(values)}}

    def stream(self, run: str, sent: Tree) -> None:
        """Take the lines of a run's files; what was at these offsets before is replaced."""
        with self._lock:
            kept = self.runs[run]
            for name, chunk in (sent.get("files") or {}).items():
                lines = kept.lines.setdefault(name, [])
                start = 0 if name == SUMMARY else chunk["offset"]
                assert start <= len(lines), f"{name}: a gap before line {start}"
                lines[start : start + len(chunk["content"])] = chunk["content"]
            if sent.get("complete"):
                kept.exits.append(sent["exitcode"])

    def take_file(self, run: str, name: str, content: bytes) -> None:
        """Take an uploaded file."""
        with self._lock:
            self.runs[run].files[name] = content

    def _serverInfo(self, values: Tree) -> Tree:
        return {
            "features": [],
            "cliVersionInfo": {"max_cli_version": "99.0.0"},
            "latestLocalVersionInfo": None,
        }

    def _viewer(self, values: Tree) -> Tree:
        return {
            "id": "v",
            "entity": ENTITY,
            "username": ENTITY,
            "name": ENTITY,
            "email": "",
            "admin": False,
            "flags": "{}",
            "teams": {"edges": []},
            "apiKeys": {"edges": []},
        }

    def _entity(self, values: Tree) -> Tree:
        return {"organization": {"coreWeaveOrganizationId": ""}}

    def _project(self, values: Tree) -> Tree:
        return {"id": "p", "internalId": "cDox", "name": values.get("projectName")}

    def _models(self, values: Tree) -> Tree:
        nodes = [{"node": self._project_named(name), "cursor": name} for name in sorted(self.projects)]
        return {"edges": nodes, "pageInfo": {"endCursor": None, "hasNextPage": False}}

    def _upsertModel(self, values: Tree) -> Tree:
        name = values["input"]["name"]
        self.projects.add(name)
        project = self._project_named(name)
        return {"model": project, "project": project, "inserted": True}

    def _project_named(self, name: str) -> Tree:
        return {
            "id": "p",
            "name": name,
            "entityName": ENTITY,
            "description": None,
            "access": "USER_READ",
            "views": "{}",
            "createdAt": "2026-01-01T00:00:00",
            "isBenchmark": False,
        }

    def _model(self, values: Tree) -> Tree | None:
        run = self.runs.get(values.get("name") or "")
        project = {"id": "p", "name": values.get("project"), "entity": {"id": "e", "name": ENTITY}}
        return {**project, "bucket": run.bucket() if run else None}

    def _upsertBucket(self, values: Tree) -> Tree:
        name = values["name"]
        inserted = name not in self.runs
        run = self.runs.setdefault(name, SentRun(values.get("project") or "", name))
        run.values |= {key: value for key, value in values.items() if value is not None}
        return {"bucket": run.bucket(), "inserted": inserted}

    def _createRunFiles(self, values: Tree) -> Tree:
        files = [
            {"name": name, "uploadUrl": f"{self.url}/upload/{values['run']}/{name}"}
            for name in values["files"]
        ]
        return {"runID": f"id-{values['run']}", "uploadHeaders": [], "files": files}


class _Handler(BaseHTTPRequestHandler):
    """HTTP for a `WandbServer`."""

    server: "_Listener"
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self._body()
        state, path = self.server.state, self.path.partition("?")[0]
        if not path.startswith(TELEMETRY) and not self.headers.get("Authorization"):
            state.unauthorized.append(path)
        if path == "/graphql":
            asked = json.loads(body)
            self._answer(state.graphql(asked["query"], asked.get("variables") or {}))
        elif found := STREAM.fullmatch(path):
            state.stream(found[3], json.loads(body))
            self._answer({"exitcode": None, "limits": {}})
        elif path.startswith(TELEMETRY):
            self._answer({})
        else:
            state.unknown.append(path)
            self._answer({}, 404)

    def do_PUT(self) -> None:
        _, _, run, name = self.path.split("/", 3)
        self.server.state.take_file(run, name, self._body())
        self._answer({})

    def do_GET(self) -> None:
        self.server.state.unknown.append(self.path)
        self._answer({}, 404)

    def _body(self) -> bytes:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(content) if self.headers.get("Content-Encoding") == "gzip" else content

    def _answer(self, tree: Tree, status: int = 200) -> None:
        content = json.dumps(tree).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *values: Any) -> None:
        """Keep standard error clean."""


class _Listener(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, state: WandbServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.state = state


@contextmanager
def serving() -> Iterator[WandbServer]:
    """Listen on a free port of the loopback address."""
    state = WandbServer()
    listener = _Listener(state)
    state.url = f"http://127.0.0.1:{listener.server_address[1]}"
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()
