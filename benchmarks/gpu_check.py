"""Checks megamoe on this machine's GPUs and writes a report to send: `make gpu-check`.

    python benchmarks/gpu_check.py [--output gpu_check] [--minutes 10] [--sections environment,parity,...]
                                   [--devices N] [--device cpu] [--quick]

Sections; without --sections they run in this order, which is that of one slot of ten minutes:

environment         devices, driver, versions
training            a model of 1 B parameters, tuned and by default: speed, memory, device time by part
host                the same steps with so few tokens that the host's time is what they take
kernels_...         every kernel of ours beside its plain form, by families, the least certain first
attention           PyTorch's attention by backend and head size
rates               matrix products and experts of real shapes, copies in memory
collectives         NCCL's collectives at real sizes, and a reduction beside a product
parity              losses of layouts beside one rank's on the CPU
tiles               tiles of the experts' products beside those of the built-in table
transformer_engine  its layers, in bf16 and FP8, if it is installed
layer               our MoE layer beside those of Megatron-Core, DeepSpeed and transformers
step                our training step beside transformers'
probe_...           only where named: what decides the next changes, after a control (`make gpu-session`)

A section runs in a process of its own; if it ends with an error or not in time, nothing of it is left and the
others still run. Sections that would begin after --minutes are skipped. Findings are written as they come:
`<output>/report.json`, and `<output>/assumptions.json` for `tools/plan.py --assumptions`. `<output>/logs` has
the error output of every process. `--device cpu` and `--quick` rehearse all of it at small sizes: they check
this command, and say nothing about a GPU.

Exit code: 0 if all that is required holds, 1 if not, 2 for a mistake, such as a machine without CUDA devices.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from megamoe.compat.startup import configure_libraries

configure_libraries()

import torch  # noqa: E402

from common.child import environment  # noqa: E402
from common.command import positive, user_errors_exit_2  # noqa: E402
from gpu import collectives, training  # noqa: E402
from gpu.findings import Machine, Section, Skip  # noqa: E402
from gpu.probes import PROBES  # noqa: E402
from gpu.ranks import last_lines, run_process  # noqa: E402
from gpu.report import SECTIONS, load_section, summary, write_report  # noqa: E402
from megamoe.apps.command import parser_of  # noqa: E402
from megamoe.errors import UserError  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    with user_errors_exit_2(parser):
        if arguments.on_rank:
            return _on_rank(arguments)
        machine = _machine(arguments)
        if arguments.one_section:
            return _run_section(arguments.one_section, machine, Path(arguments.json))
        names = _names(arguments.sections)
        return _run_all(names, machine, Path(arguments.output), 60 * arguments.minutes)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("--output", default="gpu_check", help="folder of the report")
    parser.add_argument("--minutes", type=positive, default=10)
    parser.add_argument("--sections", help="names separated by commas, in their order")
    parser.add_argument("--devices", type=positive, help="how many devices to use; default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="small sizes, to rehearse")
    # For the processes that the command starts itself.
    parser.add_argument("--one-section", help=argparse.SUPPRESS)
    parser.add_argument("--on-rank", help=argparse.SUPPRESS)
    parser.add_argument("--given", help=argparse.SUPPRESS)
    parser.add_argument("--json", help=argparse.SUPPRESS)
    parser.add_argument("--logs", default="", help=argparse.SUPPRESS)
    return parser


def _machine(arguments: argparse.Namespace) -> Machine:
    if arguments.device == "cpu":
        return Machine("cpu", arguments.devices or 2, True, arguments.logs, arguments.one_section or "")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found == 0:
        raise UserError(
            "no CUDA device found: this command checks GPUs; --device cpu rehearses it without one"
            + ("" if torch.version.cuda else "; this PyTorch is built without CUDA")
        )
    if (arguments.devices or 0) > found:
        raise UserError(f"--devices: found {arguments.devices}, but this machine has {found} CUDA devices")
    count, section = arguments.devices or found, arguments.one_section or ""
    return Machine("cuda", count, arguments.quick, arguments.logs, section)


def _names(text: str | None) -> list[str]:
    if text is None:
        return [name for name in SECTIONS if name not in PROBES]
    names = text.split(",")
    for name in names:
        if name not in SECTIONS:
            raise UserError(f"--sections: there is no {name!r}; there are {', '.join(SECTIONS)}")
    return names


def _run_all(names: list[str], machine: Machine, output: Path, seconds: float) -> int:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output: cannot make the folder {output}: {error.strerror}") from None
    deadline = time.monotonic() + seconds
    sections: list[Section] = []
    for name in names:
        started = time.monotonic()
        left = deadline - started
        section = (
            _in_process(name, machine, output, min(left, SECTIONS[name].limit(machine))) if left > 0 else None
        )
        if section is None:
            section = Section(name, reason="the time (--minutes) was over", status="skipped")
        sections.append(section)
        print(f"{summary(section)} ({time.monotonic() - started:.0f} s)", flush=True)
        write_report(sections, machine, output)
    print("report: " + ", ".join(str(output / name) for name in ("report.json", "assumptions.json", "logs")))
    return 1 if any(section.status in ("failed", "error") for section in sections) else 0


def _in_process(name: str, machine: Machine, output: Path, timeout_s: float) -> Section:
    path = output / f"{name}.json"
    path.unlink(missing_ok=True)
    logs = (output / "logs").resolve()
    command = [sys.executable, __file__, "--one-section", name, "--json", str(path.resolve())]
    command += ["--device", machine.device, "--devices", str(machine.count), "--logs", str(logs)]
    command += ["--quick"] if machine.quick and machine.device == "cuda" else []
    log = logs / f"{name}.log"
    code, _ = run_process(command, environment(), log, timeout_s)
    problem = last_lines(log, 1) if code else ""
    if code is None:
        problem = f"not finished after {timeout_s:.0f} s; {last_lines(log, 1)}"
    section = load_section(path, name)
    path.unlink(missing_ok=True)
    if problem:
        section.status, section.reason = "error", problem
    return section


def _run_section(name: str, machine: Machine, path: Path) -> int:
    """Run one section in this process. What it has found is written even if it ends with an error."""
    section = Section(name, path=path)
    try:
        SECTIONS[name].run(machine, section)
    except Skip as reason:
        section.status, section.reason = "skipped", str(reason)
    finally:
        section.judge()
        section.write()
    return 0


def _on_rank(arguments: argparse.Namespace) -> int:
    given: dict[str, Any] = json.loads(arguments.given)
    found = {"collectives": collectives.on_rank, "training": training.on_rank}[arguments.on_rank](given)
    if found["rank"] == 0:
        Path(arguments.json).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
