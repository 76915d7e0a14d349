"""The rules of docs/change/architecture.md, checked by reading the sources: imports between packages, sizes.

Nothing is imported here; every rule reads the syntax trees.
"""

import ast
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests import budgets

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megamoe"
FILES = sorted(PACKAGE.rglob("*.py"))
# What may patch other libraries: megamoe.compat, and the pretended device of the plan.
COMPAT = {*(PACKAGE / "compat").glob("*.py"), PACKAGE / "apps" / "plan" / "fake_cuda.py"}
SCRIPTS = sorted([*ROOT.glob("*.py"), *(ROOT / "tools").glob("*.py")])
OTHERS = sorted(path for name in ("tests", "benchmarks", "docs") for path in (ROOT / name).rglob("*.py"))
PACKAGES = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}

FOUNDATION = {"config", "errors", "registry", "io", "host_memory", "redaction", "object_storage"}
SHARDING = FOUNDATION | {"compat", "moe", "kernels", "parallel", "parallel.zero", "optim"}
# What each package of the core may import of megamoe, beside itself (`megamoe`: the version). No
# list has an application: the core imports none of them. `parallel.zero` counts as a package of its own.
CORE = {
    "errors": {"redaction"},
    "io": set(),
    "host_memory": set(),
    "redaction": set(),
    "object_storage": {"errors", "redaction"},
    "registry": {"errors", "io"},
    "compat": {"errors"},
    "config": {"errors", "registry", "io", "object_storage"},
    "kernels": {"compat"},
    "moe": FOUNDATION | {"compat", "kernels"},
    "cpu_kernels": {"compat", "kernels"},
    "zoo": FOUNDATION | {"data", "moe", "kernels", "objectives"},
    "data": FOUNDATION | {"compat", "megamoe"},
    "metrics": FOUNDATION,
    "model": FOUNDATION | {"compat", "moe", "kernels"},
    "parallel": FOUNDATION | {"compat", "moe", "kernels"},
    "optim": FOUNDATION | {"compat", "kernels", "parallel"},
    "parallel.zero": SHARDING,
    "resilience": FOUNDATION | {"metrics", "parallel"},
    "checkpoint": SHARDING | {"resilience"},
    "objectives": FOUNDATION | {"data"},
    "validation": SHARDING | {"data", "model", "objectives"},
    "train": SHARDING
    | {"data", "metrics", "model", "objectives", "resilience", "checkpoint", "validation", "megamoe"},
    "cli": {"registry", "resilience"},
    "__main__": {"train", "cli"},
}
# What each application may import of the core and of other applications.
MODELS = SHARDING | {"data", "model", "objectives", "checkpoint", "train", "validation", "resilience"}
APPS = {
    "apps.chat": {"apps.command", "apps.prepare"} | FOUNDATION | {"data", "objectives", "megamoe"},
    "apps.checkpoints": SHARDING | {"apps.command", "checkpoint", "resilience"},
    "apps.command": FOUNDATION | {"compat", "resilience"},
    "apps.cluster": MODELS | {"apps.command", "metrics"},
    "apps.evaluation": {"apps.command"} | MODELS | {"apps.routing_record", "metrics"},
    "apps.finetune": {"apps.command"} | MODELS | {"apps.evaluation"},
    "apps.generation": {"apps.command"} | MODELS | {"apps.chat", "apps.evaluation", "apps.translation"},
    "apps.hf": FOUNDATION
    | {"apps.checkpoints", "apps.chat", "apps.command"}
    | {"checkpoint", "compat", "data", "parallel", "validation"},
    "apps.lab": {"apps.command", "apps.finetune", "apps.report"}
    | FOUNDATION
    | {"compat", "metrics", "resilience", "train", "validation", "megamoe"},
    "apps.lm_eval": {"apps.command"} | MODELS | {"apps.evaluation", "apps.generation"},
    "apps.plan": {"apps.command", "cpu_kernels"} | MODELS | {"metrics"},
    "apps.prepare": {"apps.command"} | FOUNDATION | {"compat", "data", "megamoe"},
    "apps.reference": FOUNDATION | {"apps.command"},
    "apps.report": {"apps.command"} | FOUNDATION | {"metrics"},
    "apps.routing_analysis": {"apps.command"} | MODELS | {"apps.evaluation", "apps.report", "metrics"},
    "apps.routing_record": FOUNDATION | {"data", "model", "moe", "parallel", "train"},
    "apps.show_batch": {"apps.command"} | MODELS,
    "apps.verify": {"apps.command", "apps.plan", "apps.routing_record", "apps.chat", "apps.translation"}
    | MODELS
    | {"metrics"},
    "apps.translation": {"apps.command", "apps.prepare"} | FOUNDATION | {"data", "objectives", "megamoe"},
}
MAY_IMPORT = CORE | APPS
# Each vendor's modules, and the packages that may import them.
VENDORS = {
    "megatron": {"model", "compat"},
    "megatron.core.parallel_state": {"parallel", "parallel.zero", "optim", "checkpoint"},
    "megatron.core.datasets": {"data"},
    "deepspeed": {*("parallel", "parallel.zero", "optim", "checkpoint", "compat", "validation")},
    "transformer_engine": {"model", "compat", "validation"},
    "apex": {"model"},
    "triton": {"kernels", "compat"},
    "lm_eval": {"apps.lm_eval"},
    "pyarrow": {"apps.prepare"},
    "fsspec": {"object_storage", "data", "checkpoint"},
    "sklearn": {"apps.finetune"},
    "scipy": {"apps.finetune", "apps.lab"},
    "wandb": {"metrics"},
}
# What megamoe.compat has of them belongs to the same packages.
VENDORS |= {
    "megamoe.compat.megatron_compat": VENDORS["megatron"],
    "megamoe.compat.megatron_datasets": VENDORS["megatron.core.datasets"],
    "megamoe.compat.megatron_groups": VENDORS["megatron.core.parallel_state"],
    "megamoe.compat.deepspeed_compat": VENDORS["deepspeed"],
    "megamoe.compat.deepspeed_zero": VENDORS["deepspeed"],
    "megamoe.compat.transformer_engine_compat": VENDORS["transformer_engine"],
}
# Attributes of other libraries that begin with an underscore, and yet are their public interface.
# The hooks are there to be set.
PUBLIC = {"os._exit", "sys.excepthook", "threading.excepthook", "warnings.formatwarning"}
# Internals of DeepSpeed without an underscore; so are all attributes that begin with ds_.
INTERNALS = {
    "averaged_gradients", "backup_optimizer", "bf16_groups", "bit16_groups", "build_shm_op", "cdb",
    "cur_scale", "enable_backward_allreduce", "fp16_groups", "fp32_partitioned_groups_flat",
    "grad_position", "loss_scaler",
}  # fmt: skip
DANGEROUS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
NAMES_PARTS = {
    "moe/presets.py",
    "zoo/presets.py",
    "config/parts.py",
    "config/schema.py",
}  # presets and defaults
PAGE = (ROOT / "docs/change/architecture.md").read_text(encoding="utf-8")


def each_of(paths: list[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Make the check of one file a test of all files, which names every file that fails it."""

    def decorate(check: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            problems = []
            for path in paths:
                try:
                    check(path)
                except AssertionError as error:
                    problems.append(f"{path.relative_to(ROOT)}: {error}")
            assert not problems, "\n".join(problems)

        return test

    return decorate


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    """Every imported dotted name: `from a import b` is a.b; import_module("a") and find_spec("a") count."""
    return tuple(_imports_of(path))


def _imports_of(path: Path) -> Iterator[str]:
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__", "find_spec"):
            yield from (str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def called(node: ast.Call) -> str:
    """The last part of what is called: `load` of torch.load(...)."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


@cache
def calls_by_name(path: Path) -> dict[str, list[ast.Call]]:
    found: dict[str, list[ast.Call]] = {}
    for node in nodes_of(path):
        if isinstance(node, ast.Call):
            found.setdefault(called(node), []).append(node)
    return found


def calls_of(path: Path, dotted: str) -> Iterator[ast.Call]:
    calls = calls_by_name(path).get(dotted.split(".")[-1], [])
    yield from (call for call in calls if ast.unparse(call.func) == dotted)


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions, methods and functions within them; expressions, most of a file, are not visited."""
    left: list[ast.AST] = [tree_of(path)]
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            inside = getattr(node, field, ())
            left += inside if isinstance(inside, list) else ()


def within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def package_of(path: Path) -> str:
    """`moe` of megamoe/moe/router.py, `errors` of megamoe/errors.py, `apps.hf` of apps/hf/rules.py."""
    return our_package("megamoe." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts))


def our_package(name: str) -> str:
    """The package of an imported megamoe.x.y; `megamoe` of its __init__ and of what that has."""
    parts = name.split(".")[1:]
    first = parts[0] if parts else "__init__"
    if first == "apps" and len(parts) > 1 and parts[1] != "__init__":
        return f"apps.{parts[1]}"
    if parts[:2] == ["parallel", "zero"]:
        return "parallel.zero"
    return (
        first
        if first in PACKAGES or ((PACKAGE / f"{first}.py").is_file() and first != "__init__")
        else "megamoe"
    )


def test_every_package_has_its_rule() -> None:
    assert {package_of(path) for path in FILES} - {"megamoe", "apps"} == MAY_IMPORT.keys()


def test_the_core_imports_no_application() -> None:
    assert not [name for names in CORE.values() for name in names if name.startswith("apps")]
    for path in FILES:
        if not package_of(path).startswith("apps"):
            assert not [name for name in imports_of(path) if within(name, "megamoe.apps")], path


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions and for types count."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
    imported = {
        module: {
            name if name in modules else name.rpartition(".")[0]
            for name in imports_of(path)
            if within(name, "megamoe")
        }
        for module, path in modules.items()
    }
    left = {module: names & modules.keys() - {module} for module, names in imported.items()}
    while free := [module for module, names in left.items() if not names & left.keys()]:
        for module in free:
            del left[module]
    assert not left, f"in a circle, or importing one: {sorted(left)}"


@each_of(FILES)
def test_arrows_between_packages_point_one_way(path: Path) -> None:
    package = package_of(path)
    imported = {our_package(name) for name in imports_of(path) if within(name, "megamoe")}
    assert imported <= MAY_IMPORT.get(package, set()) | {package}


@each_of(FILES)
def test_each_vendor_has_one_package(path: Path) -> None:
    for name in imports_of(path):
        rules = [module for module in VENDORS if within(name, module)]
        if rules:
            allowed = set().union(*(VENDORS[module] for module in rules))
            assert package_of(path) in allowed, f"{name} belongs to {sorted(allowed)}"


@each_of(SCRIPTS)
def test_entry_scripts_leave_vendors_to_the_packages(path: Path) -> None:
    assert not [name for name in imports_of(path) if any(within(name, vendor) for vendor in VENDORS)]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def our_private_names() -> Counter[str]:
    """How often a private name is bound in megamoe: as a function, class, attribute or field."""
    found: list[str] = []
    for path in FILES:
        for node in nodes_of(path) if path not in COMPAT else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.append(node.name)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                found.append(node.attr if isinstance(node, ast.Attribute) else node.id)
    return Counter(filter(is_private, found))


def is_vendors(node: ast.Attribute) -> bool:
    """Whether an attribute of that name is none of ours: nothing outside of `self` and `super()` is."""
    if not is_private(node.attr):
        return node.attr in INTERNALS or node.attr.startswith("ds_")
    owner = ast.unparse(node.value)
    if owner == "super()":
        return our_private_names()[node.attr] < 2  # the override, and what it overrides
    return owner not in ("self", "cls") or node.attr not in our_private_names()


def vendor_names(path: Path) -> set[str]:
    """The names in a file by which it knows modules, classes and functions of other libraries."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                first = (node.module or "" if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0]
                if first != "megamoe":
                    found.add(alias.asname or alias.name.split(".")[0])
        elif isinstance(node, ast.Assign) and "import_module(" in ast.unparse(node.value):
            found |= {ast.unparse(target) for target in node.targets}
    return found


def vendor_internals(path: Path) -> Iterator[str]:
    """What a file uses of other libraries beyond their public interface, or patches in them."""
    names = vendor_names(path)
    for node in nodes_of(path):
        place = f"line {getattr(node, 'lineno', 0)}: "
        if isinstance(node, ast.Attribute):
            if ast.unparse(node) in PUBLIC:
                continue
            if is_vendors(node):
                yield place + ast.unparse(node)
            elif not isinstance(node.ctx, ast.Load) and ast.unparse(node).split(".")[0] in names:
                yield f"{place}{ast.unparse(node)} = ..."
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] != "megamoe":
            yield from (place + alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Call) and called(node) == "replaced":
            yield from (place + ast.unparse(node) for _ in names & {ast.unparse(node.args[0]).split(".")[0]})
        elif isinstance(node, ast.Call) and called(node) in ("getattr", "hasattr", "setattr", "delattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            patched = called(node) in ("setattr", "delattr") and ast.unparse(node.args[0]) in names
            if patched or is_private(str(name)) or str(name) in INTERNALS or str(name).startswith("ds_"):
                yield place + ast.unparse(node)


@each_of([path for path in FILES if path not in COMPAT] + SCRIPTS)
def test_internals_of_vendors_are_touched_in_compat_alone(path: Path) -> None:
    assert not list(vendor_internals(path))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.cuda.current_device = lambda: 0",
        "from deepspeed.utils import groups as g\ng._EXPERT_PARALLEL_GROUP['a'] = 1",
        "import importlib\nbackend = importlib.import_module('deepspeed.comm.torch')\nbackend.build = None",
        "import torch\nsetattr(torch, 'x', 1)",
        "import torch\nwith replaced(torch.cuda, x=1): ...",
        "def f(iterator): return iterator._workers",
        "def f(iterator): return getattr(iterator, '_workers', ())",
        "class A:\n    def f(self): return self._init_group({})",
        "class A:\n    def _build_indices(self): return super()._build_indices()",
        "from torch.optim.adam import _single_tensor_adam",
        "def f(parameter): return parameter.ds_tensor",
        "def f(engine): engine.enable_backward_allreduce = False",
    ],
)
def test_use_of_internals_is_seen(source: str, tmp_path: Path) -> None:
    path = tmp_path / "source.py"
    path.write_text(source)
    assert list(vendor_internals(path))


@each_of(FILES + SCRIPTS)
def test_the_package_uses_no_tools_of_tests(path: Path) -> None:
    assert not [name for name in imports_of(path) if name.split(".")[0] in ("unittest", "pytest", "tests")]


def test_the_kernels_of_a_run_are_chosen_once() -> None:
    """Where the run is resolved; all others get them as an argument."""
    choosing = [path for path in FILES for _ in calls_of(path, "Kernels.of")]
    assert choosing == [PACKAGE / "train" / "resolved.py"]


def test_one_class_saves_and_chooses_the_checkpoint_to_resume_from() -> None:
    """Trainer and loop ask it: what begins, publishes, uploads and judges checkpoints is not theirs."""
    names = {
        f"megamoe.checkpoint.{name}" for name in ("manager.Checkpoints", "manager.first_intact", "remote")
    }
    files = [path.name for path in (PACKAGE / "train").glob("*.py") if names & {*imports_of(path)}]
    assert files == ["saver.py"]


@each_of([path for path in COMPAT if path.name != "__init__.py"])
def test_every_entry_of_compat_gives_its_reasons_and_a_canary(path: Path) -> None:
    """Its docstring holds them, or the file's what holds for all; startup's check of versions needs none."""
    of_file = ast.get_docstring(tree_of(path)) or ""
    entries = [
        node
        for node in tree_of(path).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not is_private(node.name)
    ]
    for node in entries:
        if node.name in ("check_versions", "FlatRange", "Slices"):
            continue
        output = ast.get_docstring(node) or ""
        for heading in ("Reason: ", "Seen with: ", "Without it: ", "Canary: "):
            told = output.count(f"\n{heading}") or (heading == "Seen with: " and f"\n{heading}" in of_file)
            assert told == 1, f"{node.name}: {heading}"
        file, _, canary = output.partition("Canary: ")[2].partition("::")
        tests = ast.parse((ROOT / "tests" / "compat" / file).read_text(encoding="utf-8"))
        assert canary.strip() in {test.name for test in tests.body if isinstance(test, ast.FunctionDef)}


@each_of([path for path in FILES if package_of(path) in ("moe", "zoo")])
def test_routers_never_import_a_loss_or_the_layer(path: Path) -> None:
    """Losses read what a router decided; the layer puts the two together."""
    inside = path.relative_to(PACKAGE / package_of(path))
    if inside.name == "layer.py":
        return
    forbidden = ["megamoe.moe.layer"] + (["megamoe.moe.losses"] if inside.parts[0] != "losses" else [])
    assert not [name for name in imports_of(path) if any(within(name, module) for module in forbidden)]


def parts_of(path: Path) -> set[str]:
    """The names that a file registers parts under."""
    calls = calls_of(path, "register")
    return {str(call.args[1].value) for call in calls if isinstance(call.args[1], ast.Constant)}


@cache
def parts() -> dict[Path, set[str]]:
    """Return `parts_of` of every file."""
    return {path: parts_of(path) for path in FILES if path.name != "registry.py"}


@each_of([path for path in FILES if str(path.relative_to(PACKAGE)) not in NAMES_PARTS])
def test_no_file_knows_a_part_by_name_or_class(path: Path) -> None:
    """Parts ask each other for capabilities: a plugin's part is then as good as one built in."""
    modules = {
        ".".join(other.relative_to(ROOT).with_suffix("").parts)
        for other, names in parts().items()
        if names and other != path
    }
    assert not [name for name in imports_of(path) if any(within(name, module) for module in modules)]
    others = {name for other, names in parts().items() for name in names if other != path} - {"none"}
    constants = {
        ast.unparse(node.targets[0]): words_in(node.value)
        for node in tree_of(path).body
        if isinstance(node, ast.Assign)
    }
    for node in nodes_of(path):
        if isinstance(node, ast.Compare) and compares_names(node):
            # Classes of `hf` have certain parts. Other names, as of analyses, are no attributes.
            of_parts = isinstance(node.left, ast.Attribute) and package_of(path) != "apps.hf"
            named = [
                constants.get(n.id, set()) for n in ast.walk(node) if isinstance(n, ast.Name) and of_parts
            ]
            found = words_in(node).union(*named) & others
            assert not found, f"line {node.lineno} asks for {sorted(found)} by name"


def words_in(node: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def compares_names(node: ast.Compare) -> bool:
    """Whether `x.name`, `name` or `x_name` is compared; options may have values that are also names."""
    sides = [node.left, *node.comparators]
    found = [getattr(part, "attr", getattr(part, "id", "")) for side in sides for part in ast.walk(side)]
    stages = ("scorer", "mask", "score_function", "selector", "capacity", "loss")
    return any(word.endswith("name") or word in stages for word in found)


@each_of(FILES + SCRIPTS)
def test_nothing_runs_code_from_data(path: Path) -> None:
    assert not [name for name in imports_of(path) if name.split(".")[0] in DANGEROUS]
    assert not [*calls_of(path, "eval"), *calls_of(path, "exec")]
    for call in calls_of(path, "torch.load"):
        assert "weights_only=True" in ast.unparse(call), f"line {call.lineno}"
    for unsafe in ("yaml.load_all", "yaml.full_load", "yaml.unsafe_load"):
        assert not list(calls_of(path, unsafe))
    for call in calls_of(path, "yaml.load"):
        loader = next(ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "Loader")
        bases = [
            [ast.unparse(base) for base in node.bases]
            for node in nodes_of(path)
            if isinstance(node, ast.ClassDef) and node.name == loader
        ]
        assert loader == "yaml.SafeLoader" or bases == [["yaml.SafeLoader"]], f"line {call.lineno}"


@cache
def length_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_packages_stay_within_their_budgets() -> None:
    """What adds lines removes as many; `python tests/budgets.py` lists them."""
    most, now = budgets.budgets(), budgets.lines_now()
    over = {name: (now[table][name], rows[name]) for table, rows in most.items() for name in rows}
    assert not {name: each for name, each in over.items() if each[0] > each[1]}
    whole = sum(map(budgets.lines_of_code, FILES))
    counted = sum(now["core"].values()) + sum(now["applications"].values())
    assert whole <= counted, "a package has no budget"


def test_budgets_only_fall() -> None:
    """Each committed version of the file has sums at most those of the version before."""
    sums = [budgets.sums(version) for version in (budgets.budgets(), *budgets.earlier_budgets())]
    for newer, older in itertools.pairwise([*sums, budgets.MOST]):
        assert all(newer[table] <= older[table] for table in older), (newer, older)


def test_lines_of_code_are_counted_without_comments_and_docstrings(tmp_path: Path) -> None:
    path = tmp_path / "source.py"
    path.write_text('"""Doc."""\n\n# comment\nx = """a\n\nb"""\ndef f():\n    """Doc."""\n    return x')
    assert budgets.lines_of_code(path) == 5
    script = tmp_path / "code.cpp"
    script.write_text("// comment\n\n/* more\n * more */\nint x;\n")
    assert budgets.lines_of_code(script) == 1


def test_the_page_leads_to_files_that_exist() -> None:
    links = re.findall(r"\]\(\.\./\.\./(megamoe/[^)#]+)\)", PAGE)
    assert len(links) >= 15 and all((ROOT / link).exists() for link in links)


@each_of(FILES + SCRIPTS + OTHERS)
def test_every_file_says_what_it_is_for_and_stays_readable(path: Path) -> None:
    assert ast.get_docstring(tree_of(path))
    assert length_of(path) <= 600


def test_functions_are_found_in_every_statement(tmp_path: Path) -> None:
    path = tmp_path / "source.py"
    path.write_text(
        "class A:\n async def a(self):\n  def b(): pass\nif 1: pass\nelse:\n def c(): pass\n"
        "try:\n def d(): pass\nexcept E:\n def e(): pass\nfinally:\n def f(): pass\n"
        "for x in y:\n while z:\n  with w:\n   def g(): pass\nmatch x:\n case 1:\n  def h(): pass\n"
    )
    assert sorted(node.name for node in functions_of(path)) == [*"abcdefgh"]


@each_of(FILES + SCRIPTS + OTHERS)
def test_functions_stay_small(path: Path) -> None:
    sizes = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions_of(path)}
    assert {name: size for name, size in sizes.items() if size >= 60} == {}
