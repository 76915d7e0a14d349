"""Checks that run in a process where the fake CUDA device was loaded before torch; see test_simulation."""

from megamoe.apps.plan import cuda_device

if __name__ == "__main__":
    cuda_device.load()

import json
import math
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from megamoe.apps.plan.counter import WEIGHT_GRADIENTS, CostCounter, OperatorTotal, Parts
from megamoe.apps.plan.fake_cuda import fake_torch_cuda, fused_operators, join_fake_group, modules_move_fakes
from megamoe.apps.plan.figures import BACKWARD_VOCABULARY, FORWARD_VOCABULARY, Figures
from megamoe.apps.plan.hardware import GPUS
from megamoe.apps.plan.memory import ACTIVATIONS, PARAMETERS
from megamoe.apps.plan.plan import Cluster, make_plan
from megamoe.apps.plan.rank import StepCosts, fake_mode, simulate_step
from megamoe.apps.plan.roofline import WAITING, roofline
from megamoe.apps.plan.stand_ins import evenly
from megamoe.config import load_config
from megamoe.errors import UserError
from megamoe.kernels.operators import kernel_operator
from megamoe.model.size import model_size
from megamoe.parallel.zero.costs import Share, state_bytes
from tests.support.apps import check_command
from tests.support.apps.check_plans import plan_of_example
from tests.support.apps.planned_states import QUICK, planned
from tests.support.in_subprocess import checks_of, run_checks
from tests.support.tiny import VOCABULARY, tiny

SMALL = (
    "parallel.deepspeed=ds_configs/zero1_bf16.json",
    "model.cpu_kernels=plain",
    "train.micro_batch_size=4",
    "moe.expert_ffn_hidden_size=16",
)


def counted(program: Callable[[], Any], model: nn.Module | None = None) -> CostCounter:
    """What a program on the fake device costs."""
    parts = Parts(model or nn.Module())
    counter = CostCounter(parts)
    with ExitStack() as stack:
        single = torch.autograd.set_multithreading_enabled(False)
        for outer in (single, fake_torch_cuda(), modules_move_fakes()):
            stack.enter_context(outer)
        for inner in (fused_operators(), fake_mode(), parts.followed(), counter):
            stack.enter_context(inner)
        program()
    return counter


def total_of(counter: CostCounter, name: str) -> OperatorTotal:
    """Of one operator, over all parts, dtypes and shapes."""
    found = [total for key, total in counter.counts.operators.items() if key.name == name]
    return OperatorTotal(*(sum(getattr(t, field) for t in found) for field in vars(OperatorTotal())))


def cuda(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def check_product() -> None:
    """Bytes of both sides and the result, 2 FLOPs for each multiply and add."""
    total = total_of(counted(lambda: cuda(128, 64) @ cuda(64, 32)), "aten::mm")
    assert (total.calls, total.launches) == (1, 1)
    assert total.bytes == 2 * (128 * 64 + 64 * 32 + 128 * 32)
    assert total.flops == 2 * 128 * 64 * 32


def check_grouped_product() -> None:
    """As many FLOPs as one product of all rows, whatever the groups."""

    def program() -> None:
        ends = cuda(4, dtype=torch.int32)
        functional.grouped_mm(cuda(96, 64), cuda(4, 64, 32), offs=ends)

    total = total_of(counted(program), "aten::_grouped_mm")
    assert total.flops == 2 * 96 * 64 * 32
    assert total.bytes == 2 * (96 * 64 + 4 * 64 * 32 + 96 * 32) + 4 * 4


def check_attention() -> None:
    """Flash attention computes half of what its formula counts, as the mask is causal; backward 2.5 times."""

    def program() -> None:
        query, key, value = (cuda(2, 4, 128, 16).requires_grad_() for _ in range(3))
        functional.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()

    counter = counted(program)
    forward = total_of(counter, "aten::_scaled_dot_product_flash_attention")
    assert forward.flops == 2 * 2 * 2 * 4 * 128 * 128 * 16 // 2
    backward = total_of(counter, "aten::_scaled_dot_product_flash_attention_backward")
    assert backward.flops * 2 == forward.flops * 5


def check_views_are_free() -> None:
    def program() -> None:
        tensor = cuda(64, 64)
        tensor.T.view(-1, 64)[3:7].unsqueeze(0).expand(5, 4, 64).detach().permute(1, 0, 2)

    counter = counted(program)
    assert not counter.counts.operators
    assert counter.memory.live_bytes("temporary") + counter.memory.live_bytes("batch and counts") == 0


def check_what_is_expanded_is_read_once() -> None:
    total = total_of(counted(lambda: cuda(1, 64).expand(32, 64) * cuda(32, 64)), "aten::mul")
    assert total.bytes == 2 * (64 + 32 * 64 + 32 * 64)


def check_in_place() -> None:
    """An update reads and writes, a fill writes."""
    total = total_of(counted(lambda: cuda(64).add_(cuda(64))), "aten::add_")
    assert total.bytes == 2 * 3 * 64
    assert total_of(counted(lambda: cuda(64).zero_()), "aten::zero_").bytes == 2 * 64


def check_gather_reads_chosen_rows() -> None:
    def program() -> None:
        cuda(1000, 64).index_select(0, cuda(8, dtype=torch.int64))

    assert total_of(counted(program), "aten::index_select").bytes == 8 * 8 + 2 * 2 * 8 * 64


def check_fused_norm() -> None:
    def program() -> None:
        hidden, weight = cuda(32, 64).requires_grad_(), cuda(64).requires_grad_()
        functional.rms_norm(hidden, (64,), weight, 1e-5).sum().backward()

    counter = counted(program)
    assert total_of(counter, "aten::_fused_rms_norm").calls == 1
    assert total_of(counter, "aten::_fused_rms_norm_backward").launches == 2
    assert total_of(counter, "aten::rsqrt").calls == 0


def check_declared_kernel() -> None:
    """An operator of ours has its own formulas, and its fake runs, not its launch."""

    def shapes(rows: Tensor, width: int) -> Tensor:
        return rows.new_empty(len(rows), width)

    @kernel_operator(
        "check_declared",
        fake=shapes,
        flops=lambda rows, width, *, result: 2 * rows.numel() * width,
        bytes_moved=lambda rows, width, *, result: 7,
        launches=3,
    )
    def declared(rows: Tensor, width: int) -> Tensor:
        raise AssertionError("was launched")

    @kernel_operator("check_in_place", mutates={"out"})
    def in_place(rows: Tensor, out: Tensor) -> None:
        raise AssertionError("was launched")

    def program() -> None:
        assert declared(cuda(8, 16), 4).shape == (8, 4)
        in_place(cuda(8), cuda(8, dtype=torch.float32))

    counter = counted(program)
    assert total_of(counter, "megamoe::check_declared") == OperatorTotal(1, 3, 7, 2 * 8 * 16 * 4)
    assert total_of(counter, "megamoe::check_in_place") == OperatorTotal(1, 1, 8 * 2 + 8 * 4, 0)


def check_host_waits() -> None:
    """Reads of the device, each once; a copy that need not be awaited is none."""

    def program() -> None:
        tensor = cuda(4, dtype=torch.float32)
        assert tensor.sum().item() == 1.0
        tensor.cpu()
        torch.zeros(4).to("cuda", non_blocking=True)
        torch.zeros(4).sum().item()

    counts = counted(program).counts
    assert counts.waits.total() == counts.order.count(None) == 2
    assert counted(lambda: torch.zeros(4).to("cuda")).counts.waits.total() == 1


def check_collectives() -> None:
    """By group, with the bytes of the larger side."""

    def program() -> None:
        half = dist.new_group([0, 1])
        dist.all_reduce(cuda(16))
        dist.all_reduce(cuda(16))
        dist.reduce(cuda(16), 1, async_op=True)
        dist.all_gather_into_tensor(cuda(32), cuda(16), group=half)
        dist.all_to_all_single(cuda(5, 8), cuda(16, 8), [2, 1, 1, 1], [4, 4, 4, 4])

    join_fake_group(0, 4)
    try:
        found = counted(program).counts.collectives
    finally:
        dist.destroy_process_group()
    assert [key.kind for key in found if key.is_async] == ["reduce"]
    shown = {(key.kind, key.ranks): (total.calls, total.bytes) for key, total in found.items()}
    assert shown.pop(("reduce", (0, 1, 2, 3)))[0] == 1
    assert shown == {
        ("allreduce", (0, 1, 2, 3)): (2, 64),
        ("allgather_base", (0, 1)): (1, 64),
        ("alltoall_base", (0, 1, 2, 3)): (1, 2 * 16 * 8),
    }


def check_peak_memory() -> None:
    """Two of three tensors live at once; a view adds nothing."""
    counter = CostCounter(Parts(nn.Module()))

    def program() -> None:
        counter.memory.start()
        first = cuda(1000)
        view = first.view(10, 100)
        second = cuda(500)
        del first, view
        third = cuda(900)
        del second, third

    with fake_torch_cuda(), fake_mode(), counter:
        program()
    assert max(each.bytes for each in counter.memory.peaks_by_phase().values()) == 2 * 1500


def check_parts_of_both_passes() -> None:
    """An operator of the backward pass belongs to the module whose forward operator it is of."""

    class Router(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            return rows.sigmoid()

    class MLP(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            return rows.tanh()

    with fake_mode():
        model = nn.Sequential(Router(), MLP())
    counter = counted(lambda: model(cuda(8).requires_grad_()).sum().backward(), model)
    where = {key.name: key.part for key in counter.counts.operators}
    assert where["aten::sigmoid"] == where["aten::sigmoid_backward"] == "router"
    assert where["aten::tanh"] == where["aten::tanh_backward"] == "dense FFN"


def simulated(*overrides: str, ranks: int = 8, load: float = 1.0) -> StepCosts:
    return simulate_step(tiny(*SMALL, "moe.num_experts=8", *overrides), ranks, load)


def check_bytes_of_an_update() -> None:
    """AdamW by Triton: 30 bytes a parameter, and 22 with moments in bf16."""
    for moments, expected in (("fp32", 30), ("bf16", 22)):
        costs = simulated("model.gpu_kernels=triton", f"optimizer.moments={moments}", ranks=1)
        updates = [total for key, total in costs.counts.operators.items() if key.name == "megamoe::adamw"]
        assert math.isclose(sum(each.bytes for each in updates), expected * costs.parameters, rel_tol=0.02)


def check_states_of_a_layout() -> None:
    """Bytes of weights, gradients and optimizer state are those of the formulas, which real runs confirm."""
    config = tiny(*SMALL, "moe.num_experts=8", "parallel.expert=4")
    costs = simulate_step(config, 8)
    dense, experts = model_size(config, VOCABULARY).on_rank(1, 4)
    states = state_bytes([Share(dense, dense, 8), Share(experts, experts, 2)], 1, "bf16")
    assert costs.parameters == dense + experts
    assert costs.parameter_bytes == states.weights
    # DeepSpeed pads slices, and counts the steps of each.
    assert 0 <= costs.optimizer_bytes - states.optimizer < 2000
    assert 0 <= costs.gradient_bytes - states.gradients < 2000


def check_step_of_expert_parallel_ranks() -> None:
    """Exchanges, waits, parts and FLOPs of a step; more rows under a higher load."""
    even, uneven = simulated("parallel.expert=8"), simulated("parallel.expert=8", load=2.0)
    exchanged = [total.calls for key, total in even.counts.collectives.items() if key.kind == "alltoall_base"]
    assert sum(exchanged) == 2 * 5  # of two layers: counts, rows there and back, and their gradients
    assert even.counts.waits["dispatch"] == 2
    parts = {key.part for key in even.counts.operators}
    wanted = {"attention", "router", "dispatch", "experts", "combine", "vocabulary and loss", "optimizer"}
    assert wanted <= parts
    # k = 2 experts of two products each, 16 x 32 and 16 x 16, over 32 tokens, in two layers.
    assert expert_flops(even, "forward") == 2 * 2 * 32 * 2 * (16 * 32 + 16 * 16)
    assert expert_flops(even, "backward") == 2 * expert_flops(even, "forward")
    assert expert_flops(uneven, "forward") == 2 * expert_flops(even, "forward")
    assert even.peak.by_category[ACTIVATIONS] < uneven.peak.by_category[ACTIVATIONS]
    assert even.peak.by_category[PARAMETERS] == even.parameter_bytes
    times = {name: roofline(even, gpu) for name, gpu in GPUS.items()}
    # The host is the bound of so small a model: on each GPU a step takes as long.
    busy = {name: each.seconds - each.parts[WAITING] for name, each in times.items()}
    assert busy["a100"] > busy["h100"] > busy["b200"]
    assert 0 < times["h100"].model_flops < times["h100"].seconds * GPUS["h100"].bf16
    assert roofline(even, GPUS["h100"]).model_flops == roofline(uneven, GPUS["h100"]).model_flops


def expert_flops(costs: StepCosts, phase: str) -> int:
    found = costs.counts.operators.items()
    parts = ("experts", WEIGHT_GRADIENTS)
    return sum(total.flops for key, total in found if key.part in parts and key.phase == phase)


def check_recomputation_is_counted() -> None:
    """It costs FLOPs, saves activations, and is no part of the model's FLOPs."""
    plain, again = simulated(), simulated("model.recompute=full")
    assert again.peak.by_category[ACTIVATIONS] < plain.peak.by_category[ACTIVATIONS]
    assert expert_flops(again, "backward") == 1.5 * expert_flops(plain, "backward")
    assert roofline(again, GPUS["h100"]).model_flops == roofline(plain, GPUS["h100"]).model_flops


def check_every_kind_of_layout_is_simulated() -> None:
    """Pipeline stages, their chunks, parts of a sequence and of an expert; ZeRO 0 to 3; AdamW and Muon."""
    stages = ("parallel.pipeline=2", "model.num_layers=4", "model.tie_embeddings=false")
    for stage, overrides in (
        (0, ("parallel.pipeline=2", "model.num_layers=4", "parallel.deepspeed=ds_configs/zero0_bf16.json")),
        (1, (*stages, "parallel.pipeline_chunks=2", "parallel.expert=2", "optimizer.name=muon")),
        (1, (*stages, "parallel.expert_tensor=2", "parallel.deepspeed=ds_configs/zero2_bf16.json")),
        (0, (*stages, "parallel.context=2", "parallel.tensor=2", "model.num_attention_heads=4")),
        (0, ("parallel.deepspeed=ds_configs/zero3_bf16.json", "parallel.expert=2", "optimizer.name=muon")),
    ):
        config = tiny(*SMALL, "moe.num_experts=8", *overrides)
        assert simulate_step(config, 8, micro_batches=2, stage=stage).peak.bytes > 0, overrides


def check_steps_that_an_h100_took() -> None:
    """moe_1b of 16,384 tokens took 83.2 ms, and of 128 tokens 77.7, with a wait after each step.

    Some 6.2 ms of it are gone since, by the plan: gradients that were cleared one by one, the router's
    products in fp32, and an update of 38 bytes a parameter in place of 30. Without these waits the device
    works on while the host begins the next step.
    """
    layout = ("parallel.deepspeed=ds_configs/zero1_bf16_cuda.json", "model.gpu_kernels=triton")
    for measured_ms, batch in (
        (83.2 - 6.2, ()),
        (77.7 - 6.2, ("data.sequence_length=128", "train.micro_batch_size=1")),
    ):
        model = load_config("benchmarks/rooflines/models/moe_1b.yaml", [*layout, "parallel.expert=1", *batch])
        costs = simulate_step(model, 1)
        free = roofline(costs, GPUS["h100"]).seconds
        costs.counts.order.append(None)
        synchronised = roofline(costs, GPUS["h100"]).seconds
        assert math.isclose(synchronised * 1e3, measured_ms, rel_tol=0.06), (synchronised, measured_ms)
        assert free < synchronised - 5e-3


def check_evenly() -> None:
    assert evenly(7, 3) == [3, 2, 2]
    assert evenly(0, 2) == [0, 0]


def check_bad_input_is_told() -> None:
    """A load that no rank can have, and a router whose sizes depend on values."""
    for overrides, load, said in (
        (["parallel.expert=4"], 5.0, "load: found 5, expected 1 to 4"),
        ([], 2.0, "load: found 2, expected 1: parallel.expert is 1"),
        (["moe.router.selector=threshold"], 1.0, "number of pairs depends on the tokens"),
    ):
        try:
            simulated(*overrides, load=load)
        except UserError as error:
            assert said in str(error), error
        else:
            raise AssertionError(overrides)


def check_an_encoder_decoder_is_extrapolated() -> None:
    """Its figures are those of a simulation of all blocks: MoE in both stacks, or in the encoder.

    Counts are equal; times nearly, since how far the device waits for the host is not linear in the blocks.
    """
    stacks = ("model.encoder_layers=5", "model.num_layers=4", "parallel.expert=4", "moe.num_experts=4")
    objective = ("model.architecture=encoder_decoder", "train.objective=span_corruption")
    batch = ("train.global_batch_size=16", "data.sequence_length=64")
    for decoder in ("{every: 1}", "{}"):
        layers = f"moe.layers={{encoder: {{every: 1}}, decoder: {decoder}}}"
        config = tiny(*SMALL, *objective, *stacks, "moe.layers.every=null", layers, *batch)
        fewer, whole = (make_plan(config, Cluster(1, 4, GPUS["h100"]), whole=all_) for all_ in (False, True))
        assert (fewer.simulated, whole.simulated) == ([2, 3, 3], [9])
        for name in (field.name for field in fields(Figures)):
            found, wanted = (getattr(plan.figures, name) for plan in (fewer, whole))
            assert found.keys() == wanted.keys(), name
            for key, value in wanted.items():
                near = 5e-3 if name == "seconds" or key in (FORWARD_VOCABULARY, BACKWARD_VOCABULARY) else 1e-9
                assert math.isclose(found[key], value, rel_tol=near), (name, key, value)


def check_three_examples_are_planned() -> None:
    """The others are full tests, see tests/test_recipes.py."""
    for name in ("demo", "own_parts", "papers/sgmoe_lm_256_h_small"):
        assert not plan_of_example(Path(f"examples/{name}.yaml")), name


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(planned(QUICK, folder)))
    print(run_checks(checks_of({**globals(), **vars(check_command)})))
