"""What `inspect` shows of a checkpoint, as data and as text."""

from pathlib import Path
from typing import Any

import yaml

from megamoe.apps.checkpoints import verify
from megamoe.apps.checkpoints.stream import count_parameters
from megamoe.checkpoint.format.folder import candidates
from megamoe.checkpoint.format.reader import MOMENTS, MUON_MOMENT, CheckpointReader, moment_name
from megamoe.errors import UserError, printable

INTACT = "intact"
REMOVED = "removed meanwhile"  # by the run that saves beside this, or by somebody
UNREAD = "list, JSON and headers intact; tensors not read"


def describe(path: Path, integrity: str) -> dict[str, Any]:
    """Return a checkpoint's main facts as plain data. integrity: the answer of `integrity_of`.

    Raises:
        UserError: if its JSON files cannot be read.
    """
    with CheckpointReader(path, "checkpoint") as reader:
        meta, index = reader.meta, reader.index
        name = meta["config"].get("name")
        first = (MOMENTS[0], MUON_MOMENT)
        trained = sum(any(moment_name(m, it) in index["tensors"] for m in first) for it in index["shardings"])
        parameters = count_parameters(reader)
    files = file_sizes(path)
    return {
        "path": str(path),
        "run": printable(name) if isinstance(name, str) else None,
        **{key: meta[key] for key in ("step", "tokens", "samples", "skipped_steps")},
        "saved_at": printable(meta["saved_at"], 40),
        "parameters": parameters,
        "tensors": {"weights": len(index["shardings"]), "with_moments": trained},
        "vocabulary": meta["vocabulary"],
        "layout": dict(meta["layout"]),
        "files": len(files),
        "bytes": sum(files.values()),
        "integrity": integrity,
    }


def integrity_of(path: Path, quick: bool = False) -> str:
    """Return INTACT, REMOVED, or the first problem and the number of others.

    quick: do not read the tensors' bytes.
    """
    try:
        found = list(verify.problems(path, quick))
    except OSError:
        if path.exists():
            raise
        return REMOVED
    if found and not path.exists():
        return REMOVED
    if not found:
        return UNREAD if quick else INTACT
    return f"damaged: {found[0]}" + (f" (and {len(found) - 1} more)" if len(found) > 1 else "")


def as_text(facts: dict[str, Any]) -> str:
    """Return the facts as text for a terminal."""
    layout, parameters = facts["layout"], facts["parameters"]
    cut = ", ".join(f"{name} {layout[name]}" for name in ("tensor", "expert", "expert_tensor"))
    experts = f", {parameters['experts']:,} of them in routed experts" if parameters["experts"] else ""
    rows = {
        "run": facts["run"],
        "step": f"{facts['step']:,}; {facts['tokens']:,} tokens, {facts['samples']:,} sequences",
        "saved": facts["saved_at"],
        "parameters": f"{parameters['total']:,}{experts}",
        "weights": f"{facts['tensors']['weights']}, {facts['tensors']['with_moments']} with Adam's moments",
        "layout": f"{layout['ranks']} ranks: {cut}; ZeRO {layout['zero_stage']}, {layout['precision']}",
        "files": f"{facts['files']}, {size(facts['bytes'])}",
        "integrity": facts["integrity"],
    }
    return "\n".join([facts["path"], *(f"  {name:<11} {value}" for name, value in rows.items())])


def table(states: dict[Path, str], taken: Path | None) -> list[dict[str, Any]]:
    """Return a row for each checkpoint. states: `integrity_of` each. taken: the one that a resume takes."""
    rows = []
    for path, state in states.items():
        row: dict[str, Any] = {"name": printable(path.name), "resume": path == taken}
        try:
            row |= {key: value for key, value in describe(path, state).items() if key in COLUMNS}
        except UserError:
            row |= {"integrity": state, "bytes": sum(file_sizes(path).values())}
        rows.append(row)
    return rows


COLUMNS = ("step", "tokens", "saved_at", "bytes", "integrity")


def table_as_text(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text for a terminal. A star marks the checkpoint that a resume takes."""
    lines = [f"  {'checkpoint':<24} {'tokens':>16} {'size':>9}  {'saved':<26} integrity"]
    for row in rows:
        tokens = f"{row['tokens']:,}" if "tokens" in row else "-"
        lines.append(
            f"{'*' if row['resume'] else ' '} {row['name']:<24} {tokens:>16} {size(row['bytes']):>9}  "
            f"{row.get('saved_at', '-'):<26} {row['integrity']}"
        )
    return "\n".join(lines)


def taken_by_resume(states: dict[Path, str]) -> Path | None:
    """Return the checkpoint of one folder that a resume takes: the first intact one in its order, or None."""
    order = candidates(next(iter(states)).parent)
    return next((path for path in order if states.get(path) in (INTACT, UNREAD)), None)


def config_as_yaml(path: Path) -> str:
    """Return the configuration of the saving run as YAML, for `--config`."""
    with CheckpointReader(path, "checkpoint") as reader:
        return str(yaml.safe_dump(reader.meta["config"], sort_keys=False, default_flow_style=False))


def file_sizes(path: Path) -> dict[str, int]:
    """Return the size in bytes of every entry of a folder, by its relative path. Links are not followed."""
    found = {entry: entry.lstat() for entry in path.rglob("*")} if path.is_dir() else {}
    return {str(entry.relative_to(path)): status.st_size for entry, status in found.items()}


def size(count: int) -> str:
    """Return a number of bytes as text."""
    return f"{count / 1e6:,.1f} MB"
