"""A process in which nobody is logged in to W&B."""

from pathlib import Path

import pytest


@pytest.fixture
def nobody_is_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the place of the netrc file, which does not exist."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "netrc"
