"""The layouts and features under which a run is compared with one rank."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from megamoe.apps.verify.small import Changes, Tree, changed, value_at
from megamoe.config import PartChoice, RunConfig, parse_config
from megamoe.config.layer_kinds import kinds
from megamoe.moe.capabilities import provides
from megamoe.moe.validation import chosen_parts
from megamoe.parallel.layout import fewest_ranks
from megamoe.parallel.zero.deepspeed_config import resolve_parallel

# Megatron-Core's and DeepSpeed's names of the sizes.
SHORT = {
    "parallel.pipeline": "PP",
    "parallel.pipeline_chunks": "chunks",
    "parallel.context": "CP",
    "parallel.tensor": "TP",
    "parallel.expert": "EP",
    "parallel.expert_tensor": "ETP",
    "zero": "ZeRO",
}
ALWAYS: list[tuple[int, Changes]] = [  # ranks, and what differs from one
    (2, {"zero": 1}),
    (2, {"zero": 2}),
    (2, {"zero": 3}),
    (2, {"parallel.expert": 2}),
    (2, {"parallel.expert_tensor": 2}),
    (2, {"parallel.tensor": 2}),
    (2, {"parallel.context": 2}),
    (2, {"parallel.pipeline": 2}),
    (1, {"model.recompute": "full"}),
    (2, {"parallel.expert": 2, "train.in_flight": 2}),
    (4, {"parallel.expert": 4, "parallel.node_size": 2, "parallel.exchange": {"name": "by_node"}}),
    (4, {"parallel.tensor": 2, "parallel.sequence": True, "parallel.expert": 2, "zero": 2}),
    (4, {"parallel.pipeline": 2, "parallel.pipeline_chunks": 2, "parallel.expert": 2, "zero": 1}),
    (4, {"parallel.context": 2, "parallel.expert": 2, "parallel.expert_tensor": 2}),
    (8, {"parallel.pipeline": 2, "parallel.tensor": 2, "parallel.sequence": True, "parallel.expert": 2}),
]
# ZeRO 3 keeps small parameters whole, which would be all of these models.
CUT_ALL = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}


@dataclass(frozen=True)
class Variant:
    """A layout with features. changes: dotted keys of the configuration, the ZeRO stage as `zero` and bf16
    as `precision`.
    """

    ranks: int
    changes: Changes

    def __str__(self) -> str:
        """For a reader: `4 ranks, TP 2, SP, EP 2, ZeRO 2`."""
        words = [f"{self.ranks} rank{'s' * (self.ranks > 1)}"]
        for key, value in self.changes.items():
            text = value["name"] if isinstance(value, dict) else value
            words.append("SP" if key == "parallel.sequence" else f"{SHORT.get(key, key)} {text}")
        return ", ".join(words)

    def tree(self, small: Tree, folder: Path) -> Tree:
        """Return the small run in this layout; folder: for its output and its DeepSpeed file."""
        changes = {key: value for key, value in self.changes.items() if key not in ("zero", "precision")}
        stage = self.changes.get("zero", 0)
        file = folder / "deepspeed.json"
        zero = {"stage": stage, "overlap_comm": False, **(CUT_ALL if stage == 3 else {})}
        content = {"zero_optimization": zero, "bf16": {"enabled": self.precision == "bf16"}}
        file.write_text(json.dumps(content))
        changes |= {"parallel.precision": self.precision, "parallel.deepspeed": str(file)}
        return changed(small, {**changes, "output": str(folder)})

    @property
    def precision(self) -> str:
        """fp32 or bf16."""
        return str(self.changes.get("precision", "fp32"))

    def alone(self, tree: Tree) -> "Variant":
        """Return what this one is compared with: one rank with the same precision.

        Where a part takes the micro batches of all data-parallel ranks together, its micro batch is as large.
        Beside a loss of one rank's micro batch, which would change, it is as many ranks with nothing else.
        """
        parallel = parse_config(changed(tree, self.parallel)).parallel
        data = self.ranks // (parallel.pipeline * parallel.context * parallel.tensor)
        parts = [part for kind in kinds(parse_config(tree)) for _, part in chosen_parts(kind.config.moe)]
        together = [part for part in parts if provides("over_all_ranks", part)]
        precision = {"precision": self.precision} if self.precision != "fp32" else {}
        if data > 1 and together and any(part.kind == "loss" for part in parts if part not in together):
            return Variant(data, precision)
        wide = {"train.micro_batch_size": data} if data > 1 and together else {}
        return Variant(1, {**precision, **wide})

    @property
    def parallel(self) -> Changes:
        """The changes of the section `parallel`."""
        return {key: value for key, value in self.changes.items() if key.startswith("parallel.")}

    def simpler(self) -> list["Variant"]:
        """Return this one with one thing less each, those with fewer ranks first."""
        less = [{key: value for key, value in self.changes.items() if key != gone} for gone in self.changes]
        found = [
            Variant(max(1, self.ranks // 2), self.changes),
            *(Variant(self.ranks, each) for each in less),
        ]
        return [each for each in found if each != self]


def own_variant(config: RunConfig, stage: int, tree: Tree) -> Variant:
    """Return the run's own layout with sizes of at most two (an exchange by node: four).

    stage: of ZeRO. tree: the small run on one rank, from which it differs.
    """
    names = [key for key in SHORT if key != "zero"]
    sizes = {key: min(2, int(getattr(config.parallel, key.partition(".")[2]))) for key in names}
    changes: Changes = {key: size for key, size in sizes.items() if size > 1}
    if config.parallel.sequence:
        changes["parallel.sequence"] = True
    if config.parallel.exchange != PartChoice.default("exchange") and config.parallel.expert > 2:
        changes |= {"parallel.exchange": config.parallel.exchange.to_dict(), "parallel.expert": 4}
        changes["parallel.node_size"] = 2
    kept = {"model.recompute": config.model.recompute, "train.in_flight": config.train.in_flight}
    changes |= {key: value for key, value in kept.items() if value != value_at(tree, key)}
    own = Variant(2, changes | ({"zero": stage} if stage else {}))
    fewest = fewest_ranks(parse_config(changed(tree, own.parallel)).parallel)
    return replace(own, ranks=max(2, fewest))


def variants_of(config: RunConfig, tree: Tree) -> list[Variant]:
    """Return the run's own layout, in fp32 and in the run's bf16, and the others. tree: see `own_variant`."""
    plan = resolve_parallel(config, fewest_ranks(config.parallel))
    own = own_variant(config, plan.stage, tree)
    in_bf16 = [Variant(own.ranks, {**own.changes, "precision": "bf16"})] if plan.precision == "bf16" else []
    every = [own, *in_bf16, *(Variant(*each) for each in ALWAYS)]
    return [each for number, each in enumerate(every) if each not in every[:number]]
