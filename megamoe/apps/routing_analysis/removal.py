"""What each expert contributes: the loss of the model without it."""

from contextlib import AbstractContextManager
from typing import Any

from megamoe.apps.evaluation.perplexity import perplexity_on
from megamoe.apps.evaluation.trained_model import TrainedModel
from megamoe.apps.routing_analysis.collect import hooked
from megamoe.moe.layer import MoELayer
from megamoe.moe.router import Router
from megamoe.moe.routing import Routing


def removal(trained: TrainedModel, dataset: Any, samples: int, layers: dict[int, MoELayer]) -> dict[str, Any]:
    """Evaluate the model once for each expert of the layers, without that expert. Collective over all ranks.

    A removed expert computes nothing: its pairs are dropped after the router, and a token's other pairs keep
    their weights. No token is sent elsewhere instead. Returns lm_loss: of the whole model, in nats. rise_E:
    by layer, how much the loss rises without each expert, in nats; negative where it falls. share_E: the
    share of the layer's pairs that the expert computes.

    Source: ours; Michel et al. 2019 remove attention heads one at a time in the same way.
    """
    whole = perplexity_on(trained, dataset, samples)
    found: dict[str, Any] = {"lm_loss": whole.lm_loss, "layers": {}}
    for number, layer in layers.items():
        rise_E = []
        for expert in range(layer.num_experts):
            with without_expert(layer, expert):
                rise_E.append(perplexity_on(trained, dataset, samples).lm_loss - whole.lm_loss)
        load_E = whole.load_LE[number]
        found["layers"][str(number)] = {
            "rise_E": rise_E,
            "share_E": [load / max(sum(load_E), 1) for load in load_E],
        }
    return found


def without_expert(layer: MoELayer, expert: int) -> AbstractContextManager[None]:
    """Drop the pairs of one expert of a layer."""

    def drop(router: Router, inputs: tuple[Any, ...], options: dict[str, Any], routing: Routing) -> Routing:
        return routing.keep(routing.pairs.expert_N != expert)

    return hooked([(layer.router, drop)])
