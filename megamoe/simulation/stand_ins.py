"""What a plan puts in the place of data, and of parts whose sizes depend on the values of tokens."""

import copy

from megamoe.config import RunConfig
from megamoe.config.parts import PartChoice
from megamoe.config.shapes import moe_layer_numbers
from megamoe.model.size import mean_choices
from megamoe.moe.alternatives import provides
from megamoe.registry import get_part


def without_data(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Return a configuration that needs no data and no values of tokens, and a line for each change.

    Data that is named is replaced where model.vocab_size says the vocabulary, which is all that counts here.
    """
    changed, lines = copy.deepcopy(config), []
    if changed.model.vocab_size is not None and not changed.data.mock:
        changed.data.mock, changed.data.sources, changed.data.split = True, [], [1.0, 0.0, 0.0]
        changed.data.validation, changed.data.sampling_exponent = {}, None
        changed.data.tokenizer = None
        lines.append("the data is not read; all sequences are full")
    if changed.data.document_aware:
        changed.data.document_aware = False
        lines.append("data.document_aware: attention is counted over whole sequences, which costs more")
    if not moe_layer_numbers(config):
        return changed, lines
    router = changed.moe.router
    if router.masks:
        names = ", ".join(mask.name for mask in router.masks)
        lines.append(
            f"moe.router.masks: {names} forbid experts by value; a token's experts are counted without"
        )
        router.masks = []
    if provides("assigned", router.selector) or not provides("fixed_count", router.selector):
        chosen = max(1, round(mean_choices(config)))
        line = (
            f"moe.router.selector: {router.selector.name} chooses by value; counted as top_k with k={chosen}"
        )
        part = get_part("selector", "top_k")
        # One expert has the weight 1 after renormalisation, and its router no gradient.
        weights = {"weights": "raw"} if chosen == 1 else {}
        router.selector = PartChoice("selector", "top_k", part.Config(k=chosen, **weights))
        lines.append(line)
    if not provides("dropless", router.capacity):
        name = router.capacity.name
        lines.append(f"moe.router.capacity: {name} drops pairs by value; counted as if none were dropped")
        router.capacity = PartChoice.default("capacity")
    return changed, lines
