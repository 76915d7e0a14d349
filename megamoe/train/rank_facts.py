"""Values that must be the same on all ranks of a run; `megamoe.parallel.rank_consistency` compares them."""

import hashlib
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import megamoe
from megamoe import registry
from megamoe.checkpoint.format.files import SUMS
from megamoe.config import RunConfig, to_dict
from megamoe.config.schema import DataConfig
from megamoe.data.byte_files import size_of
from megamoe.data.card import LABELLED, LABELS, DataFiles, datasets_of, load_card
from megamoe.data.stored import all_sources
from megamoe.data.vocabulary import Vocabulary
from megamoe.parallel.exchange import uses_nodes
from megamoe.parallel.launch import World, ranks_of_machine
from megamoe.parallel.rank_consistency import Facts

# Keys that may differ between ranks: they change nothing that is computed or sent. Other paths may not:
# rank 0 or all ranks write there, or the name of the cached sample index follows from the path.
MAY_DIFFER = {
    "parallel.deepspeed": "the file's content is compared, of which each machine may have a copy",
    "data.tokenizer": "the tokenizer's fingerprint is compared",
    "data.workers": "a rank's own loader processes; the batches are the same with any number",
    **dict.fromkeys(("log.every", "log.wandb", "log.tensorboard", "log.report"), "rank 0 alone writes"),
    **dict.fromkeys(
        ("log.dead_window", "log.timers", "log.peak_tflops", "log.straggler_factor"),
        "a rank's own numbers, of which those of rank 0 are written",
    ),
    "train.profiler": "a rank traces itself, and one may be enough",
}
VERSIONS = ("torch", "numpy", "megatron-core", "deepspeed", "transformer-engine")
SWAP_FOLDER = "nvme_path"  # in the DeepSpeed file: a local disk of each machine
SOURCES = (".py", ".cpp", ".h")
ENDS = 1 << 16  # bytes read at each end of an index without a card


def facts_of_start(config: RunConfig, world: World) -> Facts:
    """Return the values that need no file of the run: ranks, versions, source code and configuration."""
    return {
        "environment": {"WORLD_SIZE": world.size, "device": world.device.type, **_machine(config)},
        "versions": {"megamoe": megamoe.__version__, **{name: _version(name) for name in VERSIONS}},
        "source": {**_own_source(), **_plugin_sources(config.plugins)},
        "configuration": configuration_facts(to_dict(config)),
    }


def _machine(config: RunConfig) -> dict[str, Any]:
    """Return the ranks of this machine, if the exchange between experts follows them."""
    if config.parallel.node_size is not None or not uses_nodes(config):
        return {}
    return {"ranks of a machine, which is parallel.node_size": ranks_of_machine()}


def facts_of_files(
    config: RunConfig,
    data: DataConfig,
    vocabulary: Vocabulary,
    deepspeed: dict[str, Any],
    resume_from: Path | None,
) -> Facts:
    """Return the values that describe the run's checked inputs: data, checkpoints, the DeepSpeed file.

    Args:
        config: the run's configuration.
        data: the configuration of the data, with local copies in place of URLs.
        vocabulary: the resolved vocabulary.
        deepspeed: the content of the DeepSpeed file.
        resume_from: the checkpoint to resume from, if any.
    """
    tokenizer = vocabulary.tokenizer
    init = config.checkpoint.init.path
    return {
        "deepspeed": {
            f"parallel.deepspeed: {section}": _without_swap_folder(content)
            for section, content in deepspeed.items()
        },
        "vocabulary": {
            "vocabulary": vocabulary.size,
            "end-of-document token": vocabulary.eod,
            "tokenizer's fingerprint": tokenizer.fingerprint if tokenizer else None,
        },
        "data": {} if config.data.mock else _data(data, config.data),
        "checkpoints": {
            "checkpoint to go on from": _checkpoint(resume_from),
            "checkpoint.init.path": _checkpoint(Path(init) if init and resume_from is None else None),
        },
    }


def configuration_facts(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the resolved configuration as plain data, without the keys in `MAY_DIFFER`."""
    left = {key: value for key, value in tree.items() if f"{prefix}{key}" not in MAY_DIFFER}
    return {
        key: configuration_facts(value, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in left.items()
    }


def _without_swap_folder(content: Any) -> Any:
    if not isinstance(content, dict):
        return content
    return {key: _without_swap_folder(value) for key, value in content.items() if key != SWAP_FOLDER}


@cache
def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@cache
def _own_source() -> dict[str, str]:
    """Return the SHA-256 of every source file of the package; editable installs may differ at one version."""
    package = Path(megamoe.__file__).parent
    files = sorted(path for path in package.rglob("*") if path.suffix in SOURCES)
    return {f"megamoe/{path.relative_to(package)} (SHA-256)": _digest([path.read_bytes()]) for path in files}


def _plugin_sources(plugins: list[str]) -> dict[str, str]:
    return {
        f"plugin {plugin}: {name} (SHA-256)": _digest([path.read_bytes()])
        for plugin in plugins
        for name, path in registry.plugin_files(plugin).items()
        if path.is_file()
    }


def _data(data: DataConfig, named: DataConfig) -> dict[str, Any]:
    """Return what identifies each dataset, by the path or URL that the configuration names."""
    pairs = zip(all_sources(named), all_sources(data), strict=True)
    return {
        f"data {source.path}{path.removeprefix(local.path)}": _dataset(path)
        for source, local in pairs
        for path in datasets_of(local.path)
    }


def _dataset(path: str) -> dict[str, Any]:
    """Return the card's hashes of a dataset; without a card, sizes and the two ends of the index.

    Of examples of a task: a hash of the file and of the labels beside it, if any.
    """
    if path.endswith(LABELLED):
        both = (Path(path), Path(path).with_name(LABELS))
        return {"file (SHA-256)": _digest([file.read_bytes() for file in both if file.exists()])}
    card, files = load_card(path), DataFiles(Path(path))
    if card is not None:
        return {"bin (SHA-256)": card.bin.sha256, "idx (SHA-256)": card.idx.sha256}
    idx_size = files.idx.stat().st_size
    sizes = {"bin (bytes)": size_of(files.bin), "idx (bytes)": idx_size}
    with files.idx.open("rb") as file:
        head = file.read(ENDS)
        file.seek(max(0, idx_size - ENDS))
        return {**sizes, "idx's head and tail (SHA-256)": _digest([head, file.read(ENDS)])}


def _checkpoint(path: Path | None) -> str | None:
    """Return a checkpoint's name and one digest over its files' digests."""
    if path is None:
        return None
    sums = path / SUMS
    return f"{path.name} ({_digest([sums.read_bytes()])[:16] if sums.is_file() else f'no {SUMS}'})"


def _digest(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()
