"""The least memory that a rank needs, held against what there is: on the host, in its cgroup, on a device."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megamoe.config import RunConfig
from megamoe.errors import UserError, raise_first
from megamoe.host_memory import available_bytes
from megamoe.model.size import model_size
from megamoe.parallel.launch import World
from megamoe.parallel.zero.deepspeed_config import resolve_parallel
from megamoe.validation import memory
from megamoe.validation.memory import _least_activations, in_bytes, memory_problems, states_of
from tests.support.tiny import VOCABULARY, tiny

GIB = 1 << 30
LARGE = ("model.hidden_size=1024", "moe.expert_ffn_hidden_size=1024")
ON_CUDA = World(0, 1, 0, torch.device("cuda:0"), "gloo")


def check(config: RunConfig, world: World) -> None:
    raise_first(memory_problems(config, resolve_parallel(config, world.size), world, VOCABULARY))


def world(size: int = 1) -> World:
    return World(0, size, 0, torch.device("cpu"), "gloo")


def machine(folder: Path, available_kib: int, cgroup: str = "", files: dict[str, str] | None = None) -> Path:
    """A made-up /proc and, in `cgroups`, what is in /sys/fs/cgroup."""
    (folder / "proc/self").mkdir(parents=True)
    text = f"MemTotal: 99 kB\nMemAvailable:  {available_kib} kB\nSwapFree: 24 kB\n"
    (folder / "proc/meminfo").write_text(text)
    (folder / "proc/self/cgroup").write_text(cgroup)
    for name, text in (files or {}).items():
        (folder / "cgroups" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "cgroups" / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("", {}, 1024 * 1024),
        ("0::/\n", {"memory.max": "max\n", "memory.current": "5\n"}, 1024 * 1024),
        ("0::/\n", {"memory.max": "5000\n", "memory.current": "4000\n"}, 1000),
        (
            "0::/\n",
            {"memory.max": "5000", "memory.current": "4000", "memory.stat": "anon 1\ninactive_file 500\n"},
            1500,
        ),
        # Of a job in a job: the outer limit is the narrower one.
        (
            "0::/slurm/step\n",
            {
                "slurm/memory.max": "3000",
                "slurm/memory.current": "2900",
                "slurm/step/memory.max": "9000",
                "slurm/step/memory.current": "100",
            },
            100,
        ),
        (
            "4:cpu,memory:/docker/abc\n1:pids:/\n",  # v1, where the container does not see its own path
            {
                "memory/memory.limit_in_bytes": "7000",
                "memory/memory.usage_in_bytes": "6000",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 30\n",
            },
            1030,
        ),
        ("0::/\n", {"memory.max": "5000\n", "memory.current": "9000\n"}, 0),
    ],
)
def test_what_is_available(tmp_path: Path, cgroup: str, files: dict[str, str], expected: int) -> None:
    folder = machine(tmp_path, 1000, cgroup, files)
    assert available_bytes(folder / "proc", folder / "cgroups") == expected


@pytest.fixture
def bytes_of(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """host, device: the bytes of memory that there are."""
    found = SimpleNamespace(host=1 << 40, device=1 << 40)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=found.device)
    )
    monkeypatch.setattr(memory, "available_bytes", lambda: found.host)
    return found


def test_a_machine_without_memory_figures_refuses_nothing(tmp_path: Path, bytes_of: SimpleNamespace) -> None:
    assert available_bytes(tmp_path, tmp_path) is None
    bytes_of.host = None
    check(tiny("model.hidden_size=100000"), world())


def least(*overrides: str, ranks: int = 1) -> float:
    """Bytes of the states of one rank."""
    config = tiny(*overrides)
    return states_of(config, resolve_parallel(config, ranks), model_size(config, VOCABULARY)).total


def test_the_limit_is_the_formulas(bytes_of: SimpleNamespace) -> None:
    """The limit in fp32 at ZeRO 0: 16 bytes per parameter, and the batch and activations of this small
    model.
    """
    size = model_size(tiny(), VOCABULARY)
    assert least() == 16 * size.total
    tokens, width = 2 * 8, 4
    activations = tokens * width * (2 * 16 + 48)
    batch = tokens * (3 * 8 + 4)
    bytes_of.host = least() + activations + batch
    check(tiny(), world())
    bytes_of.host -= 1
    with pytest.raises(UserError, match="^memory: a rank needs at least 125 KiB .* has 125 KiB available;"):
        check(tiny(), world())


def test_moments_in_bf16_are_half_as_large() -> None:
    short = ("optimizer.moments=bf16", "parallel.deepspeed=ds_configs/zero1_bf16.json")
    size = model_size(tiny(), VOCABULARY)
    assert least(*short[1:]) - least(*short) == 4 * size.total


def test_logits_are_those_of_the_predicted_places() -> None:
    """Of a masked model 0.15 of the places; the inputs of the blocks are of all."""
    config = tiny("model.architecture=encoder", "train.objective=masked", "data.sequence_length=8")
    found = _least_activations(config, resolve_parallel(config, 1), 48)
    assert found == pytest.approx(2 * 8 * 4 * (2 * 16 + 0.15 * 48))


def test_two_in_flight_need_twice_the_activations() -> None:
    base = ("train.global_batch_size=8", "model.num_layers=4")
    one, two = tiny(*base), tiny(*base, "train.in_flight=2")
    needed = [_least_activations(each, resolve_parallel(each, 1), 100) for each in (one, two)]
    assert needed[1] == 2 * needed[0] > 0


def test_ranks_share_a_machine_and_parallelism_divides_the_need(
    monkeypatch: pytest.MonkeyPatch, bytes_of: SimpleNamespace
) -> None:
    bytes_of.host = 8 * GIB
    big = ("moe.num_experts=64", "model.hidden_size=1024", "moe.expert_ffn_hidden_size=1024")
    assert 3 * GIB < least(*big) < 8 * GIB
    check(tiny(*big), world())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    refusal = r"has 2\.0 GiB available for each of its 4 ranks; make the model smaller"
    with pytest.raises(UserError, match=refusal):
        check(tiny(*big), world(4))
    check(tiny(*big, "parallel.expert=4"), world(4))


def test_on_cuda_the_device_counts_and_host_holds_model_while_it_is_built(bytes_of: SimpleNamespace) -> None:
    config = tiny(*LARGE)
    size = 4 * model_size(config, VOCABULARY).total
    bytes_of.host = size - 1
    with pytest.raises(UserError, match="weights in fp32 while the model is built .*fewer ranks on a "):
        check(config, ON_CUDA)
    bytes_of.host = size
    check(config, ON_CUDA)
    bytes_of.device = 4 * size - 1
    with pytest.raises(UserError, match="but cuda:0 has .*ZeRO stage or offload"):
        check(config, ON_CUDA)


def test_at_zero3_the_host_holds_a_block_at_a_time(bytes_of: SimpleNamespace) -> None:
    """Of two blocks, whose experts are nearly all of the model."""
    config = tiny(*LARGE, "parallel.deepspeed=ds_configs/zero3_fp32.json")
    bytes_of.host = 4 * model_size(config, VOCABULARY).expert // 2
    check(config, ON_CUDA)
    bytes_of.host -= 1
    with pytest.raises(UserError, match="weights in fp32 while the model is built"):
        check(config, ON_CUDA)


def test_offloaded_states_are_the_hosts(bytes_of: SimpleNamespace) -> None:
    config = tiny(*LARGE, "parallel.deepspeed=ds_configs/zero3_bf16_offload.json")
    states = states_of(config, resolve_parallel(config, 1), model_size(config, VOCABULARY))
    assert states.cpu > 6 * states.total
    bytes_of.host = int(states.cpu) - 1
    with pytest.raises(UserError, match=r"\(offloaded states .*, but this machine has"):
        check(config, ON_CUDA)


def test_a_plan_is_what_the_engine_will_be() -> None:
    config = tiny("parallel.deepspeed=ds_configs/zero2_bf16_offload.json", "parallel.expert=2")
    plan = resolve_parallel(config, 4)
    assert (plan.stage, plan.precision, plan.offload.optimizer) == (2, "bf16", "cpu")
    assert (plan.layout.ranks, plan.layout.expert) == (4, 2)


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 KiB"), (3 << 20, "3 MiB"), (3 << 29, "1.5 GiB"), (1 << 60, "1.0 EiB"), (1e300, "8.67e+281 EiB")],
)
def test_bytes_for_people(size: float, shown: str) -> None:
    assert in_bytes(size) == shown
