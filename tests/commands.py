"""How each command on the pages is tested: run as written or in small, tested elsewhere, or not run and why.

tests/test_commands.py checks that every command stands in commands.yaml, and runs what can be run
(`make test-full`). The tutorial's commands have a test of their own: tests/test_tutorial.py.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

from tools.list_keys import GENERATED

ROOT = Path(__file__).resolve().parents[1]
# Not docs/lab, whose pages tools/lab.py writes, and of the generated pages the files that have their prose.
ALL_PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted({*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("[!l]*/**/*.md")} - {*GENERATED.values()}),
    *sorted((ROOT / "examples").rglob("README.md")),
    ROOT / "tests/README.md",
]
TUTORIAL = sorted((ROOT / "docs/start").glob("[1-4]_*.md"))
PAGES = [page for page in ALL_PAGES if page not in TUTORIAL]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAM = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:(?:\.venv/bin/)?python|torchrun|make|megamoe|pip|sbatch|docker|apptainer|lm_eval|"
    r"sacrebleu|deepspeed|echo|export)(?: |$)"
)
# The runs that the commands read: the demo, made small enough for 300 steps in seconds.
SMALL = (
    "model.hidden_size=64 model.num_layers=2 moe.expert_ffn_hidden_size=64 data.sequence_length=64 "
    "train.micro_batch_size=2 train.global_batch_size=4 evaluation.every=150 evaluation.batches=2 "
    "checkpoint.every=50 checkpoint.keep=10"
)
BEFORE = (
    f"python pretrain_gpt_moe.py --config examples/demo.yaml {SMALL}",
    f"python pretrain_gpt_moe.py --config examples/demo.yaml {SMALL} name=top1 moe.router.selector.k=1 "
    "moe.router.selector.weights=raw train.steps=20",
)
# What is added to a command that trains, so that it ends soon: two steps, in a folder of their own.
TWO_STEPS = (
    "train.steps=2 optimizer.warmup_steps=1 evaluation.every=2 evaluation.batches=1 output=runs/two_steps "
    "overwrite=true"
)
RUN, TWO = "run", "two steps"


class Rule(NamedTuple):
    """What holds for commands that match. how: RUN, TWO, the test that covers them, or why none runs them."""

    pattern: str
    how: str


ROWS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
RULES = [Rule(pattern, how) for pattern, how in ROWS.items()]


def commands_of(page: Path) -> Iterator[str]:
    """The commands of a page's blocks, each in one line, without comments."""
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            if language in ("", "sh") and PROGRAM.match(line):
                yield " ".join(re.split(r"\s+#\s", line)[0].split())


def rule_of(command: str) -> Rule | None:
    """The first rule that matches."""
    return next((rule for rule in RULES if re.fullmatch(rule.pattern, command)), None)
