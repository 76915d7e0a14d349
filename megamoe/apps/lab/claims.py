"""Claims as statements about measures of rows, and what seeds say of them.

    perplexity(xmoe) < perplexity(switch)
    accuracy(a) > accuracy(b) > accuracy(c)
    loss(large) < 0.98 * loss(small) and dead(large) <= 1

A measure of a row is a value for each seed. A comparison is decided by the paired differences over the
seeds: by the two-sided 95 % interval of their mean, from Student's t distribution with one degree of freedom
less than there are seeds. The claim is seen if the whole interval lies on its side, not seen if it lies on
the other, and else within noise. One seed has no interval, and decides nothing. Where a seed is missing, the
others decide nothing either: those that failed may be the ones on the other side.
"""

import ast
import math
import operator
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

Verdict = Literal["seen", "not seen", "within noise", "not measured"]
Values = Mapping[str, Mapping[str, Mapping[int, float]]]  # by measure, row and seed
LEVEL = 0.95
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
class Finding:
    """What the seeds say of one comparison.

    differences: right - left by seed. low, high: of the interval.
    """

    text: str
    verdict: Verdict
    differences: dict[int, float]
    mean: float | None
    low: float | None
    high: float | None


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


def decide(claim: Claim, values: Values, seeds: Collection[int]) -> tuple[Verdict, list[Finding]]:
    """Return the verdict on a claim, and what was found of each of its comparisons.

    seeds: those that every row should have. Seeds in which an operand is missing or not finite are left
    out; then the others give an interval, and no verdict. Without any, it is not measured.
    """
    findings = [_finding(each, values, seeds) for each in claim.comparisons]
    verdicts = {each.verdict for each in findings}
    ordered: tuple[Verdict, ...] = ("not seen", "not measured", "within noise", "seen")
    return next(verdict for verdict in ordered if verdict in verdicts), findings


def _finding(comparison: Comparison, values: Values, seeds: Collection[int]) -> Finding:
    operands = [*Claim([comparison]).operands()]
    shared = set.intersection(*(set(values.get(name, {}).get(row, {})) for name, row in operands))
    left, right = (
        {seed: _value(side, values, seed) for seed in sorted(shared)}
        for side in (comparison.left, comparison.right)
    )
    found = paired(right, left)
    mean, low, high = interval([*found.values()])
    verdict: Verdict = "within noise" if found else "not measured"
    if low is not None and high is not None and set(found) >= set(seeds):
        verdict = "seen" if low > 0 else "not seen" if high < 0 else "within noise"
    return Finding(comparison.text, verdict, found, mean, low, high)


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


def interval(values: list[float]) -> tuple[float | None, float | None, float | None]:
    """Return the mean and the two ends of its 95 % interval; None where there are too few values."""
    if not values:
        return None, None, None
    mean = fmean(values)
    if len(values) < 2:
        return mean, None, None
    from scipy.stats import t

    half = float(t.ppf((1 + LEVEL) / 2, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half
