"""Claims as statements about measures of rows, and what seeds say of them.

    perplexity(xmoe) < perplexity(switch)
    accuracy(a) > accuracy(b) > accuracy(c)
    loss(large) < 0.98 * loss(small) and dead(large) <= 1

A measure of a row is a value for each seed. A comparison is decided by the paired differences over the
seeds, as `verdicts.py` says. One seed decides nothing. Where a seed is missing, the others decide nothing
either: those that failed may be the ones on the other side. Nor is anything decided between rows that break
a bound of the study, such as on dropped pairs, unless the claim compares what is bounded as well.
"""

import ast
import math
import operator
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean

from megamoe.apps.lab.verdicts import ALPHA, MOST_SEEDS, Judgement, Verdict, judge, seeds_more

Values = Mapping[str, Mapping[str, Mapping[int, float]]]  # by measure, row and seed
Amount = float | str  # in the unit of a measure, or as "2 %" of a value
OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
SIGNS: dict[type[ast.cmpop], str] = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
MOST_CHARACTERS, LARGEST = 500, sys.float_info.max


@dataclass(frozen=True)
class Comparison:
    """left < right, as expressions; strictness has no meaning for an interval, so < and <= are the same."""

    text: str
    left: ast.expr
    right: ast.expr


@dataclass(frozen=True)
class Claim:
    """Comparisons that must all hold."""

    comparisons: list[Comparison]

    def operands(self) -> Iterator[tuple[str, str]]:
        """Return (measure, row) of every operand."""
        for each in self.comparisons:
            for side in (each.left, each.right):
                for node in ast.walk(side):
                    if isinstance(node, ast.Call):
                        yield _operand(node)


@dataclass(frozen=True)
class Finding(Judgement):
    """What the seeds say of one comparison.

    differences: right - left by seed. margin: in the unit of the measure. right: the mean of the right side,
    of which an amount in percent is. reason: why it is undecided.
    """

    text: str = ""
    differences: dict[int, float] = field(default_factory=dict)
    margin: float | None = None
    right: float | None = None
    reason: str = ""


def parse_claim(text: str, where: str) -> Claim:
    """Read a claim; where: the key, for messages.

    Raises:
        ValueError: if it is no comparison of measures.
    """
    problem = f"{where}: {text!r} is no comparison, such as perplexity(a) < 0.98 * perplexity(b)"
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"{where}: longer than {MOST_CHARACTERS} characters")
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(problem) from None
    parts = body.values if isinstance(body, ast.BoolOp) and isinstance(body.op, ast.And) else [body]
    comparisons: list[Comparison] = []
    for part in parts:
        if not isinstance(part, ast.Compare):
            raise ValueError(problem)
        sides = [part.left, *part.comparators]
        for side in sides:
            _check(side, problem)
        for left, relation, right in zip(sides, part.ops, sides[1:], strict=False):
            if type(relation) not in SIGNS:
                raise ValueError(problem)
            shown = f"{ast.unparse(left)} {SIGNS[type(relation)]} {ast.unparse(right)}"
            if isinstance(relation, ast.Gt | ast.GtE):
                left, right = right, left
            comparison = Comparison(shown, left, right)
            if not list(Claim([comparison]).operands()):
                raise ValueError(problem)
            comparisons.append(comparison)
    return Claim(comparisons)


def _check(node: ast.expr, problem: str) -> None:
    """Refuse all but numbers, measures of rows, and their sums and products."""
    match node:
        case ast.Constant(value=int() | float() as number) if abs(number) <= LARGEST and number is not True:
            return
        case ast.Call(func=ast.Name(), args=[ast.Name()], keywords=[]):
            return
        case ast.BinOp() if type(node.op) in OPERATIONS:
            _check(node.left, problem)
            _check(node.right, problem)
            measured = any(isinstance(each, ast.Call) for each in ast.walk(node.right))
            if isinstance(node.op, ast.Div) and not measured and _value(node.right, {}, 0) == 0:
                raise ValueError(f"{problem}: {ast.unparse(node)} divides by zero")
        case ast.UnaryOp(op=ast.USub()):
            _check(node.operand, problem)
        case _:
            raise ValueError(problem)


def _operand(node: ast.Call) -> tuple[str, str]:
    assert isinstance(node.func, ast.Name) and isinstance(node.args[0], ast.Name)
    return node.func.id, node.args[0].id


def decide(
    claim: Claim,
    values: Values,
    seeds: Collection[int],
    margin: Amount | None = None,
    alpha: float = ALPHA,
    bounds: Mapping[str, Amount] | None = None,
) -> tuple[Verdict, list[Finding]]:
    """Return the verdict on a claim, and what was found of each of its comparisons.

    seeds: those that every row should have. Seeds in which an operand is missing or not finite are left
    out; then the others give an interval, and no verdict. Without any, it is not measured. margin, alpha: see
    `verdicts.judge`. bounds: see `beyond`.
    """
    compared = {measure for measure, _ in claim.operands()}
    others = {measure: most for measure, most in (bounds or {}).items() if measure not in compared}
    findings = []
    for comparison in claim.comparisons:
        found, right = _differences(comparison, values)
        largest = None if margin is None or right is None else amount(margin, right)
        judged = judge([*found.values()], largest, alpha)
        rows = [row for _, row in Claim([comparison]).operands()]
        reason = "; ".join(beyond(rows, values, others)) if found else ""
        if found and not set(found) >= set(seeds):
            reason = f"{len(seeds) - len(found)} of {len(seeds)} seeds missing"
        elif len(found) == 1:
            reason = "one seed"
        elif judged.verdict == "undecided" and not reason:
            more = seeds_more([*found.values()], largest, alpha)
            count = f"more than {MOST_SEEDS:,}" if more is None else f"about {more:,}"
            reason = f"{count} {'seed' if more == 1 else 'seeds'} more"
        verdict: Verdict = "undecided" if reason else judged.verdict
        ends = judged.mean, judged.low, judged.high
        findings.append(Finding(verdict, *ends, comparison.text, found, largest, right, reason))
    verdicts = {each.verdict for each in findings}
    ordered: tuple[Verdict, ...] = ("opposite", "not measured", "undecided", "equal", "seen")
    return next(verdict for verdict in ordered if verdict in verdicts), findings


def _differences(comparison: Comparison, values: Values) -> tuple[dict[int, float], float | None]:
    """Return right - left by seed, and the mean of the right side over these seeds."""
    operands = Claim([comparison]).operands()
    shared = set.intersection(*(set(values.get(name, {}).get(row, {})) for name, row in operands))
    left, right = (
        {seed: _value(side, values, seed) for seed in sorted(shared)}
        for side in (comparison.left, comparison.right)
    )
    found = paired(right, left)
    return found, fmean(right[seed] for seed in found) if found else None


def beyond(rows: Collection[str], values: Values, bounds: Mapping[str, Amount]) -> list[str]:
    """Return a line for each measure in which these rows are too unequal to be compared by another one.

    bounds: of a measure the largest mean of a row over its seeds; in percent: the largest difference of two
    rows, of the larger one's mean.
    """
    lines = []
    for measure, most in bounds.items():
        seeds_of_rows = {row: values.get(measure, {}).get(row) for row in rows}
        means = {row: fmean(of_seeds.values()) for row, of_seeds in seeds_of_rows.items() if of_seeds}
        largest = max(means.values(), default=0.0)
        limit = largest - amount(most, largest) if isinstance(most, str) else most
        is_outside = operator.lt if isinstance(most, str) else operator.gt
        outside = [row for row, mean in means.items() if is_outside(mean, limit)]
        lines += [f"{measure} of {row} is {means[row]:.3g}, bound {limit:.3g}" for row in outside]
    return lines


def amount(value: Amount, whole: float) -> float:
    """Return a number as it is, and a percentage as that of the whole."""
    return float(value.rstrip(" %")) / 100 * abs(whole) if isinstance(value, str) else value


def paired(these: Mapping[int, float], others: Mapping[int, float]) -> dict[int, float]:
    """Return these - others of each seed that both have, without those that are not finite."""
    found = {seed: these[seed] - others[seed] for seed in sorted(set(these) & set(others))}
    return {seed: it for seed, it in found.items() if math.isfinite(it)}


def _value(node: ast.expr, values: Values, seed: int) -> float:
    match node:
        case ast.Constant():
            return float(node.value)  # type: ignore[arg-type]
        case ast.Call():
            measure, row = _operand(node)
            return values[measure][row][seed]
        case ast.BinOp():
            left, right = _value(node.left, values, seed), _value(node.right, values, seed)
            if isinstance(node.op, ast.Div) and right == 0:
                return math.nan
            return OPERATIONS[type(node.op)](left, right)
        case ast.UnaryOp():
            return -_value(node.operand, values, seed)
        case _:
            raise AssertionError(ast.dump(node))
