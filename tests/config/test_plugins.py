"""Parts from outside the package: a file, a module, an entry point; only where `plugins:` names them."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megamoe import registry
from megamoe.config import RunConfig, dump_yaml, load_config
from megamoe.errors import UserError
from megamoe.moe.layer import LayerShape, MoELayer
from megamoe.moe.part import StepContext
from tests.support.refusals import Case, cases, told

Load = Callable[..., RunConfig]
pytestmark = pytest.mark.usefixtures("own_registry")

PLUGIN = '''
"""A scorer, a mask and a loss of one's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megamoe.moe.part import Part, Mask
from megamoe.registry import register


@register("scorer", "two_layers")
class TwoLayers(Part):
    @dataclass
    class Config:
        width: int = 5

    def __init__(self, config, dims):
        super().__init__(config, dims)
        self.inner = torch.nn.Linear(dims.hidden_size, config.width)
        self.outer = torch.nn.Linear(config.width, dims.num_experts)

    def forward(self, hidden_TH, context):
        return self.outer(self.inner(hidden_TH).tanh())


@register("mask", "without")
class Without(Mask):
    @dataclass
    class Config:
        expert: int = 0

    def forward(self, scored, context):
        candidates_TE = torch.ones_like(scored.scores_TE, dtype=torch.bool)
        candidates_TE[:, self.config.expert] = False
        return candidates_TE


@register("loss", "score_mean")
class ScoreMean(Part):
    @dataclass
    class Config:
        weight: float = 1.0

    def forward(self, routing, context):
        return routing.scores_TE.mean()
'''
GATE = """
from dataclasses import dataclass
from megamoe.moe.score_functions.softmax import SoftmaxScoreFunction
from megamoe.registry import register
register("score_function", "{name}")(type("{name}", (SoftmaxScoreFunction,), {{}}))
"""
RUN = """
plugins: [mine.py]
moe:
  num_experts: 4
  router:
    scorer: {name: two_layers, width: 7}
    masks: [{name: without, expert: 2}, without]
    selector: {k: 2}
  losses: {score_mean: 0.5}
"""


@pytest.fixture
def layer(load: Load, tmp_path: Path) -> MoELayer:
    (tmp_path / "mine.py").write_text(PLUGIN)
    torch.manual_seed(0)
    shape = LayerShape(8, 8, 1, "gelu", init_std=0.4, output_std=0.4, seed=0)
    return MoELayer(load(RUN).moe, shape, StepContext())


def test_a_plugin_works_in_a_layer(layer: MoELayer) -> None:
    hidden_TH = torch.randn(20, 8)
    routing = layer.router(hidden_TH, layer.context)
    assert layer.get_parameter("router.scorer.inner.weight").shape == (7, 8)
    # Without the experts 0 and 2, every token goes to 1 and 3.
    assert routing.counts_E().tolist() == [0, 20, 0, 20]
    assert not routing.probs_TE[:, [0, 2]].any()
    torch.testing.assert_close(routing.probs_TE.sum(1), torch.ones(20))
    layer(hidden_TH).sum().backward()
    assert layer.observation is not None
    torch.testing.assert_close(layer.observation.losses["score_mean"], routing.scores_TE.detach().mean())
    gradient = layer.get_parameter("experts.up").grad
    assert gradient is not None
    assert not gradient[[0, 2]].any()
    assert gradient[[1, 3]].any()


def test_the_loss_of_a_plugin_sends_its_gradient(layer: MoELayer) -> None:
    (layer(torch.randn(20, 8)) * 0).sum().backward()
    bias = layer.get_parameter("router.scorer.outer.bias")
    torch.testing.assert_close(bias.grad, torch.full((4,), 0.5 / 4))


def test_options_of_a_plugin_are_as_strict_as_ours(load: Load, layer: MoELayer) -> None:
    with pytest.raises(UserError, match="moe.router.scorer.width: expected a whole number, found 1.5$"):
        load(RUN, "moe.router.scorer.width=1.5")
    with pytest.raises(UserError, match="scorer 'two_layers' has no option 'widht'; did you mean 'width'?"):
        load(RUN, "moe.router.scorer.widht=1")
    with pytest.raises(UserError, match="moe.router.masks.0.expert: expected a whole number, found 'a'$"):
        load(RUN, "moe.router.masks=[{name: without, expert: a}]")


def test_the_dump_of_a_run_with_a_plugin_reads_back_equal(load: Load, layer: MoELayer) -> None:
    assert load(dump_yaml(load(RUN))) == load(RUN)


def test_a_plugin_that_is_not_named_does_not_run(load: Load, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('ran')")
    load("seed: 1")
    assert "two_layers" not in registry.list_parts("scorer")
    with pytest.raises(UserError, match="unknown scorer 'two_layers'"):
        load("moe: {router: {scorer: two_layers}}")


def test_a_file_is_found_beside_the_yaml_and_in_the_working_folder(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.py").write_text(GATE.format(name="beside"))
    work = tmp_path / "work"
    work.mkdir()
    (work / "here.py").write_text(GATE.format(name="here"))
    monkeypatch.chdir(work)
    load("plugins: [beside.py, here.py]\nmoe: {router: {score_function: beside}}")
    load("", "plugins=[here.py]", "moe.router.score_function=here")
    (tmp_path / "here.py").write_text("raise KeyError('beside')")
    (work / "beside.py").write_text("raise KeyError('work')")
    load("plugins: [beside.py]")
    load("", "plugins=[here.py]")
    with pytest.raises(UserError, match="KeyError: 'beside'"):
        load("plugins: [here.py]")


def test_a_saved_file_finds_its_plugins(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The YAML that names a plugin may be a base in another folder; the saved one lies in a third."""
    for folder in ("mine", "other"):
        (tmp_path / folder).mkdir()
    (tmp_path / "mine/parts.py").write_text(GATE.format(name="of_base"))
    text = "plugins: [parts.py]\nmoe: {router: {score_function: of_base}}\n"
    (tmp_path / "mine/base.yaml").write_text(text)
    found = []
    for work in ("", "mine", "other"):
        monkeypatch.chdir(tmp_path / work)
        config = load("base: mine/base.yaml")
        (tmp_path / "other/saved.yaml").write_text(dump_yaml(config))
        assert load_config(tmp_path / "other/saved.yaml") == config
        assert load_config(None, [f"plugins={config.plugins}"]).plugins == config.plugins
        found += config.plugins
    assert found == ["mine/parts.py", "parts.py", str(tmp_path / "mine/parts.py")]
    (tmp_path / "mine/parts.py").unlink()  # as on another machine
    with pytest.raises(UserError, match=rf"^plugins: no file '{tmp_path}/mine/parts.py'; expected a path"):
        load_config(tmp_path / "other/saved.yaml")


def test_two_plugins_of_one_name_refused(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text(GATE.format(name="same"))
    with pytest.raises(UserError, match=r"^plugins: 'second.py' failed at line 5: ValueError: .* 'same' is"):
        load("plugins: [first.py, second.py]")


@pytest.mark.parametrize("case", cases("plugins"))
def test_a_plugin_that_raises_or_is_missing(
    load: Load,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
    expect_message: Callable[..., None],
) -> None:
    monkeypatch.chdir(tmp_path)
    if "file" in case.row:
        (tmp_path / "bad.py").write_text(case["file"])
    for _ in range(2):  # a plugin that failed is not taken for loaded the second time
        expect_message(case, told(lambda: load(case["text"]), tmp_path))


CONFIG = """
from __future__ import annotations
from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable
from megamoe.moe.score_functions.softmax import SoftmaxScoreFunction
from megamoe.registry import register

if TYPE_CHECKING:
    from somewhere import Thing


@register("score_function", "bad_{name}")
class Gate(SoftmaxScoreFunction):
    @dataclass
    class Config:
        option: {option} = 1

        def __post_init__(self):
            {body}
"""


@pytest.mark.parametrize(
    ("name", "option", "body", "expected"),
    [
        ("hint", "Thing", "pass", ": PydanticUndefinedAnnotation: name 'Thing' is not defined"),
        ("nested", "list[Thing]", "pass", ": PydanticUndefinedAnnotation: name 'Thing' is not defined"),
        ("literal", "int[str]", "pass", ": TypeError: type 'int' is not subscriptable"),
        ("post", "int", "self.option + 'a'", " at line 19 of post.py: TypeError: unsupported operand type"),
    ],
)
def test_a_config_that_cannot_be_built_is_one_line(
    load: Load, tmp_path: Path, name: str, option: str, body: str, expected: str
) -> None:
    (tmp_path / f"{name}.py").write_text(CONFIG.format(name=name, option=option, body=body))
    with pytest.raises(UserError) as caught:
        load(f"plugins: [{name}.py]\nmoe: {{router: {{score_function: bad_{name}}}}}")
    message = str(caught.value)
    assert "\n" not in message and "http" not in message
    assert f": moe.router.score_function: the Config of the score function 'bad_{name}' fai" in message
    assert expected in message


def test_an_option_that_yaml_cannot_express(load: Load, tmp_path: Path) -> None:
    text = CONFIG.format(name="object", option="Callable | None", body="pass")
    (tmp_path / "object.py").write_text(text.replace("= 1", "= None"))
    load("plugins: [object.py]\nmoe: {router: {score_function: bad_object}}")
    with pytest.raises(UserError, match="moe.router.score_function.option.*: expected .*, found 3$"):
        load("plugins: [object.py]\nmoe: {router: {score_function: {name: bad_object, option: 3}}}")


def test_a_module_by_its_name(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "names.py").write_text("NAME = 'of_module'\n")  # a file beside it
    router = "from my_package.names import NAME\n" + GATE.replace('"{name}"', "NAME").format()
    (tmp_path / "my_package" / "router.py").write_text(router)
    config = load("plugins: [my_package.router]\nmoe: {router: {score_function: of_module}}")
    assert config.moe.router.score_function.name == "of_module"
    (tmp_path / "my_broken.py").write_text("import no_such_module")
    with pytest.raises(UserError, match="^plugins: 'my_broken' failed: ModuleNotFoundError: .*such_module"):
        load("plugins: [my_broken]")


def test_an_entry_point_of_a_package(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    info = tmp_path / "their_router-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-router\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[megamoe.plugins]\ntheirs = their_router\n")
    (tmp_path / "their_router.py").write_text(GATE.format(name="of_entry_point"))
    load("seed: 1")
    assert "their_router" not in sys.modules
    with pytest.raises(UserError, match=r"no module 'their'; .* megamoe.plugins; did you mean 'theirs'\?"):
        load("plugins: [their]")
    config = load("plugins: [theirs]\nmoe: {router: {score_function: of_entry_point}}")
    assert config.moe.router.score_function.name == "of_entry_point"


def test_a_plugin_that_exits_does_not_end_the_launch_as_finished(
    pretrain: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At its import, and inside a part while the model is built."""
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    assert pretrain("plugins=[leaves.py]") == 2
    assert "plugins: 'leaves.py' failed at line 2: SystemExit: 0" in capsys.readouterr().err
    inside = PLUGIN.replace("super().__init__(config, dims)", "raise SystemExit(0)")
    (tmp_path / "inside.py").write_text(inside)
    assert pretrain("plugins=[inside.py]", "moe.router.scorer=two_layers") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: sys.exit(0) was called at line ") and line.endswith("raise an error")


def test_changed_code_is_told(
    pretrain: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a resume, and by what opens the checkpoint, where each line comes once."""
    from megamoe.apps.evaluation.trained_model import session

    plugins, checkpoint = "plugins=[mine.py]", "checkpoint={every: 1, keep: 9}"
    (tmp_path / "mine.py").write_text(PLUGIN)
    assert pretrain(plugins, checkpoint, "train.steps=1", "moe.router.scorer=two_layers") == 0
    run = (plugins, checkpoint, "--resume", "moe.router.scorer=two_layers")
    assert pretrain(*run, "train.steps=2") == 0
    assert "plugin" not in capsys.readouterr().out
    (tmp_path / "mine.py").write_text(f"{PLUGIN}\n# edited\n")
    assert pretrain(*run, "train.steps=3") == 0
    line = "changed since the checkpoint: plugin mine.py (another SHA-256)"
    assert line in capsys.readouterr().out.splitlines()
    assert pretrain(*run, "train.steps=4") == 0
    assert "plugin" not in capsys.readouterr().out
    with session([plugins]) as ranks:
        for step in (4, 1, 2):
            ranks.check(Path(f"runs/a/checkpoints/step_{step:08d}"))
    assert capsys.readouterr().err.splitlines() == [f"warning: {line}"]
