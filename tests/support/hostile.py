"""A malicious checkpoint must be refused in one line."""

from pathlib import Path

import pytest

from megamoe.apps.checkpoints import verify
from megamoe.apps.checkpoints.describe import integrity_of
from megamoe.checkpoint.format import files
from megamoe.checkpoint.format.reader import CheckpointReader
from megamoe.errors import UserError

SHARD = "shard_00000.safetensors"


def read_all(folder: Path) -> None:
    """Read everything that loading reads, without a model."""
    for problem in files.problems(folder):
        raise UserError(problem)
    with CheckpointReader(folder) as reader:
        for name in reader.names():
            reader.tensor(name)


def assert_refused(folder: Path) -> str:
    """Check that verify and loading refuse it; return verify's message."""
    message = list(verify.problems(folder))
    assert message
    with pytest.raises(UserError) as refusal:
        read_all(folder)
    for line in (*message, str(refusal.value), integrity_of(folder)):
        assert line.isprintable() and len(line) < 1000, line
    return message[0]
