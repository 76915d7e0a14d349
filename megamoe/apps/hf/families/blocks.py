"""Keys of a class that say which blocks have an MoE layer."""

from megamoe.apps.hf.keys import ABSENT, REQUIRED, Entry, Json, unsupported
from megamoe.config import RunConfig
from megamoe.config.shapes import moe_block_numbers


def sparse_steps() -> Entry:
    """Every n-th block has an MoE layer, but for listed ones (decoder_sparse_step, mlp_only_layers)."""

    def read(given: Json) -> Json:
        step, dense = given["decoder_sparse_step"], given["mlp_only_layers"] or []
        count = given["num_hidden_layers"]
        at = [number for number in range(step, count + 1, step) if number - 1 not in dense]
        return {"moe.layers.at": at}

    def write(config: RunConfig) -> Json:
        blocks = set(moe_block_numbers(config))
        dense = [block for block in range(config.model.num_layers) if block + 1 not in blocks]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}

    return Entry(
        {"decoder_sparse_step": 1, "mlp_only_layers": None, "num_hidden_layers": REQUIRED}, read, write
    )


def dense_first(default: int) -> Entry:
    """The first n blocks are dense, all others have MoE layers (first_k_dense_replace)."""
    name = "first_k_dense_replace"

    def read(given: Json) -> Json:
        return {"moe.layers.at": [*range(given[name] + 1, given["num_hidden_layers"] + 1)]}

    def write(config: RunConfig) -> Json:
        return {name: min(moe_block_numbers(config), default=config.model.num_layers + 1) - 1}

    return Entry({name: default, "num_hidden_layers": REQUIRED}, read, write)


def block_range() -> Entry:
    """Every n-th block from one to another has an MoE layer (Ernie's moe_layer_*_index, from 0)."""
    names = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")

    def read(given: Json) -> Json:
        first, last, step = (given[name] for name in names)
        count = given["num_hidden_layers"]
        last = count if last == -1 else last + 1
        return {
            "moe.layers.at": [number for number in range(step, count + 1, step) if first < number <= last]
        }

    def write(config: RunConfig) -> Json:
        count = config.model.num_layers
        blocks = [block for block in moe_block_numbers(config) if block <= count]
        first, last = (blocks[0], blocks[-1]) if blocks else (count + 1, count)
        step = blocks[1] - blocks[0] if len(blocks) > 1 else 1
        return dict(zip(names, (first - 1, last - 1, step), strict=True))

    return Entry({**dict(zip(names, (1, -1, 1), strict=True)), "num_hidden_layers": REQUIRED}, read, write)


def have_experts(config: RunConfig) -> list[bool]:
    """Return whether each block has an MoE layer."""
    blocks = set(moe_block_numbers(config))
    return [number in blocks for number in range(1, config.model.num_layers + 1)]


def first_dense(config: RunConfig) -> object:
    """Return first_k_dense_replace for a class of listed blocks; ABSENT: the dense ones are not the first."""
    listed = have_experts(config)
    return listed.count(False) if listed == sorted(listed) else ABSENT


def listed_blocks() -> Entry:
    """Which blocks are dense and which have an MoE layer (mlp_layer_types), or how many are dense first."""

    def read(given: Json) -> Json:
        kinds, count = given["mlp_layer_types"], given["num_hidden_layers"]
        if kinds is None:
            first = 1 if given["first_k_dense_replace"] is None else given["first_k_dense_replace"]
            kinds = ["dense"] * first + ["sparse"] * (count - first)
        if set(kinds) - {"dense", "sparse"} or len(kinds) != count:
            raise unsupported("mlp_layer_types", kinds, [f"{count} of dense and sparse"])
        return {"moe.layers.at": [block for block, kind in enumerate(kinds, 1) if kind == "sparse"]}

    def write(config: RunConfig) -> Json:
        return {"mlp_layer_types": ["sparse" if is_moe else "dense" for is_moe in have_experts(config)]}

    defaults = {"mlp_layer_types": None, "first_k_dense_replace": None, "num_hidden_layers": REQUIRED}
    return Entry(defaults, read, write)
