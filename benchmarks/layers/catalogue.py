"""All candidates by name."""

from functools import partial

from layers import deepspeed_layer, hugging_face, megatron_layer, ours, plain
from layers.candidate import Candidate
from megamoe.errors import UserError

LIMITS = ("limit_grouped", "limit_bmm")
# Measured beside the layers, not layers with a router themselves.
YARDSTICKS = (*LIMITS, "dense")

CANDIDATES = {
    "ours": Candidate(ours.build),
    "limit_grouped": Candidate(plain.GroupedLimit, rows="even", router="none"),
    "limit_bmm": Candidate(plain.BatchedLimit, rows="even", router="none"),
    "dense": Candidate(plain.Dense, rows="dense", router="none"),
    **{
        f"hf_{way}": Candidate(partial(hugging_face.build, way), router="as experts", weight_is_one=True)
        for way in ("eager", "grouped_mm", "batched_mm")
    },
    "deepspeed": Candidate(deepspeed_layer.DeepSpeedLayer),
    "megatron_sequential": Candidate(megatron_layer.sequential),
    "megatron_grouped": Candidate(megatron_layer.grouped),
}


def candidates_of(text: str | None) -> list[str]:
    """Return names from `a,b`, where `limit` is both limits; all without a text. UserError for others."""
    if text is None:
        return list(CANDIDATES)
    names: list[str] = []
    for name in text.split(","):
        if name != "limit" and name not in CANDIDATES:
            known = ", ".join(["limit", *CANDIDATES])
            raise UserError(f"--candidates: there is no {name!r}; there are {known}")
        names += LIMITS if name == "limit" else [name]
    return list(dict.fromkeys(names))
