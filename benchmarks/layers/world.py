"""The process groups of one rank that DeepSpeed's and Megatron-Core's layers ask for."""

import functools
import os


@functools.cache
def start_one_rank() -> None:
    """Start them, once per process; the environment stays as it was."""
    from megamoe.parallel import launch
    from megamoe.parallel.layout import Layout
    from megamoe.parallel.process_groups import start_groups

    variables = dict(os.environ)
    launch.start(launch.find_world(), timeout_minutes=1)
    start_groups(Layout(1), timeout_minutes=1)
    os.environ.clear()
    os.environ.update(variables)
