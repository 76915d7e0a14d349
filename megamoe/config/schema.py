"""The run's configuration as typed dataclasses: every key of the YAML, its default and its meaning.

There is one dataclass per section, in the order of the data flow; those of `model` and `moe` are in
model_schema.py and moe_schema.py. The text below a field is its description in docs/run/configuration.md.
A part of the MoE layer (scorer, selector, loss, ...) has its own `Config`; the schema holds it as a
`PartChoice`: its name and its options.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from megamoe.config.model_schema import Activation as Activation
from megamoe.config.model_schema import ModelConfig as ModelConfig
from megamoe.config.moe_schema import GroupLayersConfig as GroupLayersConfig
from megamoe.config.moe_schema import GroupStackConfig as GroupStackConfig
from megamoe.config.moe_schema import LayersConfig as LayersConfig
from megamoe.config.moe_schema import MoEConfig as MoEConfig
from megamoe.config.moe_schema import MoELayerConfig as MoELayerConfig
from megamoe.config.moe_schema import RouterConfig as RouterConfig
from megamoe.config.moe_schema import StackLayersConfig as StackLayersConfig
from megamoe.config.moe_schema import ZeroExpertsConfig as ZeroExpertsConfig
from megamoe.config.parts import PartChoice, Section, none_means_empty, part_validator
from megamoe.config.values import (
    Decay,
    Fraction,
    Layers,
    Length,
    Minutes,
    MinutesOrZero,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Rate,
    Seed,
    Size,
    SizeOrZero,
    Small,
    checked_pattern,
    is_dataset,
    is_run_name,
)

DEFAULT_STEPS = 100
Precision = Literal["fp32", "bf16", "fp16"]


@dataclass
class SourceConfig(Section):
    """One indexed dataset: a path without its .bin/.idx ending, and its share of the blend."""

    path: Annotated[str, AfterValidator(is_dataset)]
    """without .bin or .idx, or a URL such as `s3://bucket/corpus`; a pattern with `*` stands for several"""
    weight: PositiveFloat = 1.0
    """share of the blend, before all are divided by their sum; of a pattern, that of each of its datasets"""


Sources = list[SourceConfig]  # a bare path stands for {path: ...}


@dataclass
class DataConfig(Section):
    """The data: text that `tools/prepare_data.py` turned into .bin/.idx files, or mock data."""

    sources: Sources = field(default_factory=list)
    """training data, blended by weight and divided by `data.split`; a path without `.bin`/`.idx`, or a
    pattern with `*` for several; or a URL such as `s3://bucket/corpus`; for `translation` prepared pairs
    """
    sampling_exponent: NonNegativeFloat | None = None
    """a: the weight of a source is its number of tokens to the power of a; replaces the sources' weights"""
    split: list[NonNegativeFloat] = field(default_factory=lambda: [0.98, 0.02, 0.0])
    """shares of train, validation and test; of pairs, see docs/models/tune.md#translation"""
    validation: dict[str, Sources] = field(default_factory=dict)
    """further validation sets, by name"""
    mock: bool = False
    """synthetic tokens, to try a layout or a machine"""
    sequence_length: Length = 256
    """tokens of a sequence"""
    tokenizer: PathText | None = None
    """default: the one named in the data card"""
    document_aware: bool = False
    """attention, positions and loss stop at document boundaries"""
    order: Literal["documents", "samples"] = "documents"
    """documents: documents and then samples are shuffled, by an index; samples: the file is cut into samples,
    which are shuffled by a formula, without an index; see docs/run/data.md#order
    """
    cache: PathText | None = None
    """folder of the sample indices; default: beside the data, or beside the local copies of URLs"""
    remote_cache: PathText | None = None
    """folder on a local disk for what is read of URLs, which runs share; default: megamoe/data in ~/.cache"""
    remote_cache_gb: PositiveFloat = 50.0
    """GB that the blocks in `remote_cache` may have together; those used longest ago are deleted"""
    verify: Literal["full", "structure"] = "full"
    """full: every byte is read once for each version of a file; structure: the `.bin` is not read. Blocks of
    URLs are verified when they are fetched
    """
    workers: Annotated[int, Field(ge=0, le=512)] = 1
    """loader processes of each rank"""


Callback = Annotated[PartChoice, part_validator("callback")]
ExchangeChoice = Annotated[PartChoice, part_validator("exchange")]
ObjectiveChoice = Annotated[PartChoice, part_validator("objective")]
Callbacks = Annotated[list[Callback], BeforeValidator(none_means_empty)]


@dataclass
class ParallelConfig(Section):
    """How ranks share the work. The data-parallel size is the number of ranks divided by `pipeline` x
    `context` x `tensor`.
    """

    pipeline: Size = 1
    """stages of the model, each of which holds some of the blocks"""
    pipeline_chunks: Size = 1
    """parts of the model that a stage holds: with v parts the stages take turns v times (interleaved 1F1B)"""
    blocks_per_stage: list[Annotated[int, Field(gt=0)]] | None = None
    """blocks of each part of the model, `pipeline` x `pipeline_chunks` numbers; default: balanced by work"""
    context: Size = 1
    """ranks that share the sequences of one micro batch: each has a part of every sequence"""
    tensor: Size = 1
    """ranks that share one micro batch: attention, dense FFNs and embedding are split"""
    sequence: bool = False
    """each tensor-parallel rank computes norms and dropout for its share of the sequence; needs `tensor`
    above 1
    """
    expert: Size = 1
    """ranks that share one set of experts"""
    expert_tensor: Size = 1
    """ranks that hold slices of one expert"""
    exchange: ExchangeChoice = field(default_factory=lambda: PartChoice.default("exchange"))
    """how rows travel to the ranks of their experts: direct, a row for each expert of a token; by_node, a row
    for each node with experts of it; auto chooses; or a plugin's exchange
    """
    exchange_dtype: Literal["model", "fp8"] = "model"
    """in which rows travel to the experts; what returns, and all gradients, have the model's"""
    node_size: Size | None = None
    """ranks of a node, for exchange by_node and auto; default: of this machine, by its launcher"""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto: the precision of the DeepSpeed file"""
    deepspeed: PathText | None = None
    """a file of `ds_configs/`; default: ZeRO 0 in fp32"""
    timeout_minutes: Minutes = 30.0
    """limit for a collective operation over all ranks"""


@dataclass
class GroupConfig(Section):
    """A parameter group with its own learning rate and decay: parameters whose names match `pattern`."""

    pattern: Annotated[str, AfterValidator(checked_pattern)]
    """regular expression, searched in the parameter's name"""
    lr_scale: NonNegativeFloat = 1.0
    """times the schedule's learning rate"""
    weight_decay: NonNegativeFloat | None = None
    """for matrices and vectors; default: as for other parameters"""
    algorithm: Literal["adamw", "muon"] | None = None
    """with optimizer.name: muon, what updates them; default: muon for the matrices of blocks"""


Coefficients = Annotated[list[Annotated[list[float], Field(min_length=3, max_length=3)]], Field(min_length=1)]


@dataclass
class MuonConfig(Section):
    """Muon (`optimizer.name: muon`): the matrices of blocks move along their orthogonalised momentum; see
    docs/run/optimizers.md.
    """

    momentum: Fraction = 0.95
    """decay of the mean of the gradients"""
    nesterov: bool = True
    """take the mean after one more step with the same gradient"""
    steps: Annotated[int, Field(gt=0, le=20)] = 5
    """Newton-Schulz steps"""
    coefficients: Literal["jordan", "polar_express"] | Coefficients = "jordan"
    """of the steps: a published table, or rows `[a, b, c]` for x -> a x + b x^3 + c x^5, the last of which
    repeats
    """
    update_scale: Literal["moonlight", "spectral"] = "moonlight"
    """moonlight: 0.2 sqrt(max(rows, columns)), the size of AdamW's updates; spectral: sqrt(max(1, rows /
    columns))
    """
    lr_scale: NonNegativeFloat = 1.0
    """times the schedule's learning rate, for what Muon updates"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """of the Newton-Schulz steps and of what ranks send for them; auto: fp32 in runs in fp32, else bf16"""


@dataclass
class OptimizerConfig(Section):
    """The optimizer and its learning-rate schedule. Steps are optimiser steps."""

    name: Literal["adamw", "adam", "muon"] = "adamw"
    """adamw: decoupled weight decay; adam: L2, added to the gradient; muon: for the matrices of blocks, adamw
    for the rest, see docs/run/optimizers.md
    """
    muon: MuonConfig = field(default_factory=MuonConfig)
    lr: Rate = 3e-4
    """the peak learning rate"""
    min_lr: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """the learning rate at the end of the schedule"""
    schedule: Literal["cosine", "linear", "inverse_sqrt", "wsd", "constant"] = "cosine"
    """of the learning rate; wsd: warm-up, stable, decay"""
    warmup_steps: NonNegativeInt = 0
    """linear warm-up from 0 to lr"""
    warmup_share: Fraction | None = None
    """instead of warmup_steps: a share of the run's steps, rounded up"""
    decay_steps: PositiveInt | None = None
    """the step at which cosine, linear and wsd reach min_lr; default: the run's end"""
    wsd_decay_steps: PositiveInt | None = None
    """length of the decay of `wsd`; default: a tenth of decay_steps"""
    wsd_decay: Literal["linear", "cosine"] = "linear"
    """form of the decay of `wsd`"""
    beta1: Fraction = 0.9
    """decay of the first moment"""
    beta2: Fraction = 0.95
    """decay of the second moment"""
    eps: Small = 1e-8
    """added to the denominator"""
    moments: Literal["fp32", "bf16"] = "fp32"
    """how both moments are kept; bf16, at ZeRO 1 to 3 without offload, saves 4 bytes of a parameter,
    rounds at random and is slow on a GPU; see docs/scale/plan.md#moments-in-bf16
    """
    weight_decay: Decay | None = None
    """for matrices only; default: 0.1 for adamw and muon, 0 for adam"""
    grad_clip: NonNegativeFloat = 1.0
    """limit of the global norm, over dense and expert parameters together; 0: off"""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """decay of an exponential mean of the weights, which checkpoints hold beside them; see
    docs/run/optimizers.md#a-mean-of-the-weights
    """
    groups: list[GroupConfig] = field(default_factory=list)
    """other learning rates and weight decays for parameters by name; the first match counts; see
    docs/run/runs.md#parameters-by-name
    """


@dataclass
class RampupConfig(Section):
    """Grow the global batch from `start` by `increment` until train.global_batch_size."""

    start: PositiveInt
    """first global batch size"""
    increment: PositiveInt
    """how much the global batch grows at a time"""
    samples: Annotated[int, Field(gt=0, le=10**12)]
    """samples over which the growth is spread evenly"""


@dataclass
class ProfilerConfig(Section):
    """A window of steps recorded with torch.profiler, written to <run>/profile."""

    start_step: PositiveInt | None = None
    """first recorded step; default: the profiler is off"""
    num_steps: Layers = 3
    """number of recorded steps"""


@dataclass
class LossSpikeConfig(Section):
    """Does not apply a step whose loss is far above the previous ones (OLMo 2's rule)."""

    sigmas: PositiveFloat | None = None
    """limit in standard deviations above the mean; default: the rule is off"""
    window: Annotated[int, Field(ge=2, le=10**6)] = 128
    """number of applied steps that give the mean; the rule starts when there are as many"""
    action: Literal["skip", "stop"] = "skip"
    """skip the step and its batch, or end the run"""


@dataclass
class TrainConfig(Section):
    """Length and batch sizes of the training. Batch sizes count sequences."""

    objective: ObjectiveChoice = field(default_factory=lambda: PartChoice.default("objective"))
    """what the model predicts: `causal`, `chat`, `masked`, `span_corruption`, `translation`,
    `classification`, `regression`, `tagging`, `span`, or a plugin's; see docs/models/tune.md
    """
    steps: PositiveInt | None = None
    """optimiser steps of the whole run; default: 100, if neither `epochs` nor `tokens` is set"""
    epochs: PositiveFloat | None = None
    """instead of steps: passes over the training data, in whole batches"""
    tokens: PositiveInt | None = None
    """instead of steps: tokens of the run, in whole batches; a sequence has `data.sequence_length`"""
    micro_batch_size: Size = 1
    """sequences for each data-parallel rank and forward pass"""
    global_batch_size: PositiveInt | None = None
    """default: micro_batch_size x data-parallel size"""
    in_flight: Literal[1, 2] = 1
    """2: two micro batches take turns in each pass, so that one computes while the other's rows travel
    between expert-parallel ranks; their activations are in memory at the same time, see docs/scale/layouts.md
    """
    batch_rampup: RampupConfig | None = None
    label_smoothing: Fraction = 0.0
    """share of the target that is given to the other tokens of the vocabulary"""
    exit_after_steps: PositiveInt | None = None
    """save and stop after this many steps of this launch"""
    exit_after_minutes: Annotated[float, Field(gt=0, le=10**7)] | None = None
    """save and stop after this many minutes of this launch"""
    max_skipped_in_a_row: PositiveInt = 10
    """this many skipped steps in a row (not finite, or a loss spike) end the run"""
    loss_spike: LossSpikeConfig = field(default_factory=LossSpikeConfig)
    deterministic: bool = False
    """add in one order on a GPU, so that two launches on equal machines have the same losses to the bit; see
    docs/run/runs.md#the-same-losses-to-the-bit
    """
    hang_minutes: MinutesOrZero = 10.0
    """end the run after this time without progress of any rank; 0: never"""
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    callbacks: Callbacks = field(default_factory=list)
    """callbacks of plugins in the training loop, in this order, or `none`; see docs/run/runs.md#callbacks"""

    def __post_init__(self) -> None:
        if self.steps is None and self.epochs is None and self.tokens is None:
            self.steps = DEFAULT_STEPS


@dataclass
class EvaluationConfig(Section):
    """Validation at intervals, and always at the end of the run."""

    every: NonNegativeInt = 0
    """steps between evaluations; 0: only at the end"""
    batches: SizeOrZero = 8
    """global batches for each validation set; 0: no evaluation at all"""
    at_start: bool = False
    """evaluate before the first step too"""


@dataclass
class InitConfig(Section):
    """Start a new run from the weights of another run's checkpoint, with a fresh optimiser."""

    path: PathText | None = None
    """a `step_*` folder"""
    experts: Literal["same", "cut", "copy"] = "same"
    """cut: divide a dense FFN into the experts; copy: copy it into each expert"""
    noise: NonNegativeFloat = 0.0
    """cut, copy: Gaussian noise on the experts; its standard deviation over that of the FFN's weight"""
    router_scale: NonNegativeFloat = 1.0
    """cut, copy: multiplies the router's initial parameters; 0: all experts have the same score"""


@dataclass
class CheckpointConfig(Section):
    """When checkpoints are saved, how many are kept, and which one a launch resumes from."""

    every: NonNegativeInt = 0
    """steps between checkpoints; 0: only at the end"""
    keep: Size = 2
    """number of the newest checkpoints that are kept"""
    background: bool = True
    """write while training goes on, from a copy in host memory"""
    save_at_end: bool = True
    """save after the last step"""
    init: InitConfig = field(default_factory=InitConfig)
    resume: PathText = "never"
    """`never`, `auto` (this run's latest checkpoint, if there is one), or a checkpoint's folder"""
    remote: str | None = None
    """URL of a folder in object storage, such as s3://bucket/runs: each checkpoint is also uploaded to its
    subfolder `name`, and `resume: auto` fetches the newest one if this machine has none as late
    """
    allow_changes: bool = False
    """resume although the router's parts or options changed, so that the weights compute another function"""


@dataclass
class WandbConfig(Section):
    """Weights & Biases; offline if nobody is logged in."""

    enabled: bool = False
    """use Weights & Biases"""
    mode: Literal["auto", "online", "offline"] = "auto"
    """auto: online if somebody is logged in, otherwise offline"""
    project: str = "megamoe"
    """W&B project"""
    entity: str | None = None
    """W&B entity"""
    group: str | None = None
    """W&B group"""
    tags: list[str] = field(default_factory=list)
    """W&B tags"""


@dataclass
class LogConfig(Section):
    """Where metrics are written; metrics.jsonl always is."""

    every: PositiveInt = 1
    """steps between records"""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: bool = False
    """write TensorBoard files"""
    report: bool = True
    """write an HTML report at the end"""
    routing: PathText | None = None
    """folder for the experts chosen for every token of every step; see
    docs/run/runs.md#recording-and-replaying-the-routing
    """
    dead_window: PositiveInt = 100
    """steps without a pair after which an expert counts as dead (docs/run/metrics.md#the-moe-layers)"""
    timers: bool = False
    """measure the time of routing, dispatch, experts and combine"""
    peak_tflops: PositiveFloat | None = None
    """peak of one rank in TFLOP/s, for `perf/mfu`; default: of known GPUs (docs/run/metrics.md#the-speed)"""
    straggler_factor: Annotated[float, Field(gt=1)] | None = 1.5
    """a rank whose own time of a step exceeds the ranks' median by this factor is named as a straggler
    (docs/run/metrics.md#stragglers); null: none is
    """


@dataclass
class RunConfig(Section):
    """The whole configuration of a run."""

    name: Annotated[str, AfterValidator(is_run_name)] = "run"
    """name of the run and of its folder"""
    output: PathText = "runs"
    """the run's folder is `<output>/<name>`"""
    overwrite: bool = False
    """start from the beginning in a run folder that exists already"""
    seed: Seed = 1234
    """seed of the weights, the data order and every random draw"""
    plugins: list[str] = field(default_factory=list)
    """files, modules or entry points that add parts"""
    differences: list[str] = field(default_factory=list)
    """what differs from the published model that the run is named after, or what that leaves open: texts that
    begin with the key, behind those of the base; without effect; `--check` and `tools/plan.py` print them
    """
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
