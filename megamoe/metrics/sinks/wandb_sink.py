"""Weights & Biases: metrics; alerts on divergence, dead experts, stalls. If it fails, training goes on."""

import logging
import math
import netrc
import os
import statistics
import uuid
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from megamoe.config.schema import WandbConfig
from megamoe.metrics import names
from megamoe.metrics.sinks.summaries import StepSummary
from megamoe.redaction import redact, redact_all, without_secrets

WINDOW = 20  # logged steps, for the usual duration of a step
STALL = 5.0  # times that duration
DIVERGED = 1.5  # times the lowest loss


@dataclass(frozen=True)
class Alert:
    """title: its kind, by which W&B limits how often it is sent. text: what was found."""

    title: str
    text: str


class Alerts:
    """Judges the metrics of each logged step, in their order; each kind at most once until it has ended."""

    def __init__(self) -> None:
        self._lowest = math.inf
        self._dead = 0
        self._diverged = False
        self._seconds: deque[float] = deque(maxlen=WINDOW)

    def of(self, metrics: dict[str, Any]) -> list[Alert]:
        """Return the alerts that a step's metrics (by their names in metrics.jsonl) give rise to."""
        where = f"step {metrics[names.STEP]}: "
        found = (self._divergence(metrics), self._dead_experts(metrics), self._stall(metrics))
        return [Alert(alert.title, where + alert.text) for alert in found if alert is not None]

    def _divergence(self, metrics: dict[str, Any]) -> Alert | None:
        loss = metrics.get(names.LM_LOSS)
        if loss is None:
            return None
        before, self._diverged = self._diverged, not loss <= DIVERGED * self._lowest
        if math.isfinite(loss):
            self._lowest = min(self._lowest, loss)
        else:
            self._diverged = True
        text = f"{names.LM_LOSS} is {loss:.4g}, the lowest so far was {self._lowest:.4g}"
        return Alert("divergence", text) if self._diverged and not before else None

    def _dead_experts(self, metrics: dict[str, Any]) -> Alert | None:
        before, self._dead = self._dead, int(metrics.get(names.over_layers(names.DEAD), self._dead))
        if self._dead <= before:
            return None
        return Alert("dead experts", f"{self._dead} experts get no token, {before} before")

    def _stall(self, metrics: dict[str, Any]) -> Alert | None:
        seconds = metrics.get(names.STEP_S)
        if seconds is None:
            return None
        usual = statistics.median(self._seconds) if len(self._seconds) == WINDOW else math.inf
        self._seconds.append(seconds)
        if seconds <= STALL * usual:
            return None
        return Alert("stall", f"the step took {seconds:.3g} s, usual are {usual:.3g} s")


ID_FILE = "wandb_run_id.txt"
REPEATED_FILE = "wandb_repeated_steps.txt"
START_LIMIT_S = 30.0
FINISH_LIMIT_S = 60.0
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
        self._alerts = Alerts()
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
                    settings=wandb.Settings(
                        silent=True,
                        console="off",
                        init_timeout=START_LIMIT_S,
                        login_timeout=START_LIMIT_S,
                        finish_timeout=FINISH_LIMIT_S,
                    ),
                )
            self._run.define_metric(names.STEP)
            self._run.define_metric("*", step_metric=names.STEP)
        except Exception as error:
            self._give_up(error)

    def log(self, metrics: dict[str, Any], shown: StepSummary) -> None:
        if self._run is None:
            return
        try:
            self._run.log(_for_wandb(shown), step=shown.step + self._repeated, commit=True)
            for alert in self._alerts.of(metrics):
                self._run.alert(title=alert.title, text=alert.text)
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
    """Return the step with W&B's own types for histograms and pictures."""
    import wandb

    logged: dict[str, Any] = {names.STEP: shown.step, **shown.scalars}
    for key, (counts, edges) in shown.histograms.items():
        logged[key] = wandb.Histogram(np_histogram=(np.asarray(counts), np.asarray(edges)))
    for key, picture in shown.images.items():
        logged[key] = wandb.Image(picture)
    return logged
