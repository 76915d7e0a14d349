"""The plan of a run on a cluster that need not exist: memory, traffic and time of a step."""

from dataclasses import dataclass, replace
from statistics import fmean

from megamoe.apps.plan.assumptions import ASSUMED, OPTIMISTIC, PESSIMISTIC, Rate
from megamoe.apps.plan.counter import STAGES, CollectiveTotal
from megamoe.apps.plan.fake_cuda import fake_torch_cuda
from megamoe.apps.plan.figures import (
    Figures,
    Models,
    block_kinds,
    combined,
    fewer_blocks,
    is_worth_it,
    with_blocks,
    with_micro_batches,
)
from megamoe.apps.plan.hardware import Gpu, Topology
from megamoe.apps.plan.rank import simulate_step
from megamoe.apps.plan.stages import Pipeline, holding, plan_stages
from megamoe.apps.plan.stand_ins import without_data
from megamoe.config import RunConfig
from megamoe.errors import raise_first
from megamoe.model.size import ModelSize, model_size
from megamoe.parallel.zero.deepspeed_config import resolve_parallel
from megamoe.train.resolved import ResolvedRun, resolve_run
from megamoe.validation.run import validate

WHOLE = 6  # blocks up to which a model is simulated whole
RESERVED = 0.08  # of the device: CUDA's context, NCCL's buffers, the allocator's fragmentation
CHECKPOINT_BYTES = 12  # of a parameter: master weight and two moments in fp32
MODEL_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Cluster:
    """Nodes of so many GPUs each. measured: rows in place of those that are assumed."""

    nodes: int
    gpus_per_node: int
    gpu: Gpu
    measured: tuple[Rate, ...] = ()

    @property
    def models(self) -> Models:
        """The model of time."""
        likely, *bounds = (each.changed(self.measured) for each in (ASSUMED, OPTIMISTIC, PESSIMISTIC))
        return Models(self.gpu, Topology(self.gpus_per_node), likely, tuple(bounds))

    @property
    def ranks(self) -> int:
        """All GPUs."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Plan:
    """What a run costs. micro_batches: of a rank in the last step. figures: of one rank's step. changes: what
    was replaced, see `without_data`. simulated: numbers of blocks of the models that were simulated, of
    `blocks`. pipeline: its stages; figures are then of the stage that holds most. None without stages.
    """

    config: RunConfig
    run: ResolvedRun
    cluster: Cluster
    load: float
    size: ModelSize
    micro_batches: int
    figures: Figures
    changes: list[str]
    simulated: list[int]
    blocks: int
    pipeline: Pipeline | None = None

    @property
    def peak_bytes(self) -> float:
        """The most that the tensors of a rank take."""
        return self.figures.peak_bytes

    @property
    def usable_bytes(self) -> float:
        """The bytes of the device that tensors may take."""
        return self.cluster.gpu.capacity * (1 - RESERVED)

    @property
    def fits(self) -> bool:
        """Whether the tensors fit on the device."""
        return self.peak_bytes <= self.usable_bytes

    @property
    def step_seconds(self) -> float:
        """The time of one step, with overlap."""
        return self.figures.overlapped_seconds if self.pipeline is None else self.pipeline.step_seconds

    def seconds_of_case(self, case: str) -> float:
        """Return the step's time in the `optimistic` or the `pessimistic` case.

        With stages, all passes change in the ratio of the stage that holds most.
        """
        figures = self.figures
        return self.step_seconds * figures.numbers[case] / figures.overlapped_seconds

    @property
    def tokens_per_second(self) -> float:
        """The tokens a second of all ranks together."""
        layout = self.run.plan.layout
        return self.figures.numbers["tokens"] * layout.data / self.step_seconds

    @property
    def _stages(self) -> list[Figures]:
        """The figures of each pipeline stage, or of the one rank."""
        return [self.figures] if self.pipeline is None else [each.figures for each in self.pipeline.stages]

    @property
    def utilisation(self) -> float:
        """Model FLOPs over the bf16 peak of the GPU; with stages, their mean."""
        flops = fmean(each.numbers["model_flops"] for each in self._stages)
        return flops / (self.step_seconds * self.cluster.gpu.bf16)

    @property
    def run_seconds(self) -> float:
        """The time of all steps, without evaluation and checkpoints. Those of a smaller batch take less."""
        spans, unit = self.run.schedule.spans(self.run.steps), self.run.schedule.unit
        return sum(steps * self.seconds_of(size // unit) for size, steps in spans)

    def seconds_of(self, micro_batches: int) -> float:
        """Return the time of a step of other than the planned number of micro batches: each takes its two
        passes, with stages those of the slowest one.
        """
        passes = max(each.numbers["forward"] + each.numbers["backward"] for each in self._stages)
        return self.step_seconds - (self.micro_batches - micro_batches) * passes

    @property
    def checkpoint_bytes(self) -> int:
        """The size of one checkpoint: weights in the model's precision, masters and moments."""
        return self.size.total * (CHECKPOINT_BYTES + MODEL_BYTES[self.run.plan.precision])


def with_node_size(config: RunConfig, cluster: Cluster) -> RunConfig:
    """Return the configuration with the cluster's nodes, unless `parallel.node_size` is set."""
    if config.parallel.node_size is not None:
        return config
    return replace(config, parallel=replace(config.parallel, node_size=cluster.gpus_per_node))


def make_plan(config: RunConfig, cluster: Cluster, load: float = 1.0, whole: bool = False) -> Plan:
    """Simulate a step of rank 0, or of the first rank of each pipeline stage, and return what it costs.

    load: rows of the fullest expert-parallel rank, over the mean. whole: simulate all blocks, even of a deep
    model. `cuda_device.load` comes first.

    Raises:
        UserError: for a configuration that training would refuse, or that cannot be simulated.
    """
    config = with_node_size(config, cluster)
    with fake_torch_cuda():
        # With the parts that are replaced below.
        raise_first(validate(config, cluster.ranks, resolve_parallel(config, cluster.ranks)))
        config, changes = without_data(config)
        config.model.cpu_kernels = "plain"
        run = resolve_run(config, cluster.ranks)
    models = cluster.models
    micro_batches = run.schedule.accumulation_at(run.schedule.total_samples(run.steps - 1))

    stage_ranks = run.plan.layout.stage_ranks

    def simulate(model: RunConfig, stage: int = 0) -> Figures:
        ranks = model.parallel.pipeline * stage_ranks
        costs = simulate_step(model, ranks, load, min(micro_batches, 3), stage=stage)
        return with_micro_batches(costs, models, micro_batches)

    def send_seconds(figures: Figures) -> float:
        one = CollectiveTotal(1, round(figures.numbers["sent"]))
        sends = [key for key in figures.calls if key.part == STAGES]
        return max(
            (models.topology.seconds(key, one, models.gpu, models.likely) for key in sends), default=0.0
        )

    # Muon's owners share the matrices of all blocks: a rank's part of them does not grow block by block.
    whole = whole or config.optimizer.name == "muon"
    blocks = len(block_kinds(config))
    size = model_size(config, run.vocabulary.size)
    pipeline = None
    simulated = [blocks]
    if run.plan.layout.pipeline > 1:
        pipeline = plan_stages(config, run.vocabulary.size, send_seconds, micro_batches, whole, simulate)
        figures = pipeline.fullest.figures
    elif whole or blocks <= WHOLE or config.model.architecture == "encoder" or not is_worth_it(config):
        figures = simulate(config)
    else:
        terms = fewer_blocks(config)
        figures = combined((factor, simulate(with_blocks(config, kept))) for factor, kept in terms)
        simulated = [len(kept) for _, kept in terms]
    if config.train.in_flight == 2:  # the simulated passes are those of one after the other
        figures = holding(figures, 1)
    return Plan(
        config, run, cluster, load, size, micro_batches, figures, changes, simulated, blocks, pipeline
    )
