"""Weights & Biases: the summaries of metrics. If it fails, training goes on."""

import logging
import netrc
import os
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from megamoe.config.schema import WandbConfig
from megamoe.metrics import names
from megamoe.metrics.sinks.summaries import StepSummary
from megamoe.redaction import redact, redact_all, without_secrets

ID_FILE = "wandb_run_id.txt"
REPEATED_FILE = "wandb_repeated_steps.txt"
LIMITS: dict[str, Any] = {"init_timeout": 30.0, "login_timeout": 30.0, "finish_timeout": 60.0}  # seconds
PUBLIC_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")  # one service under an old and a new name

log = logging.getLogger(__name__)


class WandbSink:
    """One W&B run, with its files in `run_folder`.

    repeats: of a resumed run, the number of recorded steps that it computes again; None: a new run.
    """

    def __init__(
        self,
        run_folder: Path,
        config: WandbConfig,
        run_name: str,
        run_config: dict[str, Any],
        repeats: int | None,
    ) -> None:
        self._run: Any = None
        self._repeated = 0  # steps, by all launches of the run
        try:
            import wandb

            resumed = repeats is not None
            self._repeated = _sum_repeated(run_folder / REPEATED_FILE, repeats)
            mode: Any = choose_mode(config.mode)
            if config.mode == "online" and mode == "offline":
                log.warning(
                    "log.wandb.mode: 'online', but nobody is logged in; recording offline for `wandb sync`"
                )
            with without_secrets(kept=("WANDB_",)):  # its process records variables and arguments
                self._run = wandb.init(
                    id=_run_id(run_folder / ID_FILE, resumed),
                    resume="allow" if resumed and mode == "online" else None,
                    mode=mode,
                    dir=str(run_folder),
                    name=run_name,
                    project=config.project,
                    entity=config.entity,
                    group=config.group,
                    tags=config.tags,
                    config=redact_all(run_config),
                    settings=wandb.Settings(silent=True, console="off", **LIMITS),
                )
            self._run.define_metric(names.STEP)
            self._run.define_metric("*", step_metric=names.STEP)
        except Exception as error:
            self._give_up(error)

    def log(self, shown: StepSummary) -> None:
        if self._run is None:
            return
        try:
            self._run.log(_for_wandb(shown), step=shown.step + self._repeated, commit=True)
        except Exception as error:
            self._give_up(error)

    def close(self) -> None:
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._run = None
        name, said = type(error).__name__, redact(str(error)).partition("\n")[0]
        log.warning("W&B failed (%s: %s); the run goes on without it", name, said)


def choose_mode(wanted: str) -> str:
    """Return the mode: `online` only if W&B can work without a login prompt. WANDB_MODE decides `auto`."""
    from_environment = os.environ.get("WANDB_MODE")
    if wanted == "auto" and from_environment in ("offline", "disabled"):
        return from_environment
    return "online" if wanted != "offline" and has_login() else "offline"


def has_login() -> bool:
    """Return whether this machine has an API key for the W&B server in use."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "")).netloc or PUBLIC_HOSTS[0]
    hosts = PUBLIC_HOSTS if host in PUBLIC_HOSTS else (host,)
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        logins = [netrc.netrc(path).authenticators(host) for host in hosts]
    except (OSError, netrc.NetrcParseError):
        return False
    return any(login is not None and login[2] for login in logins)


def _run_id(path: Path, resumed: bool) -> str:
    if resumed and path.exists():
        return path.read_text(encoding="utf-8").strip()
    chosen = os.environ.get("WANDB_RUN_ID") if "WANDB_SWEEP_ID" in os.environ else None  # by a sweep's agent
    run_id = chosen or uuid.uuid4().hex[:8]
    path.write_text(run_id + "\n", encoding="utf-8")
    return run_id


def _sum_repeated(path: Path, repeats: int | None) -> int:
    """Return the steps that all launches of a run have repeated, and keep the number for the next one."""
    before = 0
    if repeats is not None and path.exists():
        text = path.read_text(encoding="utf-8").strip()
        before = int(text) if text.isdecimal() else 0
    path.write_text(f"{before + (repeats or 0)}\n", encoding="utf-8")
    return before + (repeats or 0)


def _for_wandb(shown: StepSummary) -> dict[str, Any]:
    """Return the step with W&B's own type for histograms."""
    import wandb

    logged: dict[str, Any] = {names.STEP: shown.step, **shown.scalars}
    for key, (counts, edges) in shown.histograms.items():
        logged[key] = wandb.Histogram(np_histogram=(np.asarray(counts), np.asarray(edges)))
    return logged
