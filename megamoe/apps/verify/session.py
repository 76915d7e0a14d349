"""Comparisons of one small run: the references on one rank, a layout, and the smallest that differs."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

from megamoe.apps.verify.compare import Difference, Result, differences, first_of
from megamoe.apps.verify.layouts import Variant
from megamoe.apps.verify.ranks import RankError, RankPool
from megamoe.apps.verify.small import Tree, changed, problems
from megamoe.apps.verify.train_run import train
from megamoe.config import parse_config
from megamoe.config.shapes import moe_layer_numbers
from megamoe.errors import UserError

NOISE = 2.0**-23  # relative: about the last place of fp32
NEAR_TIES = 1e-4  # noise under which a token that chooses other experts has scores that nearly tie
# What rounding makes of another layout, in terms of what it makes of the run it is judged by, and the least.
FP32 = (30.0, 2e-5)
BF16 = (4.0, 2.0**-8)


class Session:
    """The runs of one small tree. folder: for them. most_tries: of the search for the smallest layout."""

    def __init__(self, tree: Tree, folder: Path, pool: RankPool, most_tries: int) -> None:
        self.tree, self.folder, self.pool, self.most_tries = tree, folder, pool, most_tries
        self.number = 0
        self.references: dict[tuple[str, float, Path | None], Result] = {}
        record = {"log.routing": str(folder / "record")}
        self.records = bool(moe_layer_numbers(parse_config(tree))) and not problems(changed(tree, record), 1)

    def reference(self, alone: Variant, noise: float = 0.0, replay: Path | None = None) -> Result:
        """Return the run of a `Variant.alone`, trained at the first call.

        Raises:
            UserError: if it fails.
        """
        key = (str(alone), noise, replay)
        if key not in self.references:
            try:
                self.references[key] = self._train(alone, resumes=False, noise=noise, replay=replay)
            except RankError as error:
                raise UserError(f"the small run on {alone} fails: {error}") from None
        return self.references[key]

    def prepared(self, variant: Variant, replay: Path | None = None) -> tuple[Path, Tree]:
        """Return a new folder and the run in it."""
        self.number += 1
        folder = self.folder / f"{self.number:02d}"
        folder.mkdir(parents=True, exist_ok=True)
        tree = variant.tree(self.tree, folder)
        if self.records:
            tree["log"]["routing"] = str(folder / "record")
            tree["moe"]["router"]["replay"] = None if replay is None else str(replay)
        (folder / "run.json").write_text(json.dumps(tree))
        return folder, tree

    def _train(
        self, variant: Variant, resumes: bool = True, noise: float = 0.0, replay: Path | None = None
    ) -> Result:
        folder, tree = self.prepared(variant, replay)
        ranks = variant.ranks
        metrics, *_ = self.pool.run(train, tree, resumes, noise, ranks=ranks, log=folder / "log")
        return Result(metrics, folder)

    def compare_all(self, variants: list[Variant], most_ranks: int) -> bool:
        """Compare every layout and say what comes out; return whether one differs, or none is compared."""
        say = partial(print, flush=True)
        differ: list[bool] = []
        for variant in variants:
            if variant.ranks > most_ranks:
                say(f"left out   {variant}: more than --ranks {most_ranks}")
                continue
            if refused := self.refused(variant):
                say(f"refused    {variant}: {refused}")
                continue
            wrong, largest, problem = self.compare(variant)
            differ.append(bool(wrong or problem))
            if not differ[-1]:
                sizes = ", ".join(f"{kind} {size:.0e}" for kind, size in sorted(largest.items()))
                say(f"equal      {variant}  ({sizes})")
                continue
            say(f"DIFFERS    {variant}")
            smallest, wrong, problem = self.smallest(variant, wrong, problem)
            say(f"  smallest: {smallest}")
            say("\n".join(f"  {each}" for each in first_of(wrong)) or f"  {problem}")
        equal = "all layouts are equal to one rank" if differ else "no layout was compared"
        say("a layout differs" if any(differ) else equal)
        return any(differ) or not differ

    def refused(self, variant: Variant) -> str:
        """Return why a layout is refused; nothing if it is not."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return next(iter(problems(variant.tree(self.tree, self.folder), variant.ranks)), "")

    def compare(self, variant: Variant) -> tuple[list[Difference], dict[str, float], str]:
        """Return what differs, the largest difference of each kind, and why the run failed, if it did."""
        try:
            return *self._differences(variant), ""
        except RankError as error:
            return [], {}, str(error)

    def _differences(self, variant: Variant) -> tuple[list[Difference], dict[str, float]]:
        """Return what differs, and the largest difference of each kind.

        Where only tokens whose scores nearly tie chose other experts, the run is repeated with the choices of
        the reference. In bf16 it has them from the start, as does the run in fp32 that shows what rounding
        makes: the choices are compared in fp32.
        """
        one_rank = variant.alone(self.tree)
        alone, in_bf16 = self.reference(one_rank), variant.precision == "bf16"
        replay = alone.record if in_bf16 and self.records else None
        found = self._train(variant, replay=replay)
        other = found.other_choices(alone)
        near_ties = {}
        if other and other <= self.reference(one_rank, NEAR_TIES).other_choices(alone):
            near_ties = {"near ties": float(len(other))}
            found = self._train(variant, replay=alone.record)
        wrong, largest = differences(found, alone, None, *(BF16 if in_bf16 else FP32))
        if wrong:  # by more than rounding always makes
            in_fp32 = replace(one_rank, changes=one_rank.changes | {"precision": "fp32"})
            rounded = self.reference(*((in_fp32, 0.0, replay) if in_bf16 else (one_rank, NOISE)))
            wrong, largest = differences(found, alone, rounded, *(BF16 if in_bf16 else FP32))
        if other and not near_ties:
            step, layer, token = min(other)
            name = f"of MoE layer {layer}: token {token} and {len(other) - 1} more chose other experts"
            wrong.append(Difference(step, "router choices", name, len(other), 0.0))
        return wrong, largest | near_ties

    def smallest(
        self, variant: Variant, wrong: list[Difference], problem: str
    ) -> tuple[Variant, list[Difference], str]:
        """Take one thing after the other away from a layout, as long as it still differs."""
        tries = self.most_tries
        shrinks = True
        while shrinks:
            shrinks = False
            for smaller in variant.simpler():
                if tries == 0 or self.refused(smaller):
                    continue
                tries -= 1
                still, _, failure = self.compare(smaller)
                if still or failure:
                    variant, wrong, problem, shrinks = smaller, still, failure, True
                    break
        return variant, wrong, problem
