"""The run's configuration as typed dataclasses: every key of the YAML, its default and its meaning.

One dataclass per section, in the order in which the data travels. A part of the MoE layer (scorer,
selector, loss, ...) brings its own `Config`; here it stands as a `PartChoice`: its name and its options.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from megamoe.config.parts import STRICT, PartChoice, names_inside, none_at_all, one_part, one_size
from megamoe.config.paths import is_dataset, is_minutes, is_path, is_run_name
from megamoe.config.patterns import checked_pattern

DEFAULT_STEPS = 100
Precision = Literal["fp32", "bf16", "fp16"]
Activation = Literal["swiglu", "geglu", "reglu", "gelu", "relu"]
# Upper bounds are far above any real use: what is larger is a slip that would end in an overflow or silence.
PositiveInt = Annotated[int, Field(gt=0, le=10**9)]
NonNegativeInt = Annotated[int, Field(ge=0, le=10**9)]
PositiveFloat = Annotated[float, Field(gt=0, le=1e15)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e15)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Size = Annotated[int, Field(gt=0, le=10**6)]  # of a vector
SizeOrZero = Annotated[int, Field(ge=0, le=10**6)]
Layers = Annotated[int, Field(gt=0, le=2000)]
Count = Annotated[int, Field(gt=0, le=10_000)]  # of steps that are recorded
Length = Annotated[int, Field(gt=0, le=2**24)]  # of a sequence
Small = Annotated[float, Field(ge=1e-30, le=1)]  # added to what is divided by; below, fp32 would lose it
Deviation = Annotated[float, Field(gt=0, le=1000)]
Decay = Annotated[float, Field(ge=0, le=1000)]
Rate = Annotated[float, Field(gt=0, le=1000)]
Minutes = Annotated[float, Field(ge=0.01, le=10**7)]
MinutesOrZero = Annotated[float, AfterValidator(is_minutes)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # NumPy's bound
PathText = Annotated[str, AfterValidator(is_path)]


@dataclass
class SourceConfig:
    """One indexed dataset: a path without its .bin/.idx ending, and its share of the blend."""

    __pydantic_config__ = STRICT
    path: Annotated[str, AfterValidator(is_dataset)]
    weight: PositiveFloat = 1.0


Sources = list[SourceConfig]  # a bare path stands for {path: ...}


@dataclass
class DataConfig:
    """What is read: text that `tools/prepare_data.py` turned into .bin/.idx, or mock data."""

    __pydantic_config__ = STRICT
    sources: Sources = field(default_factory=list)  # blended by weight, cut by `split`
    sampling_exponent: NonNegativeFloat | None = None  # a: weights are tokens^a, in place of the sources' own
    split: list[NonNegativeFloat] = field(default_factory=lambda: [0.98, 0.02, 0.0])  # train, valid, test
    validation: dict[str, Sources] = field(default_factory=dict)  # further validation sets, by name
    mock: bool = False  # made-up tokens, to try a layout or a machine
    sequence_length: Length = 256  # tokens
    tokenizer: PathText | None = None  # default: the one named in the data card
    document_aware: bool = False  # attention, positions and loss stop at document boundaries
    cache: PathText | None = None  # folder of the sample index; default: beside the data
    verify: Literal["full", "structure"] = "full"  # full: every byte, once per version of a file
    workers: Annotated[int, Field(ge=0, le=512)] = 1  # loader processes per rank


@dataclass
class ModelConfig:
    """The transformer: Megatron-Core's GPTModel."""

    __pydantic_config__ = STRICT
    num_layers: Layers = 4  # transformer blocks
    hidden_size: Size = 256  # a multiple of the heads
    num_attention_heads: Size = 4
    num_query_groups: Size | None = None  # grouped-query attention; default: one per head
    ffn_hidden_size: Size | None = None  # of the dense blocks; default: 4 x hidden_size
    vocab_size: Annotated[int, Field(gt=0, le=10**8)] | None = None  # default: the tokenizer's
    vocab_multiple: Size = 64  # the embedding is padded to a multiple of it
    position: Literal["rope", "learned"] = "rope"
    rope_base: PositiveInt = 10000  # of the rotary frequencies
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: Small = 1e-5  # added to the variance
    activation: Activation = "swiglu"  # of FFNs; swiglu, geglu and reglu are gated
    bias: bool = False  # of attention and the dense FFN; experts have none, as Megatron's grouped ones
    tie_embeddings: bool = True  # output weights are the embedding
    init_std: Deviation = 0.02  # over sqrt(2 num_layers) where a weight writes into the residual
    init_scale: Deviation | None = None  # s: start as truncated normal of std sqrt(s / fan_in) instead
    hidden_dropout: Fraction = 0.0  # on what a block adds to its residual
    attention_dropout: Fraction = 0.0  # on attention weights
    recompute: Literal["none", "selective", "full"] = "none"  # in backward: MoE layers, or whole blocks
    backend: Literal["auto", "torch", "transformer_engine"] = "auto"  # auto: the last if it and CUDA exist
    norm_kernel: Literal["auto", "torch", "apex"] = "auto"  # under `torch`; auto: Apex's if installed
    cpu_kernels: Literal["auto", "plain", "compiled"] = "auto"  # auto: compiled if GCC is there
    gpu_kernels: Literal["auto", "plain", "triton"] = "auto"  # auto: triton if installed; see backends.md
    keep_freed_memory: bool = True  # on the CPU: malloc gives it out again, not back to the system
    fp8: Literal["none", "delayed", "tensorwise", "blockwise", "mxfp8"] = "none"  # FP8 products: scales
    fp8_format: Literal["hybrid", "e4m3"] | None = None  # default: e4m3 for blockwise and mxfp8, else hybrid
    fp8_amax_history: Size | None = None  # of `delayed`: passes that set a scale; default: 1024


@dataclass
class LayersConfig:
    """Where MoE layers stand, blocks counted from 1: in place of the FFN of every n-th block, or of those
    listed; or as a layer of its own after a block. None of them (`none`): a dense model."""

    __pydantic_config__ = STRICT
    every: Layers | None = None  # n: in the blocks n, 2n, 3n, ...
    at: list[Layers] = field(default_factory=list)  # in these blocks too
    insert_after: list[Layers] = field(default_factory=list)  # a layer of its own there, as in BASE


Scorer = Annotated[PartChoice, one_part("scorer")]
Mask = Annotated[PartChoice, one_part("mask")]
ScoreFunction = Annotated[PartChoice, one_part("score_function")]
Selector = Annotated[PartChoice, one_part("selector")]
Capacity = Annotated[PartChoice, one_part("capacity")]
Loss = Annotated[PartChoice, one_part("loss")]
Masks = Annotated[list[Mask], BeforeValidator(none_at_all)]
Callback = Annotated[PartChoice, one_part("callback")]
Callbacks = Annotated[list[Callback], BeforeValidator(none_at_all)]
Losses = Annotated[dict[str, Loss], BeforeValidator(names_inside)]  # by name; a bare number is the weight


ExpertSize = Annotated[Size | None, BeforeValidator(one_size)]


@dataclass
class RouterConfig:
    """The stages between the hidden states and the Routing, in their order."""

    __pydantic_config__ = STRICT
    scorer: Scorer = field(default_factory=lambda: PartChoice.default("scorer"))
    masks: Masks = field(default_factory=list)  # masks before the score function, in order; or `none`
    score_function: ScoreFunction = field(default_factory=lambda: PartChoice.default("score_function"))
    selector: Selector = field(default_factory=lambda: PartChoice.default("selector"))
    capacity: Capacity = field(default_factory=lambda: PartChoice.default("capacity"))


@dataclass
class MoEConfig:
    """The MoE layer: where it stands, its experts, its router, its auxiliary losses."""

    __pydantic_config__ = STRICT
    layers: LayersConfig = field(default_factory=LayersConfig)
    num_experts: Size = 8  # of each MoE block
    expert_ffn_hidden_size: ExpertSize = None  # of every expert; default: the dense blocks' size
    expert_activation: Activation | None = None  # of experts, shared ones too; default: model.activation
    expert_sublayers: Layers = 1  # above 1: each expert is a stack of that many residual FFN sub-layers
    expert_output_dropout: Fraction = 0.0  # on an expert's output (MoEC's "MoE dropout")
    expert_activation_dropout: Fraction = 0.0  # after the activation inside (Switch's "expert dropout")
    num_shared_experts: SizeOrZero = 0  # each of the experts' size; every token visits them
    shared_expert_mode: Literal["sum", "gated", "residual"] = "sum"  # gated: sigmoid(w.x); residual: softmax
    frozen: list[Literal["router", "experts"]] = field(default_factory=list)  # kept as they are
    router: RouterConfig = field(default_factory=RouterConfig)
    losses: Losses = field(default_factory=dict)  # name: weight, name: options, or name: `none`; or `none`


@dataclass
class ParallelConfig:
    """How ranks share the work. Data parallelism is what remains: the world size over `tensor`."""

    __pydantic_config__ = STRICT
    tensor: Size = 1  # ranks that share one micro batch: attention, dense FFNs, embedding are cut
    sequence: bool = False  # norms and dropout on a share of the sequence each, where tensor is above 1
    expert: Size = 1  # ranks that share one set of experts
    expert_tensor: Size = 1  # ranks that hold slices of one expert
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"  # auto: what the DeepSpeed file says
    deepspeed: PathText | None = None  # a file of ds_configs/; default: ZeRO 0 in fp32
    timeout_minutes: Minutes = 30.0  # of a collective operation over all ranks


@dataclass
class GroupConfig:
    """Parameters that are updated otherwise: those in whose names `pattern` is found."""

    __pydantic_config__ = STRICT
    pattern: Annotated[str, AfterValidator(checked_pattern)]  # a regular expression, searched in the name
    lr_scale: NonNegativeFloat = 1.0  # times the schedule's learning rate
    weight_decay: NonNegativeFloat | None = None  # of matrices and vectors; default: as outside of groups


@dataclass
class OptimizerConfig:
    """AdamW or Adam, and its learning-rate schedule. Steps are optimiser steps."""

    __pydantic_config__ = STRICT
    name: Literal["adamw", "adam"] = "adamw"  # weight decay apart from the gradient; adam: L2, added to it
    lr: Rate = 3e-4  # the peak
    min_lr: Annotated[float, Field(ge=0, le=1000)] = 0.0
    schedule: Literal["cosine", "linear", "inverse_sqrt", "wsd", "constant"] = "cosine"
    warmup_steps: NonNegativeInt = 0  # linear, from 0 to lr
    warmup_share: Fraction | None = None  # in place of warmup_steps: of the run's steps, rounded up
    decay_steps: PositiveInt | None = None  # cosine, linear, wsd reach min_lr there; default: the run's end
    wsd_decay_steps: PositiveInt | None = None  # the last stretch of `wsd`; default: a tenth of decay_steps
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: Small = 1e-8
    weight_decay: Decay | None = None  # of matrices alone; default: 0.1 of adamw, 0 of adam
    grad_clip: NonNegativeFloat = 1.0  # global norm, dense and expert parameters together; 0: off
    groups: list[GroupConfig] = field(default_factory=list)  # of parameters, by name; the first match counts


@dataclass
class RampupConfig:
    """Grow the global batch from `start` by `increment` until train.global_batch_size."""

    __pydantic_config__ = STRICT
    start: PositiveInt
    increment: PositiveInt
    samples: Annotated[int, Field(gt=0, le=10**12)]  # over which the growth is spread evenly


@dataclass
class ProfilerConfig:
    """A window of steps recorded with torch.profiler, written to <run>/profile."""

    __pydantic_config__ = STRICT
    start_step: PositiveInt | None = None  # None: off
    num_steps: Layers = 3


@dataclass
class LossSpikeConfig:
    """A step whose loss is far above those before it is not applied: OLMo 2's rule."""

    __pydantic_config__ = STRICT
    sigmas: PositiveFloat | None = None  # above the mean by so many standard deviations; None: off
    window: Annotated[int, Field(ge=2, le=10**6)] = 128  # applied steps before, all of which there must be
    action: Literal["skip", "stop"] = "skip"  # leave its batch out, or end the run


@dataclass
class TrainConfig:
    """How long and how large. Batch sizes count sequences."""

    __pydantic_config__ = STRICT
    steps: PositiveInt | None = None  # optimiser steps of the whole run; default: 100, if no epochs
    epochs: PositiveFloat | None = None  # in place of steps: passes over the training data, in whole batches
    micro_batch_size: Size = 1  # sequences per rank and forward pass
    global_batch_size: PositiveInt | None = None  # default: micro_batch_size x data-parallel size
    batch_rampup: RampupConfig | None = None
    label_smoothing: Fraction = 0.0  # share of the target given to the other words
    exit_after_steps: PositiveInt | None = None  # save and stop, of this launch
    exit_after_minutes: Annotated[float, Field(gt=0, le=10**7)] | None = None
    max_skipped_in_a_row: PositiveInt = 10  # so many broken steps (not finite, or a spike) end the run
    loss_spike: LossSpikeConfig = field(default_factory=LossSpikeConfig)
    hang_minutes: MinutesOrZero = 10.0  # without progress of any rank, until the run is ended; 0: never
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    callbacks: Callbacks = field(default_factory=list)  # a plugin's code in the loop, in order; or `none`

    def __post_init__(self) -> None:
        if self.steps is None and self.epochs is None:
            self.steps = DEFAULT_STEPS


@dataclass
class EvaluationConfig:
    """Validation at intervals, and always at the end."""

    __pydantic_config__ = STRICT
    every: NonNegativeInt = 0  # steps; 0: only at the end
    batches: SizeOrZero = 8  # global batches per validation set; 0: no evaluation at all
    at_start: bool = False


@dataclass
class InitConfig:
    """Start from the weights of another run's checkpoint: a new run, with a fresh optimiser."""

    __pydantic_config__ = STRICT
    path: PathText | None = None  # a step_* folder
    experts: Literal["same", "cut", "copy"] = "same"  # cut a dense FFN into the experts, or copy it into each


@dataclass
class CheckpointConfig:
    """When the run is saved, how many are kept, and what a launch goes on from."""

    __pydantic_config__ = STRICT
    every: NonNegativeInt = 0  # steps; 0: only at the end
    keep: Size = 2
    background: bool = True  # write while training goes on, from a copy in host memory
    save_at_end: bool = True
    init: InitConfig = field(default_factory=InitConfig)
    resume: PathText = "never"  # never | auto (the latest of this run, if any) | a checkpoint's folder


@dataclass
class WandbConfig:
    """Weights & Biases; offline where nobody is logged in."""

    __pydantic_config__ = STRICT
    enabled: bool = False
    mode: Literal["auto", "online", "offline"] = "auto"
    project: str = "megamoe"
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass
class LogConfig:
    """Where what is measured goes; metrics.jsonl is always written."""

    __pydantic_config__ = STRICT
    every: PositiveInt = 1  # steps
    wandb: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: bool = False
    report: bool = True  # an HTML page at the end


@dataclass
class RunConfig:
    """One run, whole."""

    __pydantic_config__ = STRICT
    name: Annotated[str, AfterValidator(is_run_name)] = "run"  # of the run and its folder
    output: PathText = "runs"  # the run's folder is <output>/<name>
    overwrite: bool = False  # begin anew in a run folder that exists
    seed: Seed = 1234  # of weights, data order and every draw
    plugins: list[str] = field(default_factory=list)  # files, modules or entry points that add parts
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
