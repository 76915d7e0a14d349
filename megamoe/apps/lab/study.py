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

A study may build on others by `base`, as a run's YAML does. `plan.py` makes each row's configuration.
"""

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from megamoe.apps.lab.claims import Claim, parse_claim
from megamoe.apps.lab.verdicts import ALPHA, levels_of
from megamoe.config.files import read_run
from megamoe.config.messages import problems_of
from megamoe.config.parts import STRICT
from megamoe.config.values import PathText, PositiveFloat, PositiveInt, Seed
from megamoe.errors import UserError
from megamoe.metrics.names import VAL_LM_LOSS

NAME = re.compile(r"[a-z][a-z0-9_]{0,60}")
STAGES = ("evaluate", "finetune", "translate", "analyze")
OF_LAB = {  # keys of a run that the lab sets, and what takes their place
    "name": "a run has the name of its row",
    "output": "name a folder with --output",
    "seed": "sizes has seeds",
}
NOT_EVALUATED = (*OF_LAB, "checkpoint", "log", "optimizer")  # sections that an evaluation does not read
ENDS = (None, "first", "last")  # what may be taken of windows


def _is_name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise ValueError(f"{text!r} has other characters than a-z, 0-9 and _, or does not begin with a-z")
    return text


def _each_once(values: list[Any]) -> list[Any]:
    if any(value in values[:place] for place, value in enumerate(values)):
        raise ValueError(f"found {values}, expected each once")
    return values


Name = Annotated[str, AfterValidator(_is_name)]
Item = TypeVar("Item")
Distinct = Annotated[list[Item], Field(min_length=1), AfterValidator(_each_once)]
Settings = dict[str, Any]
# In the unit of a measure, or as "2 %" of a value.
Bound = PositiveFloat | Annotated[str, Field(pattern=r"^\d{1,3}(\.\d{1,6})? ?%$")]


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
    """tools/analyze_routing.py. of: the last checkpoint, or all of a run."""

    __pydantic_config__ = STRICT
    analyses: Distinct[str]
    of: Literal["last", "all"] = "last"
    samples: PositiveInt | None = None


@dataclass
class Evaluate:
    """tools/evaluate.py on each trained model. sweep: values by key of the configuration, all
    combinations."""

    __pydantic_config__ = STRICT
    sweep: dict[str, Distinct[Any]] = field(default_factory=dict)
    samples: PositiveInt | None = None


@dataclass
class Stage:
    """What is done with each trained model: one of the four. rows: of these rows; default: of all. alone: no
    other process of the lab runs beside it, so that its wall time can be compared.
    """

    __pydantic_config__ = STRICT
    rows: Distinct[Name] | None = None
    alone: bool = False
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

    metric: a key of metrics.jsonl. take: which of the run's values (default: last); `spikes` counts those far
    above the ones before (`measures.spikes`), `rise` is the last minus the lowest. until: instead, the steps
    until the metric is as low as at the end of this row's run of the same seed; the last step if it never is.
    fact: instead, a number about the run, see `measures.FACTS`. stage, path: instead, a number in the JSON of
    a stage, of several stages the first that is done with the row: keys, indices and slices (0:4) with
    slashes, * for all without those in `without`; `take` (default: mean) is of the numbers there. stage,
    metric: of the runs of a stage that fine-tunes, the mean. stage, consistency: the inter-run consistency of
    these runs, of the loads of so many steps (`measures.consistency`).
    exponential: of a loss: the perplexity. text: what it is, with its unit.
    """

    __pydantic_config__ = STRICT
    metric: str | None = None
    take: Literal["first", "last", "lowest", "highest", "mean", "rise", "spikes"] | None = None
    until: Name | None = None
    fact: Literal["flops_per_token", "training_flops", "memory", "parameters", "active_parameters"] | None = (
        None
    )
    stage: Name | Distinct[Name] | None = None
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
    """A picture of a metric over the tokens, a line for each row: the mean over the seeds. crossing: a row;
    the page says from where on each other one stays below it. stage, consistency: instead, over the steps, of
    each window of the fine-tunings, as a measure's.
    """

    __pydantic_config__ = STRICT
    metric: str | None = None
    stage: Name | None = None
    consistency: PositiveInt | None = None
    crossing: Name | None = None
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
    values: Annotated[Distinct[Any], Field(min_length=2)]
    by: str = VAL_LM_LOSS
    seed: Seed = 0
    set: Settings = field(default_factory=dict)


@dataclass
class Size:
    """How large the study's runs are. time: what it takes, as text. scale: factors by key, such as
    `moe.expert_ffn_hidden_size`, of the numbers that rows have there. samples: of every stage, instead of its
    own. ranks: of each run, by torchrun. looks: the numbers of seeds, the last one of all, after which the
    claims are judged; no seed more is run once all are decided.
    """

    __pydantic_config__ = STRICT
    seeds: Distinct[Seed]
    time: str
    set: Settings = field(default_factory=dict)
    scale: dict[str, PositiveInt] = field(default_factory=dict)
    finetune: Settings = field(default_factory=dict)
    rows: Distinct[Name] | None = None  # of the study's; default: all
    samples: PositiveInt | None = None
    tuning: Tuning | None = None
    ranks: PositiveInt = 1
    looks: Distinct[PositiveInt] | None = None

    @property
    def alpha(self) -> float:
        """The error of a claim that is judged by these seeds: with several looks, this one's part of it."""
        return ALPHA if self.looks is None else levels_of(self.looks)[len(self.seeds)]


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
    tuned_rows: Distinct[Name] | None = None  # see `Tuning`
    stages: dict[Name, Stage] = field(default_factory=dict)
    curves: dict[Name, Curve] = field(default_factory=dict)
    claims: list["ClaimText"] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)  # below the claims, a paragraph each
    control: Name | None = None  # the row from which the differences of the others are shown
    compare: Distinct[Name] | None = None  # in these measures; default: in the first
    bounds: dict[Name, Bound] = field(default_factory=dict)  # see `claims.beyond`

    @property
    def compared(self) -> list[str]:
        """The measures in which the rows are compared with the control."""
        return [] if self.control is None else self.compare or [*self.measures][:1]


@dataclass
class ClaimText:
    """A claim of the paper. place: where it stands there. test: see `claims.py`. difference: the least one of
    interest, for which seeds are planned. margin: below it a difference counts as none.
    """

    __pydantic_config__ = STRICT
    text: str
    test: str
    place: str = ""
    difference: Bound | None = None
    margin: Bound | None = None


_STUDY = TypeAdapter(Study)


def load_study(path: Path) -> Study:
    """Read a study's YAML with its bases.

    Raises:
        UserError: for a file that cannot be read, an unknown key, or a value that does not fit.
    """
    try:
        study: Study = _STUDY.validate_json(json.dumps(read_run(path, "STUDY"), default=str))
    except ValidationError as error:
        raise UserError(f"{path}: {problems_of(error, Study)[0]}") from None
    return study


def checked_claims(study: Study, rows: dict[str, Row]) -> list[tuple[ClaimText, Claim]]:
    """Check what the study's keys say of each other; return the claims whose rows are all among `rows`.

    Raises:
        ValueError: naming the key, if something is named that the study lacks.
    """
    _check_stages(study)
    _check_measures(study)
    _check_curves(study)
    _check_control(study)
    check_names("tuned_rows", study.tuned_rows, study.rows)
    for name, row in study.rows.items():
        check_names(f"rows.{name}.published", row.published, study.measures)
    found = []
    for number, text in enumerate(study.claims):
        claim = parse_claim(text.test, f"claims[{number}].test")
        measures, compared = zip(*claim.operands(), strict=True)
        check_names(f"claims[{number}].test: measure", measures, study.measures)
        check_names(f"claims[{number}].test: row", compared, study.rows)
        if all(row_name in rows for row_name in compared):
            found.append((text, claim))
    return found


def check_names(where: str, names: Iterable[str] | None, known: Collection[str]) -> None:
    """Raise ValueError for a name that is not among the known ones."""
    for name in names or ():
        if name not in known:
            raise ValueError(f"{where}: found {name!r}, expected {', '.join(known) or 'none'}")


def _check_stages(study: Study) -> None:
    for name, stage in study.stages.items():
        given = [kind for kind in STAGES if getattr(stage, kind) is not None]
        if len(given) != 1:
            raise ValueError(
                f"stages.{name}: found {given or 'nothing'}, expected one of {', '.join(STAGES)}"
            )
        check_names(f"stages.{name}.rows", stage.rows, study.rows)
        for key in stage.evaluate.sweep if stage.evaluate else ():
            if key.partition(".")[0] in NOT_EVALUATED:
                raise ValueError(f"stages.{name}.evaluate.sweep: {key} changes no evaluation; leave it out")
    tuned = [stage.rows or study.rows for stage in study.stages.values() if stage.finetune is not None]
    for row, content in study.rows.items():
        if content.finetune and not any(row in rows for rows in tuned):
            raise ValueError(f"rows.{row}.finetune: no stage fine-tunes this row; leave it out")


def _check_measures(study: Study) -> None:
    for name, measure in study.measures.items():
        of_run = measure.metric is not None and measure.stage is None
        if of_run + (measure.fact is not None) + (measure.stage is not None) != 1:
            raise ValueError(f"measures.{name}: expected one of metric, fact, and stage with path or metric")
        check_names(f"measures.{name}.stage", measure.stages, study.stages)
        check_names(f"measures.{name}.until", filter(None, [measure.until]), study.rows)
        if measure.until is not None and (not of_run or measure.take or measure.exponential):
            raise ValueError(
                f"measures.{name}: until gives steps: it needs metric, no take and no exponential"
            )
        for stage in measure.stages:
            of_seeds = measure.metric is not None or measure.consistency is not None
            if of_seeds and study.stages[stage].finetune is None:
                raise ValueError(f"measures.{name}: stage {stage!r} does not fine-tune, so it has no metric")
        given = (measure.path, measure.metric, measure.consistency)
        if measure.stage is not None and given.count(None) != 2:
            raise ValueError(f"measures.{name}: a stage needs one of path, metric, and consistency")
        if measure.consistency is not None and (measure.stage is None or measure.take not in ENDS):
            raise ValueError(f"measures.{name}: consistency needs a stage, and take: first or last")


def _check_curves(study: Study) -> None:
    for name, curve in study.curves.items():
        check_names(f"curves.{name}.crossing", filter(None, [curve.crossing]), study.rows)
        of_run = curve.metric is not None and curve.stage is None and curve.consistency is None
        stage = study.stages.get(curve.stage or "")
        of_stage = curve.metric is None and curve.consistency is not None and stage is not None
        if not of_run and not (of_stage and stage is not None and stage.finetune is not None):
            raise ValueError(f"curves.{name}: expected metric, or consistency and a stage that fine-tunes")


def _check_control(study: Study) -> None:
    check_names("control", filter(None, [study.control]), study.rows)
    if study.compare and study.control is None:
        raise ValueError("compare: needs control, the row from which the differences are; or leave it out")
    check_names("compare", study.compare, study.measures)
    check_names("bounds", study.bounds, study.measures)
    for name, size in study.sizes.items():
        if size.looks and size.looks != sorted({*size.looks[:-1], len(size.seeds)}):
            raise ValueError(
                f"sizes.{name}.looks: found {size.looks}, expected numbers of seeds up to {len(size.seeds)}"
            )
