"""Entries of the MoE layers' keys that several classes share: positions, routers, the balance loss."""

from megamoe.apps.hf.keys import REQUIRED, Entry, Json, converted, fixed, unsupported
from megamoe.config import RunConfig
from megamoe.config.shapes import moe_block_numbers

LINEAR_TOP_K = fixed(
    moe__router__scorer__name="linear",
    moe__router__selector__name="top_k",
    moe__router__capacity__name="none",
)
# softmax over all experts, then the k largest.
TOP_K = (LINEAR_TOP_K, fixed(moe__router__score_function__name="softmax"))
# sigmoid of each score, chosen with a bias that moves against the load (DeepSeek-V3).
BIASED_TOP_K = (
    LINEAR_TOP_K,
    fixed(
        moe__router__score_function__name="sigmoid",
        moe__router__score_function__bias_update=0.001,
    ),
)
BALANCE = "moe.losses.switch_balance"
EVERY_BLOCK = fixed(moe__layers__every=1)  # has an MoE layer


def loss_weight(default: float) -> Entry:
    """The weight of the balance loss; default: the class's."""
    name = "router_aux_loss_coef"

    def read(given: Json) -> Json:
        weight = float(given[name])
        if not weight >= 0:
            raise unsupported(name, given[name], ["a number of at least 0"])
        return {BALANCE: weight} if weight else {"moe.losses": {}}

    def write(config: RunConfig) -> Json:
        found = config.moe.losses.get(BALANCE.rpartition(".")[2])
        return {name: float(found.options.weight) if found else 0.0}

    return Entry({name: default}, read, write)


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
        blocks = moe_block_numbers(config)
        return dict(zip(names, (min(blocks, default=1) - 1, max(blocks, default=1) - 1, 1), strict=True))

    return Entry({**dict(zip(names, (1, -1, 1), strict=True)), "num_hidden_layers": REQUIRED}, read, write)


def normalised(default: bool) -> Entry:
    """Whether the weights of the chosen experts sum to 1 (norm_topk_prob)."""
    return converted(
        "norm_topk_prob",
        "moe.router.selector.weights",
        default,
        read=lambda sums_to_1: "renormalised" if sums_to_1 else "raw",
        write=lambda config: getattr(config.moe.router.selector.options, "weights", "raw") != "raw",
    )


def group_limit(groups: int | None, kept: int | None, score: Json) -> Entry:
    """Experts of few groups for each token (n_group, topk_group); groups, kept: the class's defaults.

    score: the options of the mask that say how groups are compared.
    """

    def read(given: Json) -> Json:
        count, keep = given["n_group"], given["topk_group"]
        if count in (None, 1) or count == keep:
            return {"moe.router.masks": []}
        return {"moe.router.masks": [{"name": "group_limit", "num_groups": count, "keep": keep, **score}]}

    def write(config: RunConfig) -> Json:
        masks = config.moe.router.masks
        options = masks[0].options if masks else None
        return {"n_group": getattr(options, "num_groups", 1), "topk_group": getattr(options, "keep", 1)}

    return Entry({"n_group": groups, "topk_group": kept}, read, write)
