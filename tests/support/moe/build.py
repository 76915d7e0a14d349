"""Small layers for the tests of megamoe.moe."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megamoe.config import PartChoice, parse_config
from megamoe.config.schema import Activation, MoEConfig
from megamoe.kernels.choice import DEFAULT_KERNELS, Kernels
from megamoe.moe.context import MicroBatch
from megamoe.moe.layer import LayerShape, MoELayer
from megamoe.moe.observation import Observation
from megamoe.moe.part import Dims, StepContext
from megamoe.moe.router import Router, build_part
from megamoe.moe.routing import Pairs, Routing, Scored
from megamoe.registry import get_part

HIDDEN = 16
FFN = 24
STARTS: dict[str, Any] = {"std": 0.4, "output_std": 0.2, "seed": 1, "layer": 1}  # of experts' weights
VOCAB = 32
Function = Callable[..., Tensor]


def moe_config(**tree: Any) -> MoEConfig:
    """Return the section `moe` with these keys."""
    return parse_config({"moe": tree}).moe


def make_context(
    seed: int = 0,
    step: int = 0,
    micro_batch: int = 0,
    data_group: Any = None,
    aux_scale: float = 1.0,
    **fields: Any,
) -> StepContext:
    """Return a context of this step and of a micro batch with these fields."""
    batch = MicroBatch(number=micro_batch, **fields)
    return StepContext(seed, step, aux_scale, data_group, batch=batch)


def set_tokens(context: StepContext, **fields: Any) -> None:
    """Change fields of the context's micro batch."""
    context.batch = replace(context.batch, **fields)


def make_layer(
    config: MoEConfig,
    context: StepContext | None = None,
    activation: Activation = "swiglu",
    seed: int = 1,
    kernels: Kernels = DEFAULT_KERNELS,
) -> MoELayer:
    """Build a layer with weights so large that experts and router differ clearly between tokens.

    A residual gets scores of a layer before, which are a product of the tokens with a fixed matrix.
    """
    torch.manual_seed(seed)
    shape = LayerShape(
        HIDDEN, FFN, 1, activation, init_std=0.4, output_std=0.4, seed=seed, vocab_size=VOCAB, kernels=kernels
    )
    layer = MoELayer(config, shape, context or StepContext())
    if layer.router.residual.reads_before:
        layer.router.register_forward_pre_hook(_with_scores_before)
    return layer


def _with_scores_before(router: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden_TH, context = inputs[:2]
    generator = torch.Generator().manual_seed(5)
    matrix_HE = torch.randn(hidden_TH.shape[1], router.dims.num_experts, generator=generator)
    return hidden_TH, context, hidden_TH.float() @ matrix_HE.to(hidden_TH.device)


def make_part(
    kind: str,
    name: str,
    num_experts: int = 4,
    layer: int = 1,
    dims: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Build a single part without checking its options; `dims`: more fields of Dims."""
    return build_part(
        PartChoice(kind, name, get_part(kind, name).Config(**options)),
        Dims(HIDDEN, num_experts, layer, **dims or {}),
    )


def make_hidden(num_tokens: int, seed: int = 2, skewed: bool = False) -> Tensor:
    """Return [T, H]; skewed: with a large first component, by which a router can send all tokens to one
    expert.
    """
    hidden_TH = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))
    if skewed:
        hidden_TH[:, 0] = 5.0
    return hidden_TH


def select(
    name: str, scored: Scored, context: StepContext | None = None, evaluate: bool = False, **options: Any
) -> Pairs:
    """Return the pairs of a selector with these options."""
    selector = make_part("selector", name, scored.num_experts, **options).train(not evaluate)
    return selector(scored, context or StepContext())


def routed(scored: Scored, pairs: Pairs) -> Routing:
    """Return the Routing of these pairs, all of which are computed."""
    return Routing(**vars(scored), wanted=pairs, pairs=pairs)


def loss_of(
    name: str,
    routing: Routing,
    context: StepContext | None = None,
    dims: dict[str, Any] | None = None,
    **options: Any,
) -> Tensor:
    """Return a loss of a routing; `dims`: more fields of Dims."""
    loss = make_part("loss", name, routing.num_experts, dims=dims, **options)
    return loss(routing, context or StepContext())


def assert_alike(ours: Function, plain: Function, *at: Tensor, **close: Any) -> None:
    """See that two functions have the same value and gradients at these tensors, which are not all 0.

    close: options of torch.testing.assert_close.
    """
    results = []
    for function in (ours, plain):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in at]
        value = function(*leaves)
        results.append([value.detach(), *torch.autograd.grad(value, leaves, materialize_grads=True)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, **close)
    assert max(float(gradient.abs().max()) for gradient in results[1][1:]) > 1e-4


def gradient_of(leaf: Any) -> Tensor:
    """Return the gradient, which must exist; leaf: a tensor, or a module's attribute with a parameter's
    name.
    """
    assert isinstance(leaf.grad, Tensor)
    return leaf.grad


def observed(layer: MoELayer) -> Observation:
    """Return what the layer observed of the last forward pass."""
    assert layer.observation is not None
    return layer.observation


def make_pairs(experts: list[list[int]], weights: list[list[float]] | None = None) -> Pairs:
    """Return the pairs of each token's experts in order of choice."""
    flat = [(token, expert, choice) for token, row in enumerate(experts) for choice, expert in enumerate(row)]
    token_N, expert_N, choice_N = torch.tensor(flat, dtype=torch.int64).reshape(-1, 3).unbind(1)
    weight_N = torch.ones(len(flat)) if weights is None else torch.tensor([w for row in weights for w in row])
    return Pairs(token_N, expert_N, weight_N, choice_N)


def make_routing(experts: list[list[int]], scores_TE: Tensor, probs_TE: Tensor) -> Routing:
    """Return a Routing in which every wanted pair is computed."""
    return routed(make_scored(scores_TE, probs_TE), make_pairs(experts))


class GivenScores(nn.Module):
    """A scorer that returns given scores, whatever the hidden states."""

    takes_any_dtype = False

    def __init__(self, scores_TE: Tensor, extras: dict[str, Tensor]) -> None:
        super().__init__()
        self.scores_TE, self.extras = scores_TE, extras

    def forward(self, hidden_TH: Tensor, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        return self.scores_TE, dict(self.extras)


def make_router(num_experts: int, preset: str | None = None, **router: Any) -> Router:
    """Build a router with these stages, or with a preset that they override."""
    tree = router if preset is None else {"preset": preset, **router}
    return make_layer(moe_config(num_experts=num_experts, router=tree)).router


def route_scores(
    router: Router, scores_TE: Tensor, context: StepContext | None = None, **extras: Tensor
) -> Routing:
    """Route with these scores instead of the scorer's."""
    router.scorer = GivenScores(scores_TE, extras)  # type: ignore[assignment]
    return router(torch.zeros(len(scores_TE), HIDDEN), context or StepContext())


def make_scored(
    scores_TE: Tensor, probs_TE: Tensor | None = None, candidates_TE: Tensor | None = None, **extras: Tensor
) -> Scored:
    """Build a selector's input; without `probs_TE`, p is the scores' softmax over the candidates."""
    if probs_TE is None:
        masked_TE = scores_TE if candidates_TE is None else scores_TE.masked_fill(~candidates_TE, -torch.inf)
        probs_TE = masked_TE.softmax(-1)
    ranking_TE = probs_TE.detach()
    if candidates_TE is not None:
        ranking_TE = ranking_TE.masked_fill(~candidates_TE, -torch.inf)
    return Scored(scores_TE, scores_TE.softmax(-1), probs_TE, ranking_TE, candidates_TE, extras)
