"""What the tests of several rooms share: quiet vendors, a world of one rank."""

import os
import signal
from collections.abc import Iterator

import pytest

from megamoe.vendors import settle_vendors

settle_vendors()


@pytest.fixture
def restored_process() -> Iterator[None]:
    """Put back what a run leaves in its process: environment variables and signal handlers."""
    variables = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    os.environ.clear()
    os.environ.update(variables)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Process groups and Megatron-Core's state for this process alone."""
    from megamoe.parallel import launch

    variables = dict(os.environ)
    launch.start(launch.find_world(), timeout_minutes=1)
    yield
    launch.stop()
    os.environ.clear()
    os.environ.update(variables)
