"""One rank of runs on the pretended device: python -m tests.cuda.rank JOB.json RANK, started by `runs.py`.

Takes part, one after the other, in all of the job's runs that have so many ranks, and writes what it found
beside the job, as <rank>.json.
"""

import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.cuda import pretended


class Watch:
    """What the device did, in the measured step of a run and over all of it."""

    def __init__(self, device: pretended.Device) -> None:
        self.device = device
        self.begin()

    def begin(self) -> None:
        """With a run."""
        pretended.findings.clear()
        pretended.new_groups.clear()
        pretended.device_uses.clear()
        self.used_at_fork: list[str] | None = None
        self.device.kernels()
        self.device.most_pinned_bytes()
        self.steps: list[dict[str, Any]] = []
        self.start: int | None = None
        self.device.most_device_bytes()
        self.before = self.device.most_device_bytes()  # what former runs have left
        self.built: dict[str, int] = {}

    def engine(self, model: Any) -> None:
        """Before a model gets its engine."""
        parameters = list(model.parameters())
        largest = max(getattr(p, "ds_numel", p.numel()) for p in parameters)
        kept = [getattr(p, "ds_tensor", p) for p in parameters] + list(model.buffers())
        self.built = {
            "most": self.device.most_device_bytes() - self.before,
            "kept": sum(tensor.nbytes for tensor in kept),
            "largest": 4 * largest,
            "whole": 4 * sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
        }

    def fork(self) -> None:
        """Before the first loader process of a run is forked."""
        if self.used_at_fork is not None:
            return
        launched = [name for name, count in self.device.kernels().items() if count]
        taken = self.device.most_device_bytes() > self.before
        self.used_at_fork = [*pretended.device_uses, *launched, *(["memory"] if taken else [])]

    def mark(self) -> None:
        """Before and after a step."""
        kernels = self.device.kernels()
        if self.start is None:
            self.start = len(pretended.findings)
            return
        waits = [finding.place() for finding in pretended.of_kind("sync", self.start)]
        collectives = [finding.place() for finding in pretended.of_kind("collective", self.start)]
        self.steps.append({"syncs": waits, "collectives": collectives, "kernels": kernels})
        self.start = None

    def found(self) -> dict[str, Any]:
        """After a run."""
        kinds = {kind: sorted({str(f) for f in pretended.of_kind(kind)}) for kind in pretended.FAULTS}
        return {
            **kinds,
            "steps": self.steps,
            "groups": list(pretended.new_groups),
            "pinned_bytes": self.device.most_pinned_bytes(),
            "built": self.built,
            "used_at_fork": self.used_at_fork,
        }


def main() -> None:
    path, rank = Path(sys.argv[1]), int(sys.argv[2])
    job = json.loads(path.read_text())
    device = pretended.start(job["devices"])
    import torch

    from megamoe.compat.startup import configure_libraries

    configure_libraries()
    torch.set_num_threads(1)

    from megamoe.kernels.attention import core as attention
    from tests.cuda.training import run_tree, watch_engines, watch_steps

    # The device runs the CPU's kernels, among which there is no FlashAttention of packed documents.
    attention.fits_varlen = lambda query_SBND: False
    gc.freeze()  # the collections between the runs need not search what is imported
    watch = Watch(device)
    watch_steps(watch.mark)
    watch_engines(watch.engine)
    os.register_at_fork(before=watch.fork)
    found = {}
    for place, run in enumerate(job["runs"]):
        if rank >= run["ranks"]:
            continue
        os.environ.update(
            job["variables"], RANK=str(rank), WORLD_SIZE=str(run["ranks"]), LOCAL_RANK=str(rank)
        )
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"] + place))
        gc.collect()  # an engine and its parameters know each other
        watch.begin()
        losses, error = {}, ""
        with fault(run["fault"]):
            try:
                losses = run_tree(run["tree"], str(path.parent / "runs"))
            except BaseException:
                error = traceback.format_exc()
        found[run["tree"]["name"]] = {"losses": losses, "error": error, **watch.found()}
    (path.parent / f"{rank}.json").write_text(json.dumps(found))


class fault:
    """Inside, a method of torch.cuda.Stream does nothing: what the tool must notice."""

    def __init__(self, method: str | None) -> None:
        self.method = method

    def __enter__(self) -> None:
        import torch

        if self.method is not None:
            self.plain = getattr(torch.cuda.Stream, self.method)
            setattr(torch.cuda.Stream, self.method, lambda *unused: None)

    def __exit__(self, *unused: object) -> None:
        import torch

        if self.method is not None:
            setattr(torch.cuda.Stream, self.method, self.plain)


if __name__ == "__main__":
    main()
