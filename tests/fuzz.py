"""Random legal runs in random layouts, compared with one rank, until the time is over: `make fuzz`.

    python -m tests.fuzz --minutes 30 --seed 1
    python -m tests.fuzz --seed 1 --case 17     one case again

A case is drawn from its seed and number alone: values of the keys of the JSON Schema, parts with options,
sizes of the layout. What the checks of a configuration refuse is left out; the line must then name a key. The
model is tiny, of mock tokens. A case that differs, crashes, or is refused only by its ranks is made smaller
and written as YAML to runs/fuzz/, and the command ends with 1.
"""

import argparse
import itertools
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megamoe.apps.verify.compare import Result, differences, first_of
from megamoe.apps.verify.layouts import Variant
from megamoe.apps.verify.ranks import RankError, RankPool
from megamoe.apps.verify.session import FP32, NOISE, Session
from megamoe.apps.verify.small import Changes, Tree, changed, on_one_rank, problems
from megamoe.apps.verify.train_run import Metrics, train
from megamoe.config import parse_config, to_dict
from megamoe.errors import UserError
from tests.support.moe.examples import example_trees

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "runs" / "fuzz"
RUNS, LAYOUTS = 3, 3  # of a batch, which is trained in one world: to start it costs as much as a case
SCHEMA = json.loads((ROOT / "docs" / "configuration.schema.json").read_text())
BASE: Tree = {
    "model": {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 32, "vocab_size": 64, "init_std": 0.1},
    "data": {"mock": True, "sequence_length": 16, "split": [0.5, 0.5, 0]},
    "moe": {"layers": {"every": 1}, "num_experts": 16, "expert_ffn_hidden_size": 16},
}
STACKS = {"encoder": {"every": 1}, "decoder": {"every": 2}}
ARCHITECTURES: list[Changes] = [
    *([{}] * 6),
    {"model.architecture": "encoder", "train.objective": {"name": "masked"}},
    {
        "model.architecture": "encoder_decoder",
        "model.encoder_layers": 2,
        "moe.layers": STACKS,
        "train.objective": {"name": "span_corruption"},
    },
]
# Not drawn: where data and results lie, what stops or watches a run, kernels of other machines, what the
# layout has, and what each rank draws by itself or rounds by more than fp32.
LEFT_OUT = re.compile(
    r"name|output|overwrite|plugins|differences|base|log|checkpoint|evaluation|seed"
    r"|data\.(?!document_aware|order|sequence_length)|model\.(architecture|\w*kernels?|backend|fp8|keep_freed)"
    r"|model\.(hidden_dropout|attention_dropout|vocab_size|num_labels|predicts|recompute|init_std|hidden_size)"
    r"|train\.(?!label_smoothing|micro_batch_size|batch_rampup)|parallel|moe\.router\.replay"
    r"|optimizer\.(moments|lr$|min_lr|eps|warmup|decay|wsd|muon\.precision)"
)
LAYOUT: list[list[Changes]] = [
    [{"parallel.tensor": 2}, {"parallel.tensor": 2, "parallel.sequence": True}, {"parallel.tensor": 4}],
    [{"parallel.context": 2}, {"parallel.context": 4}],
    [
        {"parallel.pipeline": 2},
        {"parallel.pipeline": 2, "parallel.pipeline_chunks": 2},
        {"parallel.pipeline": 4},
    ],
    [{"parallel.expert": 2}, {"parallel.expert": 4}, {"parallel.expert": 8}],
    [{"parallel.expert_tensor": 2}, {"parallel.expert_tensor": 4}],
    [{"zero": 1}, {"zero": 2}, {"zero": 3}],
    [{"parallel.exchange": {"name": "by_node"}, "parallel.node_size": size} for size in (1, 2)],
    [{"train.in_flight": 2}],
    [
        {"model.recompute": value}
        for value in ("full", "selective", ["norms", "core_attention"], ["moe"], ["shared_experts"])
    ],
]
Schema = dict[str, Any]


def draw(rng: random.Random, schema: Schema) -> Any:
    """Return a value that the schema allows."""
    if "$ref" in schema:
        return draw(rng, SCHEMA["$defs"][schema["$ref"].rsplit("/", 1)[1]])
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "anyOf" in schema:
        return draw(rng, rng.choice([each for each in schema["anyOf"] if each != {"type": "string"}]))
    kind = schema["type"]
    if kind in ("integer", "number"):
        values = (0, 1, 2, 2, 3, 4, 4, 8, 16) if kind == "integer" else (0.0, 0.1, 0.25, 0.5, 0.9, 1.0, 2.0)
        return rng.choice([value for value in values if _allowed(schema, value)])
    if kind == "array":
        return [draw(rng, schema["items"]) for _ in range(rng.choice((1, 1, 2)))]
    if kind == "object":
        given = schema.get("properties", {})
        always = {"name", *schema.get("required", [])} & given.keys()
        names = always | {name for name in given if rng.random() < 1.5 / len(given)}
        return {name: draw(rng, given[name]) for name in given if name in names}
    if kind == "boolean":
        return rng.random() < 0.5
    return None


def _allowed(schema: Schema, value: float) -> bool:
    least, most = schema.get("minimum", value), schema.get("maximum", value)
    above, below = schema.get("exclusiveMinimum", value - 1), schema.get("exclusiveMaximum", value + 1)
    return bool(least <= value <= most and above < value < below)


def leaves(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Yield every key that may be drawn, with its schema."""
    if path and LEFT_OUT.match(path):
        return
    resolved = SCHEMA["$defs"][schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema
    if resolved.get("type") == "object" and "properties" in resolved:
        for name, each in resolved["properties"].items():
            yield from leaves(each, f"{path}.{name}" if path else name)
    else:
        yield path, schema


LEAVES = dict(leaves(SCHEMA))
STAGE_LEAVES = {
    f"moe.router.{name}": each for name, each in SCHEMA["$defs"]["RouterConfig"]["properties"].items()
}
del STAGE_LEAVES["moe.router.replay"]


@dataclass(frozen=True)
class Case:
    """A run and its layout. features: of the run, in the order in which they were added."""

    number: int
    features: tuple[Changes, ...]
    variant: Variant

    @property
    def tree(self) -> Tree:
        """The run on one rank, as `Session` takes it."""
        tree = base()
        for feature in self.features:
            tree = to_dict(parse_config(changed(tree, feature)))
        return tree


@cache
def base() -> Tree:
    """Return the tiny run, with what `megamoe verify` sets in every run; two steps."""
    tree = on_one_rank(to_dict(parse_config(BASE)))
    return to_dict(parse_config(changed(tree, {"train.steps": 2})))


class Findings:
    """What is wrong, and how often what was refused."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()
        self.wrong: list[str] = []

    def say(self, line: str) -> None:
        self.wrong.append(line)
        print(line, flush=True)

    def legal(self, tree: Tree, ranks: int, what: object) -> bool:
        """Whether the checks accept a run; their line must name a key."""
        try:
            refused = problems(tree, ranks)
        except Exception as error:
            self.say(f"CRASH in the checks of {what}: {type(error).__name__}: {error}\n{json.dumps(tree)}")
            return False
        for line in refused:
            key = re.split(r"[\s:,\[]", line.removeprefix("configuration: "), maxsplit=1)[0]
            self.refused[key] += 1
            if key.partition(".")[0] not in SCHEMA["properties"]:
                self.say(f"NO KEY in what refuses {what}: {line}")
        return not refused


def draw_part(rng: random.Random) -> Changes:
    """Return the section `moe` of an example of a part."""
    part = rng.choice(("scorer", "mask", "score_function", "selector", "capacity", "loss"))
    sections = examples(part, rng.choice(SCHEMA["$defs"][part]["anyOf"][0]["enum"]))
    return {f"moe.{key}": value for key, value in rng.choice(sections).items()}


@cache
def examples(kind: str, name: str) -> list[Tree]:
    return example_trees(kind, name)


def draw_keys(rng: random.Random) -> Changes:
    """Return a change of one key or two."""
    some = STAGE_LEAVES if rng.random() < 0.3 else LEAVES
    return {key: draw(rng, some[key]) for key in rng.sample(sorted(some), rng.choice((1, 1, 2)))}


def draw_run(seed: int, number: int, ranks: int, length: Changes, findings: Findings) -> tuple[Changes, ...]:
    """Return the features of a run that is legal on one rank, and with that many data-parallel ones.

    length: its steps and sequences.
    """
    rng = random.Random(f"{seed}/run {number}")
    steps = [draw_part(rng)] if rng.random() < 0.6 else []
    steps += [draw_keys(rng) for _ in range(rng.randint(3, 12))]
    rng.shuffle(steps)
    features: tuple[Changes, ...] = ()
    tree = base()
    for step in [rng.choice(ARCHITECTURES), length, *steps]:
        try:
            more = changed(tree, step)
        except (KeyError, TypeError):  # a key of a section that is null or a word
            continue
        if all(findings.legal(_laid_out(more, Variant(n, {})), n, step) for n in (1, ranks)):
            features, tree = (*features, step), to_dict(parse_config(more))
    return features


def draw_layout(seed: int, number: int, tree: Tree, ranks: int, findings: Findings) -> Variant:
    """Return a layout in which the run is legal."""
    rng = random.Random(f"{seed}/layout {number}")
    variant = Variant(ranks, {})
    for choices in rng.sample(LAYOUT, len(LAYOUT)):
        if rng.random() < 0.5:
            more = Variant(ranks, variant.changes | rng.choice(choices))
            variant = more if findings.legal(_laid_out(tree, more), ranks, more) else variant
    return variant


def resumes(batch: int) -> bool:
    """Whether the cases of a batch resume after their first step."""
    return batch % 2 == 0


def draw_cases(seed: int, batch: int, findings: Findings) -> list[Case]:
    """Return the cases of a batch, all on as many ranks."""
    ranks = random.Random(f"{seed}/ranks {batch}").choices((2, 4, 8), (70, 27, 3))[0]
    length = {"train.global_batch_size": max(4, ranks), "train.steps": 2 if resumes(batch) else 1}
    cases = []
    for run in range(batch * RUNS, (batch + 1) * RUNS):
        features = draw_run(seed, run, ranks, length, findings)
        tree = Case(run, features, Variant(1, {})).tree
        for number in range(run * LAYOUTS, (run + 1) * LAYOUTS):
            cases.append(Case(number, features, draw_layout(seed, number, tree, ranks, findings)))
    return cases


def _laid_out(tree: Tree, variant: Variant) -> Tree:
    folder = Path(tempfile.gettempdir()) / "megamoe_fuzz_checked"
    folder.mkdir(exist_ok=True)
    return variant.tree(tree, folder)


def judge(case: Case, folder: Path, pool: RankPool) -> str:
    """Return what is wrong with a case; nothing if it equals one rank."""
    session = Session(case.tree, folder, pool, most_tries=0)
    try:
        wrong, _, problem = session.compare(case.variant)
    except UserError as error:
        return str(error)
    return "\n".join(map(str, first_of(wrong))) or problem


def train_each(runs: list[tuple[Tree, bool, float]]) -> list[Metrics]:
    """Job: return what `train` returns of several runs, one after the other in the same world."""
    return [train(*run) for run in runs]


def suspects(cases: list[Case], folder: Path, pool: RankPool, resume: bool) -> list[Case]:
    """Train the runs in one world of one rank, also with weights that are rounded otherwise, and the cases in
    one of their ranks; return those that may differ.
    """
    alone = [replace(case, variant=Variant(1, {})) for case in cases[::LAYOUTS]]
    found: list[list[Result]] = []
    for several, resumed, noise in ((alone, False, (0.0, NOISE)), (cases, resume, (0.0,))):
        sessions = [Session(case.tree, folder / f"{len(found)}_{case.number}", pool, 0) for case in several]
        places = [
            session.prepared(case.variant)
            for session, case in zip(sessions, several, strict=True)
            for _ in noise
        ]
        runs = [(tree, resumed, noise[n % len(noise)]) for n, (_, tree) in enumerate(places)]
        try:
            metrics, *_ = pool.run(train_each, runs, ranks=several[0].variant.ranks, log=folder / "log")
        except RankError:
            return cases
        found.append([Result(each, place) for each, (place, _) in zip(metrics, places, strict=True)])
    differ = []
    for number, (case, result) in enumerate(zip(cases, found[1], strict=True)):
        one, rounded = found[0][number // LAYOUTS * 2 : number // LAYOUTS * 2 + 2]
        if differences(result, one, rounded, *FP32)[0] or result.other_choices(one):
            differ.append(case)
    return differ


def smallest(case: Case, folder: Path, pool: RankPool) -> Case:
    """Take features of the layout and of the run away as long as the case still fails."""
    numbers = itertools.count()
    quiet = Findings()

    def fails(smaller: Case) -> bool:
        try:
            legal = quiet.legal(_laid_out(smaller.tree, smaller.variant), smaller.variant.ranks, "")
        except (KeyError, TypeError, UserError):
            return False
        return legal and bool(judge(smaller, folder / f"smaller_{next(numbers)}", pool))

    shrinks = True
    while shrinks:
        less = [case.features[:n] + case.features[n + 1 :] for n in range(len(case.features))]
        single = [
            (*case.features[:n], {k: v for k, v in feature.items() if k != key}, *case.features[n + 1 :])
            for n, feature in enumerate(case.features)
            if len(feature) > 1
            for key in feature
        ]
        candidates = [replace(case, variant=variant) for variant in case.variant.simpler()]
        candidates += [replace(case, features=features) for features in (*less, *single)]
        found = next((each for each in candidates if fails(each)), None)
        shrinks, case = found is not None, found or case
    return case


def write(case: Case, why: str, seed: int) -> Path:
    """Write a case as the YAML of a run, with its command above it."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    path = OUTPUT / f"{seed}_{case.number}.yaml"
    tree = _laid_out(case.tree, case.variant)
    zero = OUTPUT / f"{seed}_{case.number}.json"
    shutil.copy(tree["parallel"]["deepspeed"], zero)
    tree["parallel"]["deepspeed"], tree["output"] = zero.name, "runs"
    head = [f"seed {seed}, case {case.number}: {case.variant}", *why.splitlines()[:12]]
    text = "".join(f"# {line}\n" for line in head)
    path.write_text(text + yaml.safe_dump(_changes(tree, to_dict(parse_config({}))), sort_keys=False))
    return path


def _changes(tree: Any, defaults: Any) -> Any:
    if not isinstance(tree, dict) or not isinstance(defaults, dict):
        return tree
    other = [key for key in tree if key not in defaults or tree[key] != defaults[key]]
    return {key: _changes(tree[key], defaults.get(key)) for key in other}


def main() -> int:
    """Run cases until the time is over; return 1 if one is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="this one alone")
    options = parser.parse_args()
    pool, findings = RankPool(), Findings()
    started, done, only = time.monotonic(), 0, options.case
    by_ranks: Counter[int] = Counter()
    failed: list[Case] = []
    with tempfile.TemporaryDirectory(prefix="megamoe_fuzz_") as scratch:
        for batch in itertools.count(0 if only is None else only // (RUNS * LAYOUTS)):
            if done and (only is not None or time.monotonic() - started > options.minutes * 60):
                break
            cases = draw_cases(options.seed, batch, findings)
            cases = [case for case in cases if only in (None, case.number)]
            folder = Path(scratch) / str(batch)
            folder.mkdir()
            for case in suspects(cases, folder, pool, resumes(batch)):
                if why := judge(case, folder / f"again_{case.number}", pool):
                    findings.say(f"case {case.number}, {case.variant}: {why}")
                    write(case, why, options.seed)
                    failed.append(case)
            shutil.rmtree(folder)
            done += len(cases)
            by_ranks[cases[0].variant.ranks] += len(cases)
            each_s = (time.monotonic() - started) / done
            print(f"{done} cases, {each_s:.1f} s each, by ranks {dict(by_ranks)}", flush=True)
        for case in failed:
            small = smallest(case, Path(scratch) / f"smaller_{case.number}", pool)
            why = judge(small, Path(scratch) / f"smallest_{case.number}", pool)
            print(f"{write(small, why, options.seed)}: {small.variant}, {small.features}\n{why}", flush=True)
    print(f"{sum(findings.refused.values())} refusals, by key: {dict(findings.refused.most_common())}")
    print(f"{done} cases of seed {options.seed}: {len(findings.wrong)} findings")
    return int(bool(findings.wrong))


if __name__ == "__main__":
    sys.exit(main())
