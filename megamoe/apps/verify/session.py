"""One comparison: the reference on one rank, each layout, and the search for the smallest that differs."""

import json
from collections.abc import Callable
from pathlib import Path

from megamoe.apps.verify.compare import Difference, Result, differences, first_of
from megamoe.apps.verify.layouts import ALWAYS, Variant, own_variant, stage_of
from megamoe.apps.verify.ranks import Worlds
from megamoe.apps.verify.small import problems, shrunk
from megamoe.apps.verify.train_run import train
from megamoe.config import RunConfig, parse_config
from megamoe.config.shapes import moe_layer_numbers
from megamoe.errors import UserError

NOISE = 2.0**-23  # relative: about the last place of fp32
NEAR_TIES = 1e-4  # noise under which a token that chooses other experts has scores that nearly tie


class Session:
    """A comparison. folder: for runs. most_ranks: of a layout. only: text that a layout's line must have.
    most_tries: of the search for the smallest layout.

    Raises:
        UserError: if the run on one rank is refused or fails, or no layout has that text.
    """

    def __init__(self, config: RunConfig, folder: Path, most_ranks: int, only: str, most_tries: int) -> None:
        self.tree, self.lines = shrunk(config)
        self.folder, self.most_tries = folder, most_tries
        self.worlds = Worlds("megamoe.apps.verify.train_run")
        own = own_variant(config, stage_of(config), self.tree)
        every = [own, *(Variant(*each) for each in ALWAYS)]
        self.variants = [each for number, each in enumerate(every) if each not in every[:number]]
        self.variants = [each for each in self.variants if only in str(each)]
        self.most_ranks = most_ranks
        if not self.variants:
            names = "; ".join(map(str, every))
            raise UserError(f"--only: found {only!r}, expected a part of one of: {names}")
        self.number = 0
        self.alone = self._reference(0.0)
        self.noisy = self._reference(NOISE)
        self.near_ties: set[tuple[int, int, int]] | None = None

    def _reference(self, noise: float) -> Result:
        found, problem = self._train(Variant(1, {}), resumes=False, noise=noise)
        if found is None:
            raise UserError(f"the small run on one rank fails: {problem}")
        return found

    def _train(
        self, variant: Variant, resumes: bool = True, noise: float = 0.0, replay: Path | None = None
    ) -> tuple[Result | None, str]:
        self.number += 1
        folder = self.folder / f"{self.number:02d}"
        folder.mkdir(exist_ok=True)
        tree = variant.tree(self.tree, folder)
        if moe_layer_numbers(parse_config(tree)):
            tree["log"]["routing"] = str(folder / "record")
            tree["moe"]["router"]["replay"] = None if replay is None else str(replay)
        (folder / "run.json").write_text(json.dumps(tree))
        metrics, problem = self.worlds.run(train, variant.ranks, tree, resumes, noise, log=folder / "log")
        return (None if problem else Result(metrics, folder)), problem

    def compare_all(self, say: Callable[[str], None]) -> bool:
        """Compare every layout and say what comes out; return whether one differs."""
        say("\n".join(["smaller than the run:", *(f"  {line}" for line in self.lines)]))
        failed = False
        for variant in self.variants:
            if variant.ranks > self.most_ranks:
                say(f"left out   {variant}: more than --ranks {self.most_ranks}")
                continue
            if refused := self._refused(variant):
                say(f"refused    {variant}: {refused}")
                continue
            wrong, largest, problem = self._compare(variant)
            if not wrong and not problem:
                sizes = ", ".join(f"{kind} {size:.0e}" for kind, size in sorted(largest.items()))
                say(f"equal      {variant}  ({sizes})")
                continue
            failed = True
            say(f"DIFFERS    {variant}")
            smallest, wrong, problem = self._smallest(variant, wrong, problem)
            say(f"  smallest: {smallest}")
            say("\n".join(f"  {each}" for each in first_of(wrong)) or f"  {problem}")
        say("a layout differs" if failed else "all layouts are equal to one rank")
        return failed

    def _refused(self, variant: Variant) -> str:
        folder = self.folder / "checked"
        folder.mkdir(exist_ok=True)
        return next(iter(problems(variant.tree(self.tree, folder), variant.ranks)), "")

    def _compare(self, variant: Variant) -> tuple[list[Difference], dict[str, float], str]:
        """Return what differs, the largest difference of each kind, and why the run failed, if it did.

        Where only tokens whose scores nearly tie chose other experts, the run is repeated with the choices of
        the reference.
        """
        found, problem = self._train(variant)
        if found is None:
            return [], {}, problem
        other = found.other_choices(self.alone)
        if other:
            if self.near_ties is None:
                self.near_ties = self._reference(NEAR_TIES).other_choices(self.alone)
            if other <= self.near_ties:
                found, problem = self._train(variant, replay=self.alone.record)
                if found is None:
                    return [], {}, problem
                wrong, largest = differences(found, self.alone, self.noisy)
                return wrong, {**largest, "near ties": float(len(other))}, ""
        wrong, largest = differences(found, self.alone, self.noisy)
        if other:
            step, layer, token = min(other)
            name = f"of MoE layer {layer}: token {token} and {len(other) - 1} more chose other experts"
            wrong.append(Difference(step, "router choices", name, len(other), 0.0))
        return wrong, largest, ""

    def _smallest(
        self, variant: Variant, wrong: list[Difference], problem: str
    ) -> tuple[Variant, list[Difference], str]:
        """Take one thing after the other away from a layout, as long as it still differs."""
        tries = self.most_tries
        shrinks = True
        while shrinks:
            shrinks = False
            for smaller in variant.simpler():
                if tries == 0 or self._refused(smaller):
                    continue
                tries -= 1
                still, _, failure = self._compare(smaller)
                if still or failure:
                    variant, wrong, problem, shrinks = smaller, still, failure, True
                    break
        return variant, wrong, problem
