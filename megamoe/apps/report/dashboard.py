"""The W&B workspace and the report that compares runs, as code, with the package wandb-workspaces.

Their panels show the names that `sinks/summaries.py` sends, see docs/metrics.md.
"""

from dataclasses import dataclass
from typing import Any

from megamoe.errors import UserError
from megamoe.metrics import names
from megamoe.metrics.names import MAX_VIO, MAX_VIO_RUN, fill, over_layers
from megamoe.metrics.sinks.summaries import FIVE, PICTURES

Tree = dict[str, Any]
HEAT_MAPS = [fill(names.HEAT_MAP, number) for number in range(1, PICTURES + 1)]
OF_PARTS = ("scorer/<number>", "score_function/<number>")


@dataclass(frozen=True)
class Chart:
    """A line chart over the steps. keys: of metrics with one unit, or patterns of keys."""

    title: str
    keys: list[str]
    log: bool = False

    @property
    def pattern(self) -> str | None:
        """A regular expression of the keys, if some are patterns."""
        if not any(names.WORD.search(key) for key in self.keys):
            return None
        return f"^({'|'.join(names.WORD.sub('.+', key) for key in self.keys)})$"


def _over_layers(name: str, title: str) -> Chart:
    return Chart(f"{title}, over layers", [fill(names.OVER_LAYERS, name, it) for it in FIVE])


SECTIONS: dict[str, list[Chart]] = {
    "loss": [
        Chart("cross entropy", [names.LM_LOSS]),
        Chart("with auxiliary losses", [names.LOSS]),
        Chart("auxiliary losses, weighted", [names.WEIGHTED_LOSS]),
        Chart("share of the scores' gradient", [fill(names.OVER_LAYERS, names.GRADIENT_SHARE, "median")]),
        Chart("learning rate", [names.LR]),
    ],
    "load": [
        Chart("load / mean, all experts", [fill(names.LOAD_QUANTILE, it) for it in FIVE]),
        Chart("MaxVio of the step and of the run", [over_layers(it) for it in (MAX_VIO, MAX_VIO_RUN)]),
        _over_layers(names.IMBALANCE, "imbalance, max / mean"),
        _over_layers(names.LOAD_CV, "coefficient of variation"),
        Chart("most loaded experts / mean", [fill(names.EXTREME, "most", rank) for rank in (1, 2, 3)]),
        Chart("least loaded experts / mean", [fill(names.EXTREME, "least", rank) for rank in (1, 2, 3)]),
        Chart("imbalance over expert-parallel ranks", [over_layers(names.RANK_IMBALANCE)]),
        Chart("overload of ranks, share of pairs", [over_layers(names.RANK_OVERLOAD)]),
    ],
    "routing": [
        _over_layers(names.GATE_ENTROPY, "gate entropy"),
        _over_layers(names.TOP1_PROB, "top-1 probability"),
        _over_layers(names.EXPERTS_PER_TOKEN, "experts per token"),
        Chart("dropped pairs", [over_layers(names.DROPPED)]),
        Chart("parts' own numbers", [fill(names.OVER_LAYERS, it, "median") for it in OF_PARTS]),
    ],
    "speed": [
        Chart("tokens per second", [names.TOKENS_PER_S]),
        Chart("duration of a step", [names.STEP_S]),
        Chart("model FLOPs of a rank", [names.TFLOPS_PER_RANK]),
        Chart("model FLOP utilisation", [names.MFU]),
        Chart("stages of the MoE layers", list(names.STAGES.values())),
    ],
    "health": [
        Chart("gradient norm", [names.GRAD_NORM], log=True),
        Chart("dead experts", [over_layers(names.DEAD)]),
        Chart("skipped steps", [names.SKIPPED_STEPS]),
        Chart("loss scale", [names.LOSS_SCALE], log=True),
    ],
    "evaluation": [
        Chart("validation loss", [names.VAL_LM_LOSS, names.SET_LM_LOSS]),
        Chart("test loss", [names.TEST_LM_LOSS]),
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
            settings=ws.WorkspaceSettings(x_axis=names.STEP),
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
                x=names.STEP,
                y=[] if chart.pattern else chart.keys,
                metric_regex=chart.pattern,
                title_x=names.STEP,
                title_y=f"{chart.title} [{names.unit_of(chart.keys[0])}]",
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
