"""Whatever decides a run is compared between ranks, and the message names it."""

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import megamoe
from megamoe import registry
from megamoe.apps.prepare.prepare import Preparation, prepare
from megamoe.config import RunConfig, load_config, to_dict
from megamoe.data.card import DataFiles
from megamoe.data.vocabulary import Vocabulary, resolve_vocabulary
from megamoe.parallel.launch import World
from megamoe.parallel.rank_consistency import first_difference
from megamoe.train import rank_facts
from megamoe.train.rank_facts import MAY_DIFFER, facts_of_files, facts_of_start
from tests.support.tiny import VOCABULARY, tiny

WORLD = World(0, 2, 0, torch.device("cpu"), "gloo")
# With every optional section, list and kind of part.
FULL = (
    "data.sources=[{path: a, weight: 2}, b]",
    "data.validation.books=[c]",
    "data.mock=false",
    "train.batch_rampup={start: 4, increment: 4, samples: 100}",
    "moe.layers.at=[1]",
    "moe.layers.insert_after=[2]",
    "moe.frozen=[experts]",
    "moe.router=deepseek_v3",
    "moe.losses.z_loss=0.1",
    "plugins=[]",
    "log.wandb.tags=[x]",
)


def leaves(tree: Any, key: str = "", path: tuple[Any, ...] = ()) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Every value of a configuration that holds no other: its dotted key, and the way to it."""
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from leaves(value, f"{key}.{name}" if key else name, (*path, name))
    elif isinstance(tree, list) and tree:
        for place, value in enumerate(tree):
            yield from leaves(value, f"{key}[{place}]", (*path, place))
    else:
        yield key, path


def changed(tree: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    """Return a copy with another value at that place, of the same type if there is one."""
    tree = copy.deepcopy(tree)
    node: Any = tree
    for step in path[:-1]:
        node = node[step]
    before = node[path[-1]]
    if isinstance(before, bool):
        node[path[-1]] = not before
    elif isinstance(before, int | float):
        node[path[-1]] = before + before / 64 if before else 1
    elif isinstance(before, str):
        node[path[-1]] = f"{before}x"
    else:
        node[path[-1]] = ["x"] if isinstance(before, list) else "x"
    return tree


CONFIG = to_dict(tiny(*FULL))
LEAVES = dict(leaves(CONFIG))


def test_the_configuration_here_has_every_section() -> None:
    assert LEAVES.keys() >= {"optimizer.lr", "train.batch_rampup.start", "moe.losses.z_loss.weight", "seed"}
    assert len(LEAVES) > 120


@pytest.mark.parametrize("key", LEAVES)
def test_any_key_that_differs_is_named(key: str) -> None:
    other = changed(CONFIG, LEAVES[key])
    facts = [{"configuration": rank_facts.configuration_facts(tree)} for tree in (CONFIG, other)]
    assert first_difference(facts[0], facts[0]) is None
    found = first_difference(*facts)
    if any(key == free or key.startswith(f"{free}.") for free in MAY_DIFFER):
        assert found is None
    else:
        assert found is not None and found[:2] == ("configuration", key)
        assert found[2] != found[3]


def test_keys_of_the_log_by_which_ranks_exchange_something_are_compared() -> None:
    """A rank with another value would wait for the others in a collective that they do not enter."""
    assert rank_facts.configuration_facts(CONFIG)["log"].keys() == {"routing"}


def facts_of(config: RunConfig, vocabulary: int = VOCABULARY, **more: Any) -> Any:
    known = {"deepspeed": {}, "resume_from": None, "vocabulary": Vocabulary(vocabulary, 0, None)} | more
    return facts_of_start(config, WORLD) | facts_of_files(config, config.data, **known)


def test_versions_ranks_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    first = facts_of_start(tiny(), WORLD)
    for name in ("torch", "deepspeed", "megatron-core"):
        monkeypatch.setattr(
            rank_facts, "_version", lambda asked, name=name: "0.0" if asked == name else _version(asked)
        )
        assert first_difference(first, facts_of_start(tiny(), WORLD))[:2] == ("versions", name)  # type: ignore[index]
    monkeypatch.undo()
    monkeypatch.setattr(megamoe, "__version__", "9")
    assert first_difference(first, facts_of_start(tiny(), WORLD))[3] == "9"  # type: ignore[index]
    monkeypatch.undo()
    other = World(0, 3, 0, torch.device("cuda"), "nccl")
    found = first_difference(first, facts_of_start(tiny(), other))
    assert found == ("environment", "WORLD_SIZE", 2, 3)


_version = rank_facts._version


def test_another_line_of_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = facts_of_start(tiny(), WORLD)
    copied = tmp_path / "megamoe"
    shutil.copytree(Path(megamoe.__file__).parent, copied, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(megamoe, "__file__", str(copied / "__init__.py"))
    for name in ("train/step.py", "cpu_kernels/rows.cpp"):
        rank_facts._own_source.cache_clear()
        assert first_difference(first, facts_of_start(tiny(), WORLD)) is None
        before = (copied / name).read_bytes()
        (copied / name).write_bytes(before + b"\n")
        rank_facts._own_source.cache_clear()
        found = first_difference(first, facts_of_start(tiny(), WORLD))
        assert found is not None and found[:2] == ("source", f"megamoe/{name} (SHA-256)")
        (copied / name).write_bytes(before)
    rank_facts._own_source.cache_clear()


def test_another_line_of_plugin(tmp_path: Path, own_registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is in a single file, or in any file of the plugin's package."""
    package = tmp_path / "own_parts_of_mine"
    package.mkdir()
    for name in ("__init__.py", "scorers.py", "helper.py"):
        (package / name).write_text("")
    (tmp_path / "own.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins = [str(tmp_path / "own.py"), "own_parts_of_mine.scorers"]
    config = load_config(None, [f"plugins=[{', '.join(plugins)}]"])
    first = facts_of_start(config, WORLD)
    for plugin, file in ((plugins[0], "own.py"), (plugins[1], "own_parts_of_mine/helper.py")):
        (tmp_path / file).write_text("x = 1\n")
        found = first_difference(first, facts_of_start(config, WORLD))
        assert found is not None and found[1] == f"plugin {plugin}: {Path(file).name} (SHA-256)"
        (tmp_path / file).write_text("")
    assert registry.plugin_files("never loaded") == {}


def test_other_data(tmp_path: Path) -> None:
    """Under the same name and of the same size, with a card and without."""
    found = []
    for text in ("to be or not", "to be or nut", "to be"):
        (tmp_path / "text.txt").write_text(text)
        prefix = tmp_path / "train"
        prepare(Preparation(str(prefix), [str(tmp_path / "text.txt")], progress=False, overwrite=True))
        config = tiny("data.mock=false", f"data.sources=[{prefix}]")
        vocabulary = resolve_vocabulary(config.data, None).size
        with_card = facts_of(config, vocabulary)
        DataFiles(prefix).card.unlink()
        found.append((with_card, facts_of(config, vocabulary)))
    (card, bare), (other_card, _), (_, shorter) = found
    assert first_difference(card, other_card)[:2] == ("data", f"data {prefix}.bin (SHA-256)")  # type: ignore[index]
    assert first_difference(bare, shorter)[:2] == ("data", f"data {prefix}.bin (bytes)")  # type: ignore[index]
    index = DataFiles(prefix).idx
    content = bytearray(index.read_bytes())
    content[-1] ^= 1
    index.write_bytes(content)
    message = first_difference(shorter, facts_of(config, vocabulary))
    assert message is not None and message[1] == f"data {prefix}.idx's head and tail (SHA-256)"


def test_another_vocabulary_deepspeed_file_or_checkpoint(tmp_path: Path) -> None:
    first = facts_of(tiny())
    assert first_difference(first, facts_of(tiny())) is None
    assert first_difference(first, facts_of(tiny(), 47)) == ("vocabulary", "vocabulary", VOCABULARY, 47)
    stages = [{"zero_optimization": {"stage": stage}} for stage in (1, 2)]
    files = [facts_of(tiny(), deepspeed=content) for content in stages]
    expected = ("deepspeed", "parallel.deepspeed: zero_optimization.stage", 1, 2)
    assert first_difference(*files) == expected
    offload = [{"offload_optimizer": {"device": "nvme", "nvme_path": disk}} for disk in ("/a", "/b")]
    files = [facts_of(tiny(), deepspeed={"zero_optimization": content}) for content in offload]
    assert first_difference(*files) is None  # a disk of each machine
    found = [first]
    for sums in ("a", "b"):
        folder = tmp_path / "step_00000001"
        folder.mkdir(exist_ok=True)
        (folder / "SHA256SUMS").write_text(sums)
        found.append(facts_of(tiny(), resume_from=folder))
    for other in found[:2]:
        message = first_difference(other, found[2])
        assert message is not None and message[:2] == ("checkpoints", "checkpoint to go on from")
    init = [facts_of(tiny(*more)) for more in ((), (f"checkpoint.init.path={folder}",))]
    assert first_difference(*[{"checkpoints": facts["checkpoints"]} for facts in init]) is not None
