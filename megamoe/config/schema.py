"""The run's configuration as typed dataclasses: every key of the YAML, its default and its meaning.

There is one dataclass per section, in the order of the data flow; that of `model` is in model_schema.py.
A part of the MoE layer (scorer, selector, loss, ...) has its own `Config`; the schema holds it as a
`PartChoice`: its name and its options.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from megamoe.config.model_schema import Activation as Activation
from megamoe.config.model_schema import ModelConfig as ModelConfig
from megamoe.config.parts import PartChoice, Section, names_inside, none_at_all, one_part, one_size
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
    weight: PositiveFloat = 1.0


Sources = list[SourceConfig]  # a bare path stands for {path: ...}


@dataclass
class DataConfig(Section):
    """The data: text that `tools/prepare_data.py` turned into .bin/.idx files, or mock data."""

    sources: Sources = field(default_factory=list)  # blended by weight, cut by `split`
    sampling_exponent: NonNegativeFloat | None = (
        None  # a: weights are tokens^a, instead of the sources' weights
    )
    split: list[NonNegativeFloat] = field(default_factory=lambda: [0.98, 0.02, 0.0])  # train, valid, test
    validation: dict[str, Sources] = field(default_factory=dict)  # further validation sets, by name
    mock: bool = False  # random tokens, to test a layout or a machine
    sequence_length: Length = 256  # tokens
    tokenizer: PathText | None = None  # default: the one named in the data card
    document_aware: bool = False  # attention, positions and loss stop at document boundaries
    order: Literal["documents", "samples"] = "documents"  # what is shuffled; `samples` needs no index
    cache: PathText | None = None  # folder of the sample index; default: beside the data
    verify: Literal["full", "structure"] = "full"  # full: every byte, once per version of a file
    workers: Annotated[int, Field(ge=0, le=512)] = 1  # loader processes per rank


@dataclass
class StackLayersConfig(Section):
    """The positions of the MoE layers in one stack of blocks, which are counted from 1.

    An MoE layer replaces the FFN of every n-th block or of listed blocks, or is inserted after a block.
    """

    every: Layers | None = None  # n: blocks n, 2n, 3n, ...
    at: list[Layers] = field(default_factory=list)  # further blocks
    insert_after: list[Layers] = field(
        default_factory=list
    )  # a separate MoE layer after these blocks, as in BASE


@dataclass
class LayersConfig(StackLayersConfig):
    """The positions of the MoE layers. `none`: a dense model.

    An encoder_decoder has two stacks, each with positions of its own under `encoder` and `decoder`.
    """

    encoder: StackLayersConfig | None = None  # of an encoder_decoder
    decoder: StackLayersConfig | None = None  # of an encoder_decoder


Scorer = Annotated[PartChoice, one_part("scorer")]
Mask = Annotated[PartChoice, one_part("mask")]
ScoreFunction = Annotated[PartChoice, one_part("score_function")]
Selector = Annotated[PartChoice, one_part("selector")]
Capacity = Annotated[PartChoice, one_part("capacity")]
Loss = Annotated[PartChoice, one_part("loss")]
Masks = Annotated[list[Mask], BeforeValidator(none_at_all)]
Callback = Annotated[PartChoice, one_part("callback")]
ObjectiveChoice = Annotated[PartChoice, one_part("objective")]
Callbacks = Annotated[list[Callback], BeforeValidator(none_at_all)]
Losses = Annotated[dict[str, Loss], BeforeValidator(names_inside)]  # by name; a bare number is the weight


ExpertSize = Annotated[Size | None, BeforeValidator(one_size)]


@dataclass
class RouterConfig(Section):
    """The stages of the router, in order."""

    scorer: Scorer = field(default_factory=lambda: PartChoice.default("scorer"))
    masks: Masks = field(default_factory=list)  # in order, or `none`
    score_function: ScoreFunction = field(default_factory=lambda: PartChoice.default("score_function"))
    selector: Selector = field(default_factory=lambda: PartChoice.default("selector"))
    capacity: Capacity = field(default_factory=lambda: PartChoice.default("capacity"))
    replay: PathText | None = None  # folder of a record (log.routing) whose choices replace the selector's


@dataclass
class MoEConfig(Section):
    """The MoE layer: its positions, experts, router and auxiliary losses."""

    layers: LayersConfig = field(default_factory=LayersConfig)
    num_experts: Size = 8  # in each MoE layer
    expert_ffn_hidden_size: ExpertSize = None  # FFN size of every expert; default: the dense blocks' size
    expert_activation: Activation | None = None  # of routed and shared experts; default: model.activation
    expert_bias: bool = False  # biases of both linear layers of each routed expert, as in gpt-oss
    expert_sublayers: Layers = 1  # above 1: each expert is a stack of that many residual FFN sub-layers
    expert_output_dropout: Fraction = 0.0  # on an expert's output (MoEC's "MoE dropout")
    expert_activation_dropout: Fraction = 0.0  # after the activation inside (Switch's "expert dropout")
    num_shared_experts: SizeOrZero = 0  # with the experts' size; they compute every token
    shared_expert_ffn_hidden_size: ExpertSize = None  # joint FFN size; default: number x the experts' size
    shared_expert_mode: Literal["sum", "gated", "residual"] = "sum"  # gated: sigmoid(w.x); residual: softmax
    frozen: list[Literal["router", "experts"]] = field(default_factory=list)  # not trained
    router: RouterConfig = field(default_factory=RouterConfig)
    losses: Losses = field(default_factory=dict)  # name: weight, name: options, or name: `none`; or `none`


@dataclass
class ParallelConfig(Section):
    """How ranks share the work. The data-parallel size is the world size divided by `tensor`."""

    tensor: Size = 1  # ranks that share a micro batch and split attention, dense FFNs and the embedding
    sequence: bool = False  # sequence parallelism: norms and dropout on a part of the sequence
    expert: Size = 1  # ranks that share one set of experts
    expert_tensor: Size = 1  # ranks that split each expert by its FFN size
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"  # auto: as in the DeepSpeed file
    deepspeed: PathText | None = None  # a file of ds_configs/; default: ZeRO 0 in fp32
    timeout_minutes: Minutes = 30.0  # timeout of a collective over all ranks


@dataclass
class GroupConfig(Section):
    """A parameter group with its own learning rate and decay: parameters whose names match `pattern`."""

    pattern: Annotated[
        str, AfterValidator(checked_pattern)
    ]  # regular expression, searched in the parameter's name
    lr_scale: NonNegativeFloat = 1.0  # times the schedule's learning rate
    weight_decay: NonNegativeFloat | None = None  # for matrices and vectors; default: as for other parameters


@dataclass
class OptimizerConfig(Section):
    """AdamW or Adam, and its learning-rate schedule. Steps are optimiser steps."""

    name: Literal["adamw", "adam"] = "adamw"  # adamw: decoupled weight decay; adam: L2 regularisation
    lr: Rate = 3e-4  # the peak
    min_lr: Annotated[float, Field(ge=0, le=1000)] = 0.0
    schedule: Literal["cosine", "linear", "inverse_sqrt", "wsd", "constant"] = "cosine"
    warmup_steps: NonNegativeInt = 0  # linear, from 0 to lr
    warmup_share: Fraction | None = None  # instead of warmup_steps: share of the run's steps, rounded up
    decay_steps: PositiveInt | None = None  # cosine, linear, wsd reach min_lr there; default: the run's end
    wsd_decay_steps: PositiveInt | None = None  # the decay phase of `wsd`; default: a tenth of decay_steps
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: Small = 1e-8
    weight_decay: Decay | None = None  # for matrices only; default: 0.1 with adamw, 0 with adam
    grad_clip: NonNegativeFloat = 1.0  # global norm, dense and expert parameters together; 0: off
    groups: list[GroupConfig] = field(default_factory=list)  # of parameters, by name; the first match counts


@dataclass
class RampupConfig(Section):
    """Grow the global batch from `start` by `increment` until train.global_batch_size."""

    start: PositiveInt
    increment: PositiveInt
    samples: Annotated[int, Field(gt=0, le=10**12)]  # samples over which the batch grows in equal steps


@dataclass
class ProfilerConfig(Section):
    """A window of steps recorded with torch.profiler, written to <run>/profile."""

    start_step: PositiveInt | None = None  # None: off
    num_steps: Layers = 3


@dataclass
class LossSpikeConfig(Section):
    """Does not apply a step whose loss is far above the previous ones (OLMo 2's rule)."""

    sigmas: PositiveFloat | None = None  # standard deviations above the mean; None: off
    window: Annotated[int, Field(ge=2, le=10**6)] = (
        128  # previous applied steps; the rule starts after as many
    )
    action: Literal["skip", "stop"] = "skip"  # skip the batch, or end the run


@dataclass
class TrainConfig(Section):
    """Length and batch sizes of the training. Batch sizes count sequences."""

    objective: ObjectiveChoice = field(default_factory=lambda: PartChoice.default("objective"))
    steps: PositiveInt | None = None  # optimiser steps of the whole run; default: 100, if no epochs
    epochs: PositiveFloat | None = None  # instead of steps: passes over the training data, in whole batches
    micro_batch_size: Size = 1  # sequences per rank and forward pass
    global_batch_size: PositiveInt | None = None  # default: micro_batch_size x data-parallel size
    batch_rampup: RampupConfig | None = None
    label_smoothing: Fraction = 0.0  # probability given to the other tokens
    exit_after_steps: PositiveInt | None = None  # save and stop after this many steps of a launch
    exit_after_minutes: Annotated[float, Field(gt=0, le=10**7)] | None = None
    max_skipped_in_a_row: PositiveInt = 10  # consecutive skipped steps that end the run
    loss_spike: LossSpikeConfig = field(default_factory=LossSpikeConfig)
    hang_minutes: MinutesOrZero = (
        10.0  # time without progress after which the watchdog ends the run; 0: never
    )
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    callbacks: Callbacks = field(default_factory=list)  # of plugins, in order; or `none`

    def __post_init__(self) -> None:
        if self.steps is None and self.epochs is None:
            self.steps = DEFAULT_STEPS


@dataclass
class EvaluationConfig(Section):
    """Validation at intervals, and always at the end of the run."""

    every: NonNegativeInt = 0  # steps; 0: only at the end
    batches: SizeOrZero = 8  # global batches per validation set; 0: no evaluation
    at_start: bool = False


@dataclass
class InitConfig(Section):
    """Start a new run from the weights of another run's checkpoint, with a fresh optimiser."""

    path: PathText | None = None  # a step_* folder
    experts: Literal["same", "cut", "copy"] = "same"  # cut a dense FFN into the experts, or copy it into each
    noise: NonNegativeFloat = 0.0  # std of noise on cut or copied experts, over the std of the FFN's weight
    router_scale: NonNegativeFloat = 1.0  # cut, copy: multiplies the router's initial parameters


@dataclass
class CheckpointConfig(Section):
    """When checkpoints are saved, how many are kept, and which one a launch resumes from."""

    every: NonNegativeInt = 0  # steps; 0: only at the end
    keep: Size = 2
    background: bool = True  # write during training, from a copy in host memory
    save_at_end: bool = True
    init: InitConfig = field(default_factory=InitConfig)
    resume: PathText = "never"  # never | auto (the latest of this run, if any) | a checkpoint's folder
    allow_changes: bool = False  # resume with a router that computes another function of the same weights


@dataclass
class WandbConfig(Section):
    """Weights & Biases; offline if nobody is logged in."""

    enabled: bool = False
    mode: Literal["auto", "online", "offline"] = "auto"
    project: str = "megamoe"
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass
class LogConfig(Section):
    """Where metrics are written; metrics.jsonl always is."""

    every: PositiveInt = 1  # steps
    wandb: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: bool = False
    report: bool = True  # an HTML page at the end
    routing: PathText | None = None  # folder for the experts chosen for every token
    dead_window: PositiveInt = 100  # steps without a pair after which an expert counts as dead
    gradient_shares_every: NonNegativeInt = 0  # steps; 0: never
    timers: bool = False  # the time of each stage of the MoE layers
    peak_tflops: PositiveFloat | None = None  # of one rank, for perf/mfu; default: of known GPUs
    straggler_factor: Annotated[float, Field(gt=1)] | None = (
        1.5  # a rank's own time over the median; null: off
    )
    heat_map_every: NonNegativeInt = 100  # steps; pictures for W&B and TensorBoard; 0: none


@dataclass
class RunConfig(Section):
    """The whole configuration of a run."""

    name: Annotated[str, AfterValidator(is_run_name)] = "run"  # name of the run and its folder
    output: PathText = "runs"  # the run's folder is <output>/<name>
    overwrite: bool = False  # replace an existing run folder
    seed: Seed = 1234  # for weights, data order and every draw
    plugins: list[str] = field(default_factory=list)  # files, modules or entry points that add parts
    differences: list[str] = field(default_factory=list)  # from the published model; printed by a plan
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
