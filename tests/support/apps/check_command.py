"""Checks of the command `tools/plan.py`, called in a process where the fake CUDA device is loaded."""

import copy
import io
import json
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml
from torch import Tensor

from megamoe.apps.plan import command as command
from megamoe.apps.plan import layout_search
from megamoe.apps.plan.hardware import GPUS
from megamoe.apps.plan.plan import Cluster, make_plan
from megamoe.config import RunConfig
from megamoe.config.load import configure
from megamoe.errors import UserError
from megamoe.moe.router import Router
from megamoe.train.resolved import resolve_run

RUN: dict[str, Any] = {
    "name": "small",
    "differences": ["a smaller corpus & another vocabulary"],
    "data": {"mock": True, "sequence_length": 64},
    "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512},
    "moe": {"layers": {"at": [1]}, "num_experts": 4, "expert_ffn_hidden_size": 96},
    "train": {"steps": 4, "micro_batch_size": 2, "global_batch_size": 8},
    "parallel": {"expert": 4, "deepspeed": "ds_configs/zero1_bf16_cuda.json"},
}


def called(folder: str, *options: str) -> tuple[int, str, str]:
    """Return the exit code of the command on 4 GPUs, and what it prints on standard output and error."""
    config = Path(folder) / "run.yaml"
    config.write_text(yaml.safe_dump(RUN))
    arguments = ["--config", str(config), "--nodes", "1", "--gpus-per-node", "4", *options]
    with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()) as errors:
        code = command.main(arguments)
    return code, printed.getvalue(), errors.getvalue()


def check_command_prints_a_plan() -> None:
    """The page and the JSON file have the same figures."""
    with tempfile.TemporaryDirectory() as folder:
        stored = Path(folder) / "plan.json"
        code, page, errors = called(folder, "--json", str(stored))
        assert code == 0, errors
        plan = json.loads(stored.read_text())
    lines = page.splitlines()
    assert lines[0].startswith("small: ") and lines[0].endswith("on 1 x 4 H100 SXM")
    assert lines[1] == (
        "tensor 1, sequence off, expert 4, expert_tensor 1, data 4, ZeRO 1, bf16, recompute none"
    )
    memory = f"memory of a rank, GB: peak {plan['peak_bytes'] / 1e9:.2f} of {plan['usable_bytes'] / 1e9:.1f}"
    assert f"{memory} usable; fits: " in page
    assert plan["fits"] and plan["parameters"] > 0
    states = ", ".join(f"{name} {size:,.0f}" for name, size in plan["states"].items())
    assert f"  states, bytes: {states}" in lines
    seconds = plan["step_seconds"]
    time = f"time of a step: {seconds * 1e3:,.1f} ms, {plan['tokens_per_second']:,.0f} tokens/s"
    assert f"{time}, model FLOP utilisation {plan['model_flop_utilisation']:.1%}" in lines
    place = lines.index("differences from the published model:")
    assert lines[place + 1 : place + 3] == ["  a smaller corpus & another vocabulary", ""]
    assert plan["differences"] == RUN["differences"]
    assert_collective_lines(lines, plan["collectives"])
    assert lines[lines.index("assumed, not measured:") + 1 :] == plan["assumptions"]


def check_command_plans_stages() -> None:
    """The page has a line for each stage."""
    with tempfile.TemporaryDirectory() as folder:
        code, page, errors = called(folder, "parallel.pipeline=2", "parallel.expert=2", "optimizer.name=muon")
    assert code == 0, errors
    assert "pipeline 2" in page.splitlines()[1], page
    assert "between stages, forward: send" in page


def assert_collective_lines(lines: list[str], rows: list[dict[str, Any]]) -> None:
    """A line for each part, kind and group, with its calls and its bytes by link, and a sum."""
    start = lines.index("collectives of a rank in a step:") + 2
    assert {row["kind"] for row in rows} >= {"alltoall_base", "allreduce"}
    assert {(row["ranks"], row["group"]) for row in rows} == {(4, "0-3")}
    for line, row in zip(lines[start:], rows, strict=False):
        what = f"  {row['part']}, {row['phase']}: {row['kind']}{', beside' if row['beside'] else ''} "
        assert line.startswith(what)
        sizes = [f"{row[key] / 1e6:,.1f}" for key in ("bytes", "inside", "between")]
        group = [str(row["ranks"]), row["group"]]
        assert line.split()[-7:-1] == [*group, f"{row['calls']:,}", *sizes]
    total = [f"{sum(row[key] for row in rows) / 1e6:,.1f}" for key in ("bytes", "inside", "between")]
    calls = f"{sum(row['calls'] for row in rows):,}"
    assert lines[start + len(rows)].split()[:-1] == ["all", calls, *total]


def check_command_searches() -> None:
    """The table has the layouts of the JSON file; then comes the page of the first."""
    fewer: dict[str, Any] = {
        "recomputations": lambda config: ("none",),
        "SLICES": (1,),
        "ZERO_FILES": {"bf16": []},
    }
    with tempfile.TemporaryDirectory() as folder, patch.multiple(layout_search, **fewer):
        stored = Path(folder) / "found.json"
        code, page, errors = called(folder, "--search", "--simulate", "2", "--json", str(stored))
        assert code == 0, errors
        found = json.loads(stored.read_text())
    assert page.startswith(f"{found['considered']:,} layouts considered: {found['illegal']:,} that")
    table, first = page.split("\n\nthe first of them:\n")
    assert len(found["layouts"]) == 2
    rows = table.splitlines()[3:]
    assert len(rows) == 2
    for row, layout in zip(rows, found["layouts"], strict=True):
        assert row.split()[0] == f"{layout['plan']['step_seconds'] * 1e3:,.1f}"
        assert row.endswith(" ".join(layout["overrides"]))
    assert f"time of a step: {found['layouts'][0]['plan']['step_seconds'] * 1e3:,.1f} ms" in first


def check_command_tells_mistakes() -> None:
    """Exit code 2, one line on standard error, and no page."""
    for options, said in (
        (("--gpu", "h1000"), "h1000"),
        (("--simulate", "0"), "--simulate: found 0, expected at least 1"),
        (("--simulate", "2"), "--simulate: is for --search alone"),
        (("--nodes", "0"), "--nodes: found 0, expected at least 1"),
        (("--nodes", "1000000"), "found 1,000,000 x 4 GPUs, expected at most 131,072 together"),
        (("--nodes", "4"), "train.global_batch_size: 8 is not a multiple of 32"),
        (("--load", "nan"), "--load: found nan, expected at least 1"),
        (("--config", "/no/such/run.yaml"), "--config: cannot read '/no/such/run.yaml'"),
        (("train.global_batch_size=7",), "train.global_batch_size: 7 is not a multiple of 8"),
        (("--search", "model.hidden_size=65536", "model.num_layers=64"), "the smallest needs about"),
        (("--search", "model.vocab_size=null"), "model.vocab_size: not set; --search needs it"),
        (("--json", "/no/such/folder/plan.json"), "--json"),
        (("model.num_layer=3",), "num_layer"),
        (("parallel.expert=3",), "parallel.expert"),
        (("--load", "5"), "load: found 5, expected 1 to 4"),
    ):
        with tempfile.TemporaryDirectory() as folder:
            code, page, errors = called(folder, *options)
        assert (code, page) == (2, ""), (options, code, page)
        assert errors.startswith("error: ") and said in errors, errors
        assert len(errors.splitlines()) == 1, errors


def check_illegal_runs_are_refused_as_in_training() -> None:
    """With the same line, on the same number of ranks; also for parts that a plan replaces."""
    for override in (
        "parallel.expert=3",
        "parallel.tensor=3",
        "parallel.expert_tensor=8",
        "parallel.sequence=true",
        "train.global_batch_size=7",
        "model.num_attention_heads=3",
        "parallel.deepspeed=missing.json",
        "moe.router.masks=[{name: group_limit, num_groups: 3, keep: 1}]",
    ):
        config = configure(copy.deepcopy(RUN), [override])
        trained, planned = (refusal(start, config) for start in (resolve_run, plan_of))
        assert trained and trained == planned, (override, trained, planned)


def plan_of(config: RunConfig, ranks: int) -> None:
    make_plan(config, Cluster(1, ranks, GPUS["h100"]))


def refusal(start: Callable[[RunConfig, int], Any], config: RunConfig) -> str:
    try:
        start(config, 4)
    except UserError as error:
        return str(error)
    return ""


def check_a_tensor_on_the_wrong_device_fails() -> None:
    """As CUDA fails: in the operator that gets tensors of two devices."""
    forward = Router.forward

    def wrong(self: Router, hidden_TH: Tensor, *rest: Any) -> Any:
        return forward(self, hidden_TH * torch.ones(hidden_TH.shape[-1], device="cpu"), *rest)

    config = configure(copy.deepcopy(RUN), [])
    with patch.object(Router, "forward", wrong):
        try:
            make_plan(config, Cluster(1, 4, GPUS["h100"]))
        except RuntimeError as error:
            assert "cuda:0" in str(error) and "cpu" in str(error), error
        else:
            raise AssertionError("not noticed")
