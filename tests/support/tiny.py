"""The smallest run with every component, used by the tests of single packages."""

import importlib
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megamoe.cli import COMMANDS
from megamoe.config import RunConfig, load_config
from megamoe.errors import raise_first
from megamoe.kernels.choice import Kernels
from megamoe.model.architectures.decoder import GPT
from megamoe.model.architectures.language_model import LanguageModel
from megamoe.model.build import build_model
from megamoe.moe.part import StepContext
from megamoe.parallel import launch
from megamoe.parallel.launch import find_world
from megamoe.parallel.layout import Layout
from megamoe.parallel.process_groups import start_groups
from megamoe.parallel.zero.deepspeed_config import fill_in, resolve_parallel
from megamoe.parallel.zero.deepspeed_moe_layer import moe_layer_factory
from megamoe.parallel.zero.engine import Engine
from megamoe.validation.run import validate

ROOT = Path(__file__).parents[2]
VOCABULARY = 48
BASE = (
    "data.mock=true",
    "data.sequence_length=8",
    "data.workers=0",
    "model.num_layers=2",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "model.ffn_hidden_size=24",
    f"model.vocab_size={VOCABULARY}",
    "model.vocab_multiple=16",
    "moe.layers.every=1",
    "moe.num_experts=4",
    "moe.expert_ffn_hidden_size=12",
    "train.steps=4",
    "train.micro_batch_size=2",
    "log.report=false",
)


def tiny(*overrides: str) -> RunConfig:
    """Two MoE blocks of four experts on mock data, with `section.key=value` overrides."""
    return load_config(None, [*BASE, *overrides])


def tiny_model(
    config: RunConfig, context: StepContext | None = None, vocab_size: int = VOCABULARY
) -> LanguageModel:
    """Its model; needs the fixture `one_rank`."""
    layout = Layout.of(config.parallel, 1)
    groups = start_groups(layout, timeout_minutes=1)
    make_layer = moe_layer_factory(context or StepContext(), groups, layout)
    return build_model(config, vocab_size, make_layer, Kernels.of(config.model))


def tiny_gpt(config: RunConfig, context: StepContext | None = None, vocab_size: int = VOCABULARY) -> GPT:
    """Its model, if it is a decoder."""
    model = tiny_model(config, context, vocab_size)
    assert isinstance(model, GPT)
    return model


def tiny_engine(
    config: RunConfig, context: StepContext | None = None, vocab_size: int = VOCABULARY
) -> Engine:
    """Its engine, for steps of one micro batch; needs the fixture `one_rank`."""
    plan = resolve_parallel(config, 1)
    model = tiny_model(config, context, vocab_size)
    return Engine(config, model, find_world(), plan, fill_in(config, plan, 1), Kernels.of(config.model))


def check_on(config: RunConfig, ranks: int) -> None:
    """The checks of a start on so many ranks."""
    raise_first(validate(config, ranks, resolve_parallel(config, ranks)))


@contextmanager
def restored_process() -> Iterator[None]:
    """Put back what a run leaves in its process: environment variables and signal handlers."""
    variables = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def world_of_one() -> Iterator[None]:
    """Process groups and Megatron-Core's state for this process alone."""
    with restored_process():
        launch.start(launch.find_world(), timeout_minutes=1)
        start_groups(Layout(1), timeout_minutes=1)
        yield
        launch.stop()


def tool(name: str) -> Any:
    """The module of the command that a script in tools/ calls, or the script."""
    called = re.findall(r'run\("([a-z-]+)"\)', (ROOT / f"tools/{name}.py").read_text())
    return importlib.import_module(COMMANDS[called[0]] if called else f"tools.{name}")


def one_line(code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of an error on stderr, after a program that ended with exit code 2."""
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    return err
