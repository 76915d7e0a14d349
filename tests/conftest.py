"""Fixtures shared by several packages: quiet vendors, a registry that is reset, a world of one rank."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from megamoe.compat.startup import configure_libraries

# What is imported and collected stays: it is not searched for garbage, now or in the tests.
gc.disable()
# Before torch starts, for this process and those that the tests start: threads that wait for work spin, which
# doubles the time of small tensors. Tests of threads set their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
configure_libraries()

if TYPE_CHECKING:
    from tests.support.ranks.pool import Pool

OWN_PARTS = Path(__file__).parents[1] / "examples/own_parts.py"
# The files that take longest, and the folders of such files. They run first: near the end, a long one leaves
# a core idle. Of the two files that need the pretended CUDA device, one compiles it before the other starts.
FIRST = (
    "cuda/test_training.py",
    "distributed/parity/test_matrix.py",
    "distributed/launch/test_launch.py",
    "distributed",
    *(
        "cuda",
        "apps/plan",
        "compat",
        "apps/finetune",
        "kernels",
        "model",
        "train",
        "apps/report",
        "apps/generation",
    ),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--most-seconds`: of `make test-slowest`. `--most-ranks`: of `make test-core`."""
    parser.addoption("--most-seconds", type=float, help="fail if a test takes longer, its fixtures included")
    parser.addoption("--most-ranks", type=int, default=64, help="skip the tests that need more ranks")
    parser.addoption("--rewrite-messages", action="store_true", help="write tests/snapshots/refusals anew")


class SlowTests:
    """Fails the session if a test took longer than its budget."""

    def __init__(self, budget_s: float) -> None:
        self.budget_s, self.seconds = budget_s, Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the time of set-up, test and tear-down."""
        self.seconds[report.nodeid] += report.duration  # type: ignore[assignment]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Set the exit code."""
        if any(seconds > self.budget_s for seconds in self.seconds.values()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Name the tests that are over the budget."""
        for test, seconds in self.seconds.most_common():
            if seconds > self.budget_s:
                terminalreporter.write_line(f"{seconds:.1f} s, budget {self.budget_s:g} s: {test}", red=True)


def pytest_configure(config: pytest.Config) -> None:
    """Watch the times, if asked to; with xdist in the process that has all reports."""
    budget_s = config.getoption("--most-seconds")
    if budget_s is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SlowTests(budget_s))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files and folders of FIRST before all others, in which pytest's order stays."""
    places = {Path(__file__).parent / name: place for place, name in enumerate(FIRST)}

    @cache
    def place(file: Path) -> int:
        return min(places.get(path, len(FIRST)) for path in (file, *file.parents))

    items.sort(key=lambda item: place(item.path))


def needs_ranks(item: pytest.Item) -> bool:
    return "pool" in getattr(item, "fixturenames", ())


def pytest_collection_finish() -> None:
    """Collect the garbage of the tests alone."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _early_ranks(request: pytest.FixtureRequest) -> None:
    """Start the ranks' imports, which take seconds, in the background of the first tests.

    Not at the end of the collection: what ranks print would then be on the terminal.
    """
    if any(map(needs_ranks, request.session.items)):
        from tests.support.ranks.pool import Pool

        Pool()


@pytest.fixture
def expect_message(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Compare a message, or several, each in one line, with that of a row of a table of refusals.

    A row whose message is [] is accepted. Rewriting makes no refused row accepted, nor the reverse. Messages
    list names, so parts of plugins that other tests have loaded are not known.
    """
    if "own_registry" not in request.fixturenames:
        from megamoe import registry

        registry.discover()
        known = {
            kind: {name: part for name, part in parts.items() if registry.is_ours(part)}
            for kind, parts in registry._parts.items()
        }
        monkeypatch.setattr(registry, "_parts", known)

    def expect(case: Any, message: str | list[str]) -> None:
        expected = case.row.get("message")
        if isinstance(message, str) and "tmp_path" in request.fixturenames:
            message = message.replace(str(request.getfixturevalue("tmp_path")), "FOLDER").strip()
        assert bool(message) == (expected != []), message or "accepted"
        assert "\n" not in "".join(message)
        if message != expected and request.config.getoption("--rewrite-messages"):
            case.rewrite(message)
        else:
            assert message == expected, f"if meant: pytest {request.path} --rewrite-messages"

    return expect


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Pool:
    """Runs jobs on processes that are the ranks."""
    from tests.support.ranks.pool import Pool

    return Pool(request.config.getoption("--most-ranks"))


@pytest.fixture(name="restored_process")
def _restored_process() -> Iterator[None]:
    from tests.support.tiny import restored_process

    with restored_process():
        yield


@pytest.fixture
def refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    restored_process: None,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., str]:
    """Call main() of a script in tools/ in the folder `tmp_path`; returns the one line of its error."""
    from tests.support.tiny import one_line, tool

    monkeypatch.chdir(tmp_path)

    def call(name: str, *arguments: object) -> str:
        capsys.readouterr()
        return one_line(tool(name).main([str(each) for each in arguments]), capsys)

    return call


@pytest.fixture
def pretrain(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    restored_process: None,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., int]:
    """Call main() of pretrain_gpt_moe.py on a tiny run in the folder `tmp_path`; returns its exit code."""
    import pretrain_gpt_moe
    from megamoe.config import dump_yaml
    from megamoe.parallel import rank_consistency
    from tests.support.tiny import tiny

    (tmp_path / "run.yaml").write_text(dump_yaml(tiny("output=runs", "name=a")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rank_consistency, "PATIENCE_S", 0)  # there are no others

    def call(*arguments: str) -> int:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt_moe.py", "--config", "run.yaml", *arguments])
        return pretrain_gpt_moe.main()

    return call


@pytest.fixture
def refused_run(
    pretrain: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., str]:
    """The same for a mistake: returns its one line. It ends before the ranks start, and leaves nothing."""
    from megamoe.parallel import launch
    from tests.support.tiny import one_line

    monkeypatch.setattr(launch, "start", lambda *_, **__: pytest.fail("ranks were started"))

    def call(*arguments: str) -> str:
        line = one_line(pretrain(*arguments), capsys)
        assert not (tmp_path / "runs").exists()
        return line

    return call


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parts and presets that the test registers, and plugins that it loads, are gone after it."""
    from megamoe import registry

    registry.discover()
    copy = {kind: dict(parts) for kind, parts in registry._parts.items()}
    monkeypatch.setattr(registry, "_parts", copy)
    monkeypatch.setattr(registry, "_presets", dict(registry._presets))
    before = set(sys.modules)
    yield
    for module in [name for name in sys.modules if name.startswith("megamoe_plugin_")]:
        if module not in before:
            del sys.modules[module]


@pytest.fixture
def own_parts(own_registry: None) -> list[tuple[str, str]]:
    """The parts of examples/own_parts.py as (kind, name), known during the test."""
    from megamoe import registry

    before = {kind: set(parts) for kind, parts in registry._parts.items()}
    registry.load_plugin(str(OWN_PARTS))
    return [(kind, name) for kind in registry.KINDS for name in registry._parts[kind].keys() - before[kind]]


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Process groups and Megatron-Core's state for this process alone."""
    from tests.support.tiny import world_of_one

    with world_of_one():
        yield


@pytest.fixture
def nobody_is_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the place of the netrc file, which does not exist."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "netrc"
