"""A pipeline of datatrove that writes a dataset, on one of its executors.

python datatrove_run.py local|slurm|ray INPUT PREFIX WORK [workers=N] [address=A] [env=COMMAND] [partition=P]
"""

import sys
from typing import Any

from datatrove.executor import LocalPipelineExecutor, SlurmPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from token_steps import MergeTokens, WriteTokens

TASKS = 3


def executor_of(kind: str, options: dict[str, str], name: str, depends: Any, **common: Any) -> Any:
    """Return the executor of a stage, which runs after `depends`."""
    common |= {"depends": depends, "workers": int(options.get("workers", 2))}
    if kind == "local":
        return LocalPipelineExecutor(**common)
    if kind == "slurm":
        slurm = {"time": "00:10:00", "partition": options["partition"], "env_command": options["env"]}
        return SlurmPipelineExecutor(**common, **slurm, mem_per_cpu_gb=1, job_name=name, mail_type="NONE")
    from datatrove.executor.ray import RayPipelineExecutor

    return RayPipelineExecutor(**common, mem_per_cpu_gb=0.1)


def main(kind: str, source: str, prefix: str, work: str, *given: str) -> None:
    options = dict(option.split("=", 1) for option in given)
    if kind == "ray":
        import ray

        ray.init(address=options["address"], log_to_driver=False)
    write = [JsonlReader(source), WriteTokens(prefix, "bytes")]
    merge = [MergeTokens(prefix, "bytes", TASKS, [(f"{work}/write", TASKS)])]
    first = executor_of(
        kind, options, "write", None, pipeline=write, tasks=TASKS, logging_dir=f"{work}/write"
    )
    executor_of(kind, options, "merge", first, pipeline=merge, tasks=1, logging_dir=f"{work}/merge").run()


if __name__ == "__main__":
    main(*sys.argv[1:])
