"""Transformer Engine's own sources, which its wheel holds in Python, beside the stand-ins and Megatron-Core.

Transformer Engine itself needs CUDA. Here its sources are parsed and not run: what the stand-ins of
tests/support/fakes and Megatron-Core's wrapper pass by name must be parameters there.
"""

import ast
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from megamoe.compat.transformer_engine_compat import FP8_ABILITY, OLDEST

FAKES = Path(__file__).parents[1] / "support/fakes"
VERSIONS = [f"transformer_engine=={OLDEST}.0", "transformer_engine"]
DOWNLOAD_S = 120
CLASSES = ("Linear", "GroupedLinear", "LayerNorm", "RMSNorm", "DotProductAttention", "LayerNormLinear")
NORMS = ("LayerNorm", "RMSNorm")
PLACES = {"DotProductAttention": "pytorch/attention"}  # of the others: pytorch/module
RECIPES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling")

Definition = ast.FunctionDef | ast.ClassDef


def parsed(text: str) -> dict[str, Definition]:
    """The functions and classes of a file, by name, also those within an `if` or `try`."""
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {node.name: node for node in reversed(found)}


def method(owner: Definition, name: str) -> ast.FunctionDef:
    for node in owner.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise AssertionError(f"{owner.name} has no {name}")


def parameters(function: Definition) -> list[str]:
    """The names of a function's parameters without `self`; with "**" where it takes any other."""
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    names = [argument.arg for argument in [*given.posonlyargs, *given.args, *given.kwonlyargs]]
    return [name for name in names if name not in ("self", "cls")] + ["**"] * (given.kwarg is not None)


def fields(recipe: Definition) -> set[str]:
    """The names of a dataclass' own fields."""
    annotated = [node.target for node in recipe.body if isinstance(node, ast.AnnAssign)]
    return {target.id for target in annotated if isinstance(target, ast.Name)}


@pytest.fixture(scope="module", params=VERSIONS)
def sources(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The Python files of the wheel, by path."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    try:
        subprocess.run(
            [*command, request.param], cwd=folder, check=True, timeout=DOWNLOAD_S, capture_output=True
        )
        (wheel,) = folder.glob("*.whl")
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        pytest.skip(f"the wheel of {request.param} cannot be had: {error}")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py")]
        found = {name: archive.read(name).decode() for name in names}
    if "transformer_engine/pytorch/__init__.py" not in found:
        pytest.skip(f"the wheel of {request.param} holds no sources for PyTorch")
    return found


def defined(sources: dict[str, str], name: str, under: str) -> Definition:
    """The definition of a function or class; of several files, the first under this folder that has one."""
    for path, text in sorted(sources.items()):
        if path.startswith(f"transformer_engine/{under}") and name in text:
            found = parsed(text).get(name)
            if found is not None:
                return found
    raise AssertionError(f"{under} has no {name}")


def fake(path: str, name: str) -> Definition:
    return parsed((FAKES / "transformer_engine" / path).read_text())[name]


def missing(wanted: list[str], found: list[str]) -> set[str]:
    """What is not among the parameters."""
    return set() if "**" in found else set(wanted) - set(found) - {"**"}


@pytest.mark.full
@pytest.mark.parametrize("name", CLASSES)
def test_stand_ins_have_the_parameters_of_the_original(sources: dict[str, str], name: str) -> None:
    """A norm's forward method is that of Transformer Engine's operations, which is called by position."""
    original = defined(sources, name, PLACES.get(name, "pytorch/module/"))
    methods = [node for node in fake("pytorch/modules.py", name).body if isinstance(node, ast.FunctionDef)]
    for each in methods:
        if each.name == "__init__" or (each.name == "forward" and name not in NORMS):
            wanted, found = parameters(each), parameters(method(original, each.name))
            assert not missing(wanted, found), (each.name, missing(wanted, found))


@pytest.mark.full
def test_functions_and_recipes_have_the_parameters_of_the_original(sources: dict[str, str]) -> None:
    for path, name, place in (
        ("pytorch/distributed.py", "checkpoint", "pytorch/distributed.py"),
        ("pytorch/attention/rope.py", "apply_rotary_pos_emb", "pytorch/attention"),
    ):
        found = parameters(defined(sources, name, place))
        wanted = parameters(fake(path, name))
        assert not missing(wanted, found), (name, missing(wanted, found))
    for name in RECIPES:
        original = fields(defined(sources, name, "common/recipe"))
        assert fields(fake("common/recipe.py", name)) <= original, name


@pytest.mark.full
def test_questions_about_fp8_are_there(sources: dict[str, str]) -> None:
    """megamoe asks `FP8GlobalStateManager` in the module fp8, where newer versions only import it."""
    assert "FP8GlobalStateManager" in sources["transformer_engine/pytorch/fp8.py"]
    manager = defined(sources, "FP8GlobalStateManager", "pytorch/")
    for name in {*FP8_ABILITY.values(), "is_fp8_enabled", "get_fp8_recipe"}:
        assert method(manager, name)
    context = parameters(defined(sources, "fp8_autocast", "pytorch/"))
    assert {"enabled", "fp8_recipe", "fp8_group"} <= set(context)


@pytest.mark.full
def test_what_the_wrapper_of_megatron_core_passes_is_taken(sources: dict[str, str]) -> None:
    spec = find_spec("megatron.core.extensions")
    assert spec is not None and spec.submodule_search_locations
    text = (Path(spec.submodule_search_locations[0]) / "transformer_engine.py").read_text()
    seen = 0
    for wrapper in parsed(text).values():
        bases = [ast.unparse(base) for base in wrapper.bases] if isinstance(wrapper, ast.ClassDef) else []
        names = [base.removeprefix("te.pytorch.") for base in bases if base.startswith("te.pytorch.")]
        for name in names:
            if name not in CLASSES:
                continue
            original = defined(sources, name, PLACES.get(name, "pytorch/module/"))
            found = parameters(method(original, "__init__"))
            for call in ast.walk(wrapper):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__":
                    wanted = [keyword.arg for keyword in call.keywords if keyword.arg]
                    assert not missing(wanted, found), (wrapper.name, missing(wanted, found))
                    seen += len(wanted)
    assert seen > 30, "the wrapper was not found"
