"""A study's YAML: the rows that are compared, what is measured of each, and the claims.

    title: Threshold routing against top-k
    source: Yang et al. 2024 (XMoE), table 1
    rows:
      switch: {base: ../papers/xmoe_323m_switch_small.yaml, published: {perplexity: 14.6}}
      xmoe: {base: ../papers/xmoe_323m_64_small.yaml}
    measures:
      perplexity: {metric: test/lm_loss, exponential: true}
    claims:
      - {text: XMoE has the lower perplexity, test: perplexity(xmoe) < perplexity(switch)}
    sizes:
      smoke: {seeds: [1], time: a minute, set: {train: {steps: 4}}}
      cpu: {seeds: [1, 2, 3], time: an hour on two cores}

A row's configuration is its base, under `set` of the study, of the size and of the row, in this order. A
study may build on others by `base`, as a run's YAML does.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from megamoe.apps.lab.claims import Claim, parse_claim
from megamoe.config.files import merge, plugins_beside, read_run
from megamoe.config.load import apply_override, to_dict
from megamoe.config.messages import first_problem
from megamoe.config.parts import STRICT
from megamoe.config.schema import RunConfig
from megamoe.config.values import PathText, PositiveInt, Seed
from megamoe.errors import UserError, printable
from megamoe.metrics.names import VAL_LM_LOSS
from megamoe.registry import nearest

NAME = re.compile(r"[a-z][a-z0-9_]{0,60}")
STAGES = ("evaluate", "finetune", "translate", "analyze")
ENDS = ("first", "last")  # what may be taken of windows
TASK_PREFIX = "task."  # of overrides that change the fine-tuning


def _is_name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise ValueError(f"{text!r} has other characters than a-z, 0-9 and _, or does not begin with a-z")
    return text


Name = Annotated[str, AfterValidator(_is_name)]
Settings = dict[str, Any]


@dataclass
class Row:
    """One configuration that is compared."""

    __pydantic_config__ = STRICT
    base: PathText | list[PathText] = field(default_factory=list)  # YAML of runs, relative to the study
    set: Settings = field(default_factory=dict)  # keys of the run over the bases
    finetune: Settings = field(default_factory=dict)  # keys of the task, for this row alone
    published: dict[Name, float] = field(default_factory=dict)  # the paper's number of a measure
    paper: dict[str, float] = field(default_factory=dict)  # its numbers of what is not measured here
    text: str = ""  # what the row is, for the table


@dataclass
class Finetune:
    """tools/finetune.py on each trained model. task: the YAML, relative to the study; set: keys over it, such
    as `run.log.every`. Its seed is that of the pretraining, unless `set` has `seeds`.
    """

    __pydantic_config__ = STRICT
    task: PathText
    set: Settings = field(default_factory=dict)


@dataclass
class Translate:
    """tools/translate.py --score on each trained model, of the pairs' test split."""

    __pydantic_config__ = STRICT
    source: str
    target: str
    samples: PositiveInt | None = None
    beams: PositiveInt = 1


@dataclass
class Analyze:
    """tools/analyze_routing.py. of: the last checkpoint, all of a run, or the last ones of all seeds of a
    row."""

    __pydantic_config__ = STRICT
    analyses: list[str]
    of: Literal["last", "all", "seeds"] = "last"
    samples: PositiveInt | None = None


@dataclass
class Evaluate:
    """tools/evaluate.py on each trained model. sweep: values by key of the configuration, all
    combinations."""

    __pydantic_config__ = STRICT
    sweep: dict[str, list[Any]] = field(default_factory=dict)
    samples: PositiveInt | None = None


@dataclass
class Stage:
    """What is done with each trained model: one of the four. rows: of these rows; default: of all."""

    __pydantic_config__ = STRICT
    rows: list[Name] | None = None
    finetune: Finetune | None = None
    translate: Translate | None = None
    analyze: Analyze | None = None
    evaluate: Evaluate | None = None

    @property
    def kind(self) -> str:
        """The name of the one that is given."""
        return next(name for name in STAGES if getattr(self, name) is not None)


@dataclass
class Measure:
    """A number of each row and seed.

    metric: a key of metrics.jsonl. take: which of the run's values; `spikes` counts those far above the ones
    before (`measures.spikes`), `rise` is the last minus the lowest. fact: instead, a number about the run,
    see `measures.FACTS`. stage, path: instead, a number in the JSON of a stage, of several stages the first
    that is done with the row: keys and indices with slashes, * for the mean over all without those in
    `without`. stage, metric: of the runs of a stage that fine-tunes, the mean. stage, consistency: the
    inter-run consistency of these runs, of the loads of so many steps (`measures.consistency`).
    exponential: of a loss: the perplexity. text: what it is, with its unit.
    """

    __pydantic_config__ = STRICT
    metric: str | None = None
    take: Literal["first", "last", "lowest", "highest", "mean", "rise", "spikes"] = "last"
    fact: Literal["flops_per_token", "training_flops", "memory", "parameters", "active_parameters"] | None = (
        None
    )
    stage: Name | list[Name] | None = None
    path: str | None = None
    consistency: PositiveInt | None = None
    without: list[str] = field(default_factory=list)
    exponential: bool = False
    scale: float = 1.0
    digits: Annotated[int, Field(ge=0, le=8)] = 3
    text: str = ""

    @property
    def stages(self) -> list[str]:
        """The stages that may have it, in order."""
        return [self.stage] if isinstance(self.stage, str) else self.stage or []


@dataclass
class Curve:
    """A picture of a metric over the steps, a line for each row: the mean over the seeds. stage, consistency:
    instead, of each window of the fine-tunings, as a measure's.
    """

    __pydantic_config__ = STRICT
    metric: str | None = None
    stage: Name | None = None
    consistency: PositiveInt | None = None
    text: str = ""


@dataclass
class Tuning:
    """One rule for all rows: each is trained with every value, and takes the one with the lowest `by`.

    key: of the configuration. by: a metric of validation data that the study does not report. seed: of these
    runs. set: keys over the size's. A study with `tuned_rows` trains these alone, and all rows take the value
    with the lowest mean over them.
    """

    __pydantic_config__ = STRICT
    key: str
    values: Annotated[list[Any], Field(min_length=2)]
    by: str = VAL_LM_LOSS
    seed: Seed = 0
    set: Settings = field(default_factory=dict)


@dataclass
class Size:
    """How large the study's runs are. time: what it takes, as text. scale: factors by key, such as
    `moe.expert_ffn_hidden_size`, of the numbers that rows have there. samples: of every stage, instead of its
    own. ranks: of each run, by torchrun.
    """

    __pydantic_config__ = STRICT
    seeds: Annotated[list[Seed], Field(min_length=1)]
    time: str
    set: Settings = field(default_factory=dict)
    scale: dict[str, PositiveInt] = field(default_factory=dict)
    finetune: Settings = field(default_factory=dict)
    rows: list[Name] | None = None  # of the study's; default: all
    samples: PositiveInt | None = None
    tuning: Tuning | None = None
    ranks: PositiveInt = 1


@dataclass
class Study:
    """A study of one size, see the module."""

    __pydantic_config__ = STRICT
    title: str
    rows: Annotated[dict[Name, Row], Field(min_length=1)]
    measures: Annotated[dict[Name, Measure], Field(min_length=1)]
    sizes: dict[Literal["smoke", "cpu", "gpu"], Size]
    source: str = ""  # where the claims are from
    question: str = ""
    differs: str = ""  # what is another scale than the paper's
    needs: str = ""  # the command that prepares the data
    set: Settings = field(default_factory=dict)
    tuned_rows: Annotated[list[Name], Field(min_length=1)] | None = None  # see `Tuning`
    stages: dict[Name, Stage] = field(default_factory=dict)
    curves: dict[Name, Curve] = field(default_factory=dict)
    claims: list["ClaimText"] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)  # below the claims, a paragraph each
    control: Name | None = None  # the row from which the differences of the others are shown
    compare: list[Name] = field(default_factory=list)  # in these measures; default: in the first

    @property
    def compared(self) -> list[str]:
        """The measures in which the rows are compared with the control."""
        return [] if self.control is None else self.compare or [*self.measures][:1]


@dataclass
class ClaimText:
    """A claim of the paper. place: where it stands there. test: see `claims.py`."""

    __pydantic_config__ = STRICT
    text: str
    test: str
    place: str = ""


@dataclass(frozen=True)
class Plan:
    """A study at one size, checked: what the lab runs.

    configs: each row's configuration as a tree, without seed and name. all_configs: the same of all rows that
    the size has, those that `--rows` leaves out too. tuning_configs: of the rows that are trained for the
    tuning. task_overrides: `task.key=value` of the user.
    """

    name: str
    path: Path
    study: Study
    size_name: str
    size: Size
    configs: dict[str, dict[str, Any]]
    all_configs: dict[str, dict[str, Any]]
    tuning_configs: dict[str, dict[str, Any]]
    claims: list[tuple[ClaimText, Claim]]
    task_overrides: list[str]

    @property
    def seeds(self) -> list[int]:
        """The seeds, the same for every row."""
        return self.size.seeds


_STUDY = TypeAdapter(Study)


def load_study(path: Path) -> Study:
    """Read a study's YAML with its bases.

    Raises:
        UserError: for a file that cannot be read, an unknown key, or a value that does not fit.
    """
    try:
        study: Study = _STUDY.validate_json(json.dumps(read_run(path, "STUDY"), default=str))
    except ValidationError as error:
        raise UserError(f"{path}: {first_problem(error, Study)}") from None
    return study


def load_plan(
    path: Path, size: str, seeds: int | None, overrides: list[str], rows: list[str] | None = None
) -> Plan:
    """Read a study's YAML and work out every row's configuration at a size.

    seeds: take 1 to this number instead of the size's. rows: take these instead of the size's. overrides:
    `section.key=value` of every run, and `task.key=value` of the fine-tuning.

    Raises:
        UserError: for a file that cannot be read, an unknown key, row, measure or stage, or a claim that
            cannot be read.
    """
    study = load_study(path)
    if size not in study.sizes:
        raise UserError(f"--size: {path} has no size {size}; expected {', '.join(study.sizes)}")
    chosen = study.sizes[size]
    if seeds is not None:
        chosen = replace(chosen, seeds=list(range(1, seeds + 1)))
    try:
        of_size = _rows(study, chosen)
        if rows is not None:
            chosen = replace(chosen, rows=rows)
        of_call = _rows(study, chosen)
        claims = _checked(study, of_call)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    of_task = [each for each in overrides if each.startswith(TASK_PREFIX)]
    of_run = [each for each in overrides if not each.startswith(TASK_PREFIX)]
    if of_task and not any(stage.finetune for stage in study.stages.values()):
        raise UserError(f"{of_task[0]}: the study has no stage `finetune`; leave it out")

    def config_of(name: str) -> dict[str, Any]:
        return _config(path.parent, study, chosen, study.rows[name], of_run)

    all_configs = {}
    for name in {**of_size, **of_call}:
        with nullcontext() if name in of_call else suppress(UserError):  # of a row that is not run
            all_configs[name] = config_of(name)
    _check_scale(path, size, chosen, all_configs)
    configs = {name: all_configs[name] for name in of_call}
    tuned = study.tuned_rows
    tuning_configs = configs if tuned is None else {name: config_of(name) for name in tuned}
    return Plan(path.stem, path, study, size, chosen, configs, all_configs, tuning_configs, claims, of_task)


def _rows(study: Study, size: Size) -> dict[str, Row]:
    if size.rows is None:
        return dict(study.rows)
    for name in size.rows:
        if name not in study.rows:
            raise ValueError(f"rows: found {name!r}, expected some of {', '.join(study.rows)}")
    return {name: row for name, row in study.rows.items() if name in size.rows}


def _checked(study: Study, rows: dict[str, Row]) -> list[tuple[ClaimText, Claim]]:
    """Check what the study's keys say of each other; return the claims whose rows are all of this size."""
    _check_stages(study)
    _check_measures(study)
    _check_curves(study)
    _check_control(study)
    for name in study.tuned_rows or []:
        if name not in study.rows:
            raise ValueError(f"tuned_rows: no row {name!r}; expected some of {', '.join(study.rows)}")
    for name, row in study.rows.items():
        for measured in row.published:
            if measured not in study.measures:
                raise ValueError(f"rows.{name}.published: {measured!r} is no measure of the study")
    found = []
    for number, text in enumerate(study.claims):
        claim = parse_claim(text.test, f"claims[{number}].test")
        for measured, row_name in claim.operands():
            if measured not in study.measures:
                known = ", ".join(study.measures)
                raise ValueError(f"claims[{number}].test: no measure {measured!r}; expected {known}")
            if row_name not in study.rows:
                known = ", ".join(study.rows)
                raise ValueError(f"claims[{number}].test: no row {row_name!r}; expected {known}")
        if all(row_name in rows for _, row_name in claim.operands()):
            found.append((text, claim))
    return found


def _check_stages(study: Study) -> None:
    for name, stage in study.stages.items():
        given = [kind for kind in STAGES if getattr(stage, kind) is not None]
        if len(given) != 1:
            raise ValueError(
                f"stages.{name}: found {given or 'nothing'}, expected one of {', '.join(STAGES)}"
            )
        for row in stage.rows or []:
            if row not in study.rows:
                raise ValueError(f"stages.{name}.rows: no row {row!r}; expected {', '.join(study.rows)}")


def _check_measures(study: Study) -> None:
    for name, measure in study.measures.items():
        of_run = measure.metric is not None and measure.stage is None
        if of_run + (measure.fact is not None) + (measure.stage is not None) != 1:
            raise ValueError(f"measures.{name}: expected one of metric, fact, and stage with path or metric")
        for stage in measure.stages:
            if stage not in study.stages:
                known = ", ".join(study.stages) or "none"
                raise ValueError(f"measures.{name}: stage {stage!r} is not among the stages: {known}")
            of_seeds = measure.metric is not None or measure.consistency is not None
            if of_seeds and study.stages[stage].finetune is None:
                raise ValueError(f"measures.{name}: stage {stage!r} does not fine-tune, so it has no metric")
        given = (measure.path, measure.metric, measure.consistency)
        if measure.stage is not None and given.count(None) != 2:
            raise ValueError(f"measures.{name}: a stage needs one of path, metric, and consistency")
        if measure.consistency is not None and (measure.stage is None or measure.take not in ENDS):
            raise ValueError(f"measures.{name}: consistency needs a stage, and take: {' or '.join(ENDS)}")


def _check_curves(study: Study) -> None:
    for name, curve in study.curves.items():
        of_run = curve.metric is not None and curve.stage is None and curve.consistency is None
        stage = study.stages.get(curve.stage or "")
        of_stage = curve.metric is None and curve.consistency is not None and stage is not None
        if not of_run and not (of_stage and stage is not None and stage.finetune is not None):
            raise ValueError(f"curves.{name}: expected metric, or consistency and a stage that fine-tunes")


def _check_control(study: Study) -> None:
    if study.control is not None and study.control not in study.rows:
        raise ValueError(f"control: no row {study.control!r}; expected one of {', '.join(study.rows)}")
    if study.compare and study.control is None:
        raise ValueError("compare: needs control, the row from which the differences are; or leave it out")
    for name in study.compare:
        if name not in study.measures:
            raise ValueError(f"compare: no measure {name!r}; expected some of {', '.join(study.measures)}")
    if len(set(study.compare)) < len(study.compare):
        raise ValueError(f"compare: found {study.compare}, expected each once")


def _config(folder: Path, study: Study, size: Size, row: Row, overrides: list[str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for base in [row.base] if isinstance(row.base, str) else row.base:
        tree = merge(tree, read_run(folder / base, "STUDY: base"))
    for settings in (study.set, size.set, row.set):
        tree = merge(tree, plugins_beside(folder, settings))
    for key, factor in size.scale.items():
        if _is_number(found := _at(tree, key)):
            apply_override(tree, f"{key}={factor * found}")
    for override in overrides:
        apply_override(tree, override)
    return tree


def _at(tree: Any, key: str) -> Any:
    """Return what a tree has at a dotted key; None if it has nothing there."""
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_scale(path: Path, size: str, chosen: Size, configs: dict[str, dict[str, Any]]) -> None:
    """Refuse a key of `scale` that is neither of the configuration nor of a row, or is no number there.

    A row may lack it: the rows of dense models have no experts.
    """
    for key in chosen.scale:
        found = {row: value for row, tree in configs.items() if (value := _at(tree, key)) is not None}
        where = f"{path}: sizes.{size}.scale"
        for row, value in found.items():
            if not _is_number(value):
                raise UserError(f"{where}: {key} of row {row} is {printable(value, 60)}, expected a number")
        known = [*_keys(to_dict(RunConfig()))]
        if not found and key not in known:
            raise UserError(f"{where}: unknown key {key!r}{nearest(key, known)}")


def _keys(tree: dict[str, Any], before: str = "") -> Iterator[str]:
    """Yield the dotted keys of a tree."""
    for name, value in tree.items():
        yield f"{before}{name}"
        if isinstance(value, dict):
            yield from _keys(value, f"{before}{name}.")


def digest(*content: Any) -> str:
    """Return a digest of plain data."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]
