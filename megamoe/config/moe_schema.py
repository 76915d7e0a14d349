"""The section `moe` of the configuration as typed dataclasses."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BeforeValidator

from megamoe.config.model_schema import Activation
from megamoe.config.parts import (
    PartChoice,
    Section,
    none_means_empty,
    normalise_losses,
    part_validator,
    single_size,
)
from megamoe.config.values import Fraction, Layers, PathText, Size, SizeOrZero


@dataclass
class StackLayersConfig(Section):
    """The positions of the MoE layers in one stack of blocks, which are counted from 1.

    An MoE layer replaces the FFN of every n-th block or of listed blocks, or is inserted after a block.
    """

    every: Layers | None = None
    """n: MoE layers in the blocks n, 2n, 3n, ..."""
    at: list[Layers] = field(default_factory=list)
    """MoE layers in these blocks too"""
    insert_after: list[Layers] = field(default_factory=list)
    """a separate MoE layer after each of these blocks, as in BASE"""


@dataclass
class GroupStackConfig(Section):
    """The layers of a group in one stack of blocks, by their blocks, which are counted from 1.

    A list of blocks stands for `at`, `first 3` and `last 2` for those keys.
    """

    every: Layers | None = None
    """n: the MoE layers of the blocks n, 2n, 3n, ..."""
    at: list[Layers] = field(default_factory=list)
    """the MoE layers of these blocks, or inserted after them"""
    first: Layers | None = None
    """the first n MoE layers"""
    last: Layers | None = None
    """the last n MoE layers"""


@dataclass
class GroupLayersConfig(GroupStackConfig):
    """The layers of a group; those of multi-token prediction go with the decoder's last block.

    An encoder_decoder has two stacks, each with layers of its own under `encoder` and `decoder`.
    """

    encoder: GroupStackConfig | None = None
    """layers in the encoder of an encoder_decoder; default: none"""
    decoder: GroupStackConfig | None = None
    """layers in the decoder of an encoder_decoder; default: none"""


@dataclass
class LayersConfig(StackLayersConfig):
    """The positions of the MoE layers. `none`: a dense model.

    An encoder_decoder has two stacks, each with positions of its own under `encoder` and `decoder`.
    """

    encoder: StackLayersConfig | None = None
    """places in the encoder of an encoder_decoder; default: none"""
    decoder: StackLayersConfig | None = None
    """places in the decoder of an encoder_decoder; default: none"""


Scorer = Annotated[PartChoice, part_validator("scorer")]
Residual = Annotated[PartChoice, part_validator("residual")]
Mask = Annotated[PartChoice, part_validator("mask")]
ScoreFunction = Annotated[PartChoice, part_validator("score_function")]
Selector = Annotated[PartChoice, part_validator("selector")]
Capacity = Annotated[PartChoice, part_validator("capacity")]
Loss = Annotated[PartChoice, part_validator("loss")]
Masks = Annotated[list[Mask], BeforeValidator(none_means_empty)]
Losses = Annotated[dict[str, Loss], BeforeValidator(normalise_losses)]  # by name; a bare number is the weight
ExpertSize = Annotated[Size | None, BeforeValidator(single_size)]


@dataclass
class RouterConfig(Section):
    """The stages of the router, in order."""

    scorer: Scorer = field(default_factory=lambda: PartChoice.default("scorer"))
    """computes the scores [T, E]"""
    residual: Residual = field(default_factory=lambda: PartChoice.default("residual"))
    """adds to them what the router of the MoE layer before has scored"""
    masks: Masks = field(default_factory=list)
    """restrict the experts that a token may choose, in this order; or `none`"""
    score_function: ScoreFunction = field(default_factory=lambda: PartChoice.default("score_function"))
    """turns scores into probabilities"""
    selector: Selector = field(default_factory=lambda: PartChoice.default("selector"))
    """chooses the (token, expert) pairs"""
    capacity: Capacity = field(default_factory=lambda: PartChoice.default("capacity"))
    """decides which pairs are kept"""
    replay: PathText | None = None
    """folder of a routing record, whose choices replace the selector's; see
    docs/run/runs.md#recording-and-replaying-the-routing
    """


@dataclass
class ZeroExpertsConfig(Section):
    """Experts without computation, after the `num_experts` others and in this order (MoE++, LongCat-Flash).

    The router chooses among all. These take no row in dispatch, exchange or grouped product.
    """

    identity: SizeOrZero = 0
    """E(x) = x: the token itself, MoE++'s copy experts"""
    zero: SizeOrZero = 0
    """E(x) = 0: the choice has no output"""
    constant: SizeOrZero = 0
    """E(x) = a x + b v, with a learned vector v and [a, b] = softmax(W x)"""

    @property
    def total(self) -> int:
        """The number of experts without computation."""
        return self.identity + self.zero + self.constant


@dataclass
class MoELayerConfig(Section):
    """One MoE layer: its experts, router and auxiliary losses."""

    num_experts: Size = 8
    """experts of each MoE layer"""
    expert_ffn_hidden_size: ExpertSize = None
    """FFN size of every expert; default: the dense blocks' FFN size"""
    expert_activation: Activation | None = None
    """activation of the experts, shared ones included; default: `model.activation`"""
    expert_bias: bool = False
    """biases of both linear layers of each routed expert, as in gpt-oss"""
    weights_in_activation: bool = False
    """multiply by the router's weights inside the experts, between their two products: the experts' outputs
    are then not kept for the backward pass; the weights travel to the experts, and rounding differs
    """
    zero_experts: ZeroExpertsConfig = field(default_factory=ZeroExpertsConfig)
    """experts that compute nothing; see docs/route/parts.md#experts-without-computation"""
    latent_size: Size | None = None
    """size of the space in which routed experts compute: tokens are projected to it before they are sent to
    the experts, and their outputs back; default: `model.hidden_size`, without projections
    """
    expert_sublayers: Layers = 1
    """above 1: each expert is a stack of this many residual FFN sub-layers"""
    expert_output_dropout: Fraction = 0.0
    """on the output of an expert (MoEC's "MoE dropout")"""
    expert_activation_dropout: Fraction = 0.0
    """after the activation inside an expert (Switch's "expert dropout")"""
    num_shared_experts: SizeOrZero = 0
    """experts that compute every token; by default each has the size of a routed one"""
    shared_expert_ffn_hidden_size: ExpertSize = None
    """FFN size of the shared experts together; default: their number x the size of a routed one"""
    shared_expert_mode: Literal["sum", "gated", "residual"] = "sum"
    """how their output is added; sum: without a weight; gated: weighted by sigmoid(w.x), as in Qwen2-MoE;
    residual: routed and shared output weighted by a softmax
    """
    output_activation: Literal["sigmoid"] | None = None
    """of the layer's output, before it is added to the residual stream (Shazeer et al. 2017, appendix C.1)"""
    frozen: list[Literal["router", "experts"]] = field(default_factory=list)
    """their weights do not change; see docs/run/runs.md#starting-from-another-runs-weights"""
    router: RouterConfig = field(default_factory=RouterConfig)
    losses: Losses = field(default_factory=dict)
    """auxiliary losses, each as `name: weight`, `name: {options}` or `name: none`; or `none` for no losses"""


@dataclass
class _GroupPlace(Section):
    """Declares `layers` before the other keys of a group."""

    layers: GroupLayersConfig = field(default_factory=GroupLayersConfig)


@dataclass
class LayerGroupConfig(MoELayerConfig, _GroupPlace):
    """Layers that differ: every other key is one of `moe` and replaces it for these layers."""


@dataclass
class _Place(Section):
    """Declares `layers` before the other keys of `moe`."""

    layers: LayersConfig = field(default_factory=LayersConfig)


@dataclass
class MoEConfig(MoELayerConfig, _Place):
    """The MoE layers: their positions, experts, routers and auxiliary losses."""

    groups: list[LayerGroupConfig] = field(default_factory=list)
    """layers that differ: a list of `{layers: ..., <any key above>: ...}`; see
    docs/route/parts.md#a-router-that-differs-by-layer
    """
