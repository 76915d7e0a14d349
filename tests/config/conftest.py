"""A run's YAML."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megamoe.config import RunConfig, load_config


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., RunConfig]:
    """YAML text and overrides -> the configuration, through a file run.yaml."""

    def load_text(text: str, *overrides: str) -> RunConfig:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return load_config(path, list(overrides))

    return load_text
