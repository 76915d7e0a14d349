"""The W&B workspace and the report that compares runs, as code, with the package wandb-workspaces.

Their panels show the names that `sinks/summaries.py` sends, see docs/metrics.md.
"""

from dataclasses import dataclass, field
from typing import Any

from megamoe.errors import UserError

Tree = dict[str, Any]
FIVE = ("min", "p25", "median", "p75", "max")
HEAT_MAPS = [f"load/heat_map_{number}" for number in (1, 2, 3, 4)]


@dataclass(frozen=True)
class Chart:
    """A line chart over the steps. names: metrics; pattern: or a regular expression of their names."""

    title: str
    unit: str
    names: list[str] = field(default_factory=list)
    pattern: str | None = None
    log: bool = False


def _over_layers(name: str, title: str, unit: str) -> Chart:
    return Chart(f"{title}, over layers", unit, [f"layers/{name}/{quantile}" for quantile in FIVE])


SECTIONS: dict[str, list[Chart]] = {
    "loss": [
        Chart("cross entropy", "nats", ["train/lm_loss"]),
        Chart("with auxiliary losses", "nats", ["train/loss"]),
        Chart("auxiliary losses, weighted", "nats", pattern="^train/.+/weighted$"),
        Chart("share of the scores' gradient", "1", pattern="^layers/gradient_share/.+/median$"),
        Chart("learning rate", "1", ["train/lr"]),
    ],
    "load": [
        Chart("load / mean, all experts", "1", [f"load/{quantile}" for quantile in FIVE]),
        Chart("MaxVio of the step and of the run", "1", ["moe/max_vio", "moe/max_vio_run"]),
        _over_layers("imbalance", "imbalance, max / mean", "1"),
        _over_layers("load_cv", "coefficient of variation", "1"),
        Chart("most loaded experts / mean", "1", [f"load/most_{rank}" for rank in (1, 2, 3)]),
        Chart("least loaded experts / mean", "1", [f"load/least_{rank}" for rank in (1, 2, 3)]),
        Chart("imbalance over expert-parallel ranks", "1", ["moe/rank_imbalance"]),
        Chart("overload of ranks, share of pairs", "1", ["moe/rank_overload"]),
    ],
    "routing": [
        _over_layers("gate_entropy", "gate entropy", "nats"),
        _over_layers("top1_prob", "top-1 probability", "1"),
        _over_layers("experts_per_token", "experts per token", "experts"),
        Chart("dropped pairs", "1", ["moe/dropped"]),
        Chart("parts' own numbers", "1", pattern="^layers/(scorer|score_function)/.+/median$"),
    ],
    "speed": [
        Chart("tokens per second", "tokens/s", ["perf/tokens_per_s"]),
        Chart("duration of a step", "s", ["perf/step_s"]),
        Chart("model FLOPs of a rank", "TFLOP/s", ["perf/tflops_per_rank"]),
        Chart("model FLOP utilisation", "1", ["perf/mfu"]),
        Chart(
            "stages of the MoE layers",
            "s",
            [f"perf/{stage}_s" for stage in ("route", "dispatch", "experts", "combine")],
        ),
    ],
    "health": [
        Chart("gradient norm", "1", ["train/grad_norm"], log=True),
        Chart("dead experts", "experts", ["moe/dead"]),
        Chart("skipped steps", "steps", ["train/skipped_steps"]),
        Chart("loss scale", "1", ["train/loss_scale"], log=True),
    ],
    "evaluation": [
        Chart("validation loss", "nats", pattern="^val/.*lm_loss$"),
        Chart("test loss", "nats", ["test/lm_loss"]),
    ],
}
OPEN_SECTIONS = 2  # the first ones
COMPARED = ("loss", "load", "speed", "evaluation")  # sections of the report that compares runs
GROUPS = ("study", "layout", "seed")  # keys of a run's configuration in W&B


class Dashboard:
    """The workspace of a project, and a report that compares runs of it.

    group_by: which of GROUPS the runs are grouped by, in this order.

    Raises:
        UserError: if the package wandb-workspaces is missing.
    """

    def __init__(self, project: str, entity: str, group_by: list[str]) -> None:
        try:
            import wandb_workspaces.reports.v2 as reports
            import wandb_workspaces.workspaces as workspaces
        except ImportError as error:
            raise UserError(
                f"the package wandb-workspaces is missing ({error}); run `pip install 'megamoe[wandb]'`"
            ) from error
        self._reports, self._workspaces = reports, workspaces
        self._project, self._entity, self._group_by = project, entity, group_by

    def workspace(self) -> Any:
        """Return the workspace: a section for each of SECTIONS."""
        ws = self._workspaces
        return ws.Workspace(
            entity=self._entity,
            project=self._project,
            name="MoE training",
            sections=[
                ws.Section(name=name, panels=self._panels(name), is_open=place < OPEN_SECTIONS)
                for place, name in enumerate(SECTIONS)
            ],
            settings=ws.WorkspaceSettings(x_axis="step"),
            runset_settings=ws.RunsetSettings(groupby=[ws.Config(key) for key in self._group_by]),
        )

    def report(self, runs: list[str]) -> Any:
        """Return the report that sets these runs, by their names, beside each other."""
        wr = self._reports
        shown = wr.Runset(
            entity=self._entity, project=self._project, filters=[self._workspaces.Metric("Name").isin(runs)]
        )
        blocks = [wr.P(f"Runs: {', '.join(runs)}."), wr.H2("What differs")]
        blocks.append(wr.PanelGrid(runsets=[shown], panels=[wr.RunComparer(diff_only="split")]))
        for name in COMPARED:
            blocks += [wr.H2(name.capitalize()), wr.PanelGrid(runsets=[shown], panels=self._panels(name))]
        title = f"MoE runs: {', '.join(runs)}"
        return wr.Report(project=self._project, entity=self._entity, title=title, blocks=blocks)

    def _panels(self, section: str) -> list[Any]:
        wr = self._reports
        panels = [
            wr.LinePlot(
                title=chart.title,
                x="step",
                y=chart.names,
                metric_regex=chart.pattern,
                title_x="step",
                title_y=f"{chart.title} [{chart.unit}]",
                log_y=chart.log or None,
            )
            for chart in SECTIONS[section]
        ]
        if section == "load":
            panels.append(wr.MediaBrowser(title="load, expert x step", media_keys=HEAT_MAPS))
        return panels


def own_entity() -> str:
    """Return the W&B user or team to which the login sends by default. It asks the server.

    Raises:
        UserError: if W&B does not answer.
    """
    try:
        import wandb

        entity: str | None = wandb.Api().default_entity
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"W&B does not say who is logged in ({type(error).__name__}: {first_line})"
        ) from error
    if not entity:
        raise UserError("W&B has no default entity for this login; name a user or team with --entity")
    return entity


def spec_of(made: Any) -> Tree:
    """Return a workspace or report as plain data: its public fields that are set, without random ids."""
    from pydantic import TypeAdapter

    spec: Tree = _set_fields(TypeAdapter(type(made)).dump_python(made, mode="json"))
    return spec


def _set_fields(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _set_fields(item)
            for key, item in value.items()
            if not key.startswith("_") and key != "id" and item not in (None, [], {}, "", [None, None])
        }
    return [_set_fields(item) for item in value] if isinstance(value, list) else value
