"""A Slurm cluster of two nodes on this machine, and the jobs that the tests submit to it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, Losses, make_home, undisturbed


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start the cluster; the test is skipped where Slurm is not installed."""
    with Cluster.started(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder that stands for the repository's root, so that logs and runs stay out of it."""
    return make_home(tmp_path / "home")


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """The losses of the undisturbed run, trained first: a job beside it could end before its fault."""
    return undisturbed(make_home(tmp_path_factory.mktemp("undisturbed") / "home"))
