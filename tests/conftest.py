"""Fixtures shared by several packages: quiet vendors, a registry that is reset, a world of one rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from megamoe.compat.startup import settle_vendors

# Before torch starts, for this process and those that the tests start: threads that wait for work spin, which
# doubles the time of small tensors. Tests of threads set their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
settle_vendors()

if TYPE_CHECKING:
    from tests.distributed.pool import Pool

OWN_PARTS = Path(__file__).parents[1] / "examples/own_parts.py"
# The files that take longest, and the folders of such files. They run first: near the end, a long one leaves
# a core idle. Of the two files that need the pretended CUDA device, one compiles it before the other starts.
FIRST = (
    "cuda/test_training.py",
    "distributed/test_matrix.py",
    "distributed/test_launch.py",
    "distributed",
    *("cuda", "simulation", "compat", "tasks", "kernels", "model", "train", "metrics", "generation"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files and folders of FIRST before all others, in which pytest's order stays."""
    places = {str(Path(__file__).parent / name): place for place, name in enumerate(FIRST)}

    def place(item: pytest.Item) -> int:
        return min(places.get(str(path), len(FIRST)) for path in (item.path, item.path.parent))

    items.sort(key=place)


@pytest.fixture(scope="session", autouse=True)
def _early_ranks(request: pytest.FixtureRequest) -> None:
    """Start the ranks' imports, which take seconds, in the background of the first tests.

    Not at the end of the collection: what ranks print would then be on the terminal.
    """
    if any("pool" in getattr(item, "fixturenames", ()) for item in request.session.items):
        from tests.distributed.pool import Pool

        Pool().prepare()


@pytest.fixture(scope="session")
def pool() -> Pool:
    """Runs jobs on processes that are the ranks."""
    from tests.distributed.pool import Pool

    return Pool()


@pytest.fixture(name="restored_process")
def _restored_process() -> Iterator[None]:
    from tests.tiny import restored_process

    with restored_process():
        yield


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
def own_parts() -> Iterator[list[tuple[str, str]]]:
    """The parts of examples/own_parts.py as (kind, name), known during the test."""
    from megamoe import registry

    registry.discover()
    before = {kind: dict(parts) for kind, parts in registry._parts.items()}
    registry.load_plugin(str(OWN_PARTS))
    yield [(kind, name) for kind in registry.KINDS for name in registry._parts[kind].keys() - before[kind]]
    registry._parts.update(before)
    for module in [name for name in sys.modules if name.startswith(f"megamoe_plugin_{OWN_PARTS.stem}_")]:
        del sys.modules[module]


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Process groups and Megatron-Core's state for this process alone."""
    from tests.tiny import world_of_one

    with world_of_one():
        yield
