"""How each command on the pages is tested: run as written or in small, tested elsewhere, or not run and why.

tests/test_commands.py checks that every command stands here, and runs what can be run (`make test-full`). The
tutorial's commands have a test of their own: tests/test_tutorial.py.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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


DEMO = r"pretrain_gpt_moe\.py --config examples/demo\.yaml"
RULES = [
    Rule(r"python tools/prepare_data\.py --stdlib --tokenizer train .*", RUN),  # first: the others need it
    Rule(r"python tools/prepare_data\.py (--verify|docs/\*/\*\.md) .*", RUN),
    Rule(r"python tools/verify\.py --config examples/(demo|own_parts)\.yaml", RUN),
    Rule(r"python tools/(list_parts|show_batch)\.py( --config examples/demo\.yaml --count 1)?", RUN),
    Rule(r"python tools/lab\.py --list", RUN),
    Rule(rf"python {DEMO} --check.*", RUN),
    Rule(r"python tools/analyze_routing\.py runs/demo", RUN),
    Rule(r"python tools/evaluate\.py runs/demo( --sweep moe\.router\.selector\.k=2,3,4)?", RUN),
    Rule(r"torchrun --nproc-per-node 2 tools/(evaluate|generate)\.py runs/demo .*", RUN),
    Rule(r"python tools/generate\.py runs/demo .*", RUN),
    Rule(r"python tools/report\.py runs/demo runs/top1", RUN),
    Rule(r"python tools/convert_hf\.py export runs/demo exported --class custom", RUN),
    Rule(r"python tools/checkpoint\.py inspect .*", RUN),
    Rule(r"python tools/checkpoint\.py convert .*", RUN),
    Rule(r"python tools/checkpoint\.py average runs/demo runs/demo_averaged --last 5", RUN),
    Rule(r"python tools/checkpoint\.py prune runs/demo --keep 2( --dry-run)?", RUN),
    Rule(r"python tools/plan\.py --config (examples|benchmarks)/.*", RUN),
    # Training, as written but for the number of steps.
    Rule(rf"python {DEMO}(?! name=(cut|upcycled|tuned|again))(?!.* ?--resume)(?!.*log\.routing).*", TWO),
    Rule(r"python pretrain_gpt_moe\.py --config examples/(own_router|mlm)\.yaml.*", TWO),
    Rule(rf"torchrun --nproc-per-node [24] {DEMO}(?!.*global_batch).*", TWO),
    Rule(r"torchrun --nproc-per-node 4 pretrain_gpt_moe\.py --config examples/own_router\.yaml.*", TWO),
    Rule(rf"torchrun --standalone --nproc-per-node 2 --max-restarts 3 {DEMO} .*", TWO),
    Rule(rf"torchrun --nproc-per-node 2 {DEMO}.*in_flight.*", "tests/distributed/parity/test_in_flight.py"),
    # Tested elsewhere, on smaller data.
    Rule(rf"python {DEMO} --resume", "tests/train/test_resume.py"),
    Rule(rf"python {DEMO} (name=again|log\.routing).*", "tests/apps/routing_record/test_routing_record.py"),
    Rule(r"python tools/evaluate\.py runs/demo moe\.router\.replay=.*",
         "tests/apps/routing_record/test_routing_record.py"),
    Rule(rf"python {DEMO} name=(cut|upcycled|tuned).*", "tests/checkpoint/test_init_from.py"),
    Rule(r"(python|torchrun .*) ?tools/lm_eval\.py runs/demo .*", "tests/apps/lm_eval/test_model.py"),
    Rule(r"python tools/convert_hf\.py import models/dense.*", "tests/apps/hf/test_training.py"),
    Rule(r"python pretrain_gpt_moe\.py --config runs/dense/.*", "tests/apps/hf/test_training.py"),
    Rule(r"python tools/convert_hf\.py export runs/demo exported --like .*",
         "tests/apps/hf/test_damages.py"),
    Rule(r"python tools/checkpoint\.py average .* --ema", "tests/train/test_weight_mean.py"),
    Rule(r"python tools/checkpoint\.py verify runs/demo runs/other/.*", "tests/apps/checkpoints"),
    Rule(r"python tools/count_parameters\.py examples/papers .*", "tests/test_papers.py"),
    Rule(r"(python|torchrun .*) ?tools/finetune\.py .*", "tests/apps/finetune/test_finetune.py"),
    Rule(r"(echo .* \| )?(python|torchrun .*) ?tools/translate\.py .*",
         "tests/apps/translation/test_translation.py"),
    Rule(r"python tools/prepare_pairs\.py .*", "tests/apps/translation/test_prepare_pairs.py"),
    Rule(r"python examples/catalogues/.*", "tests/apps/translation/test_catalogues.py"),
    Rule(r"python tools/prepare_chat\.py .*|python tools/generate\.py runs/chat --chat",
         "tests/apps/chat/test_chat.py"),
    Rule(r"deepspeed --hostfile .*", "tests/distributed/launch/test_launch.py"),
    Rule(r"python examples/data/pipeline\.py .*", "tests/apps/prepare/test_datatrove.py"),
    Rule(r"sbatch .*|\.venv/bin/python tools/status\.py runs/first --watch", "tests/slurm/test_jobs.py"),
    Rule(r"python tools/lab\.py .* --launcher .*", "tests/apps/lab/test_lab.py"),
    Rule(r"python tools/convert_hf\.py (import models/small runs/small|export runs/small_continued .*)",
         "tests/test_tutorial.py"),
    Rule(r".* data/small/text|python .*runs/small/continue\.yaml .*|python .*runs/small_continued .*",
         "tests/test_tutorial.py"),
    Rule(r"make demo", "tests/test_tutorial.py"),
    Rule(r"make docs", "tests/test_site.py"),
    Rule(r"make test-quick", "tests/test_touched.py"),
    Rule(r"python benchmarks/(moe_layer)\.py", "tests/benchmarks/test_moe_layer.py"),
    Rule(r"python benchmarks/train_step\.py", "tests/benchmarks/test_train_step.py"),
    Rule(r"make fuzz .*", "tests/test_fuzz.py"),
    Rule(r"make gpu-check", "tests/benchmarks/test_gpu_check.py"),
    # Not run.
    Rule(
        r"make (catalogues|(chat|papers|mlm|translation)-small|papers-data|compare|demo papers-data|data/.*)",
        "not run: a download, or training for hours; tests/test_examples.py checks their configurations",
    ),
    Rule(r"make (setup|lint|test)", "not run: what .ci/run does, of which these tests are a part"),
    Rule(r"python -m pytest .*|python -m tests\..*", "not run: they are tests themselves"),
    Rule(r".*python benchmarks/.*", "not run: it measures for minutes and its numbers are of one machine"),
    Rule(r"python tools/plan\.py --config FILE .*", "not run: stands for a file of the reader's"),
    Rule(r"python tools/lab\.py (yang2024_table1 --size (smoke|cpu)|mu(on|p)_\w+ --size cpu.*)",
         "not run: an hour; the tutorial runs a study"),
    Rule(r"python pretrain_gpt_moe\.py --config examples/(catalogues|papers)/.*",
         "not run: needs a download of 106 MB"),
    Rule(r"python -m pip download .*|pip install .*|export .*", "not run: needs a network or an account"),
    Rule(r"docker .*|apptainer .*", "not run: needs a container engine"),
    Rule(r".*--config run\.yaml.*|.*corpus/00/.*", "not run: stands for a file of the reader's"),
    Rule(r".* runs/(a|seed_1|threshold)\b.*",
         "not run: stands for a run of the reader's; options are tested below"),
    Rule(r"lm_eval .*|sacrebleu .*", "not run: another project's command; tests compare with its library"),
]  # fmt: skip


def commands_of(page: Path) -> Iterator[str]:
    """The commands of a page's blocks, each in one line, without comments."""
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            if language in ("", "sh") and PROGRAM.match(line):
                yield " ".join(re.split(r"\s+#\s", line)[0].split())


def rule_of(command: str) -> Rule | None:
    """The first rule that matches."""
    return next((rule for rule in RULES if re.fullmatch(rule.pattern, command)), None)
