"""A plugin's part, whose mistakes become one line: what its methods raise or return by mistake.

`guarded` wraps the methods of a part once, when it is built. A built-in part is left as it is: an error in it
is a bug and keeps its traceback. Of what a plugin's part returns, types, dtypes, devices and shapes are
checked in every pass, which the host knows. The numbers of its pairs, and whether a loss has a gradient, are
checked in the first pass alone, because the host waits for the device.

A wrapped method raises UserError for a plugin's mistake, with the part's kind, name and file. A UserError of
the plugin's own passes as it is.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from megamoe.errors import PluginError, UserError
from megamoe.moe.part import Constraint, Part
from megamoe.moe.routing import CapacitySlots, Pairs, Routing, Scored, has_row_per_token
from megamoe.registry import described, failure_of, is_ours

_seen: WeakSet[nn.Module] = WeakSet()  # the selectors and losses whose first values were checked
TABLE = "(tokens, experts)"
WITH_GRADIENT = (
    "one computed from routing.scores_TE or probs_TE (counts and chosen experts have no gradient); to record "
    "a number, use metrics()"
)
NUMBERS = torch.float32, torch.float64  # computing in more than fp32 is no mistake
METHODS = (
    *("forward", "after_step", "metrics", "constraints", "attach"),
    *("closed_E", "keeps_tokens_local", "replayed", "after_drops"),
)


def guarded(part: Part, kind: str) -> Part:
    """Return the part; a plugin's with its methods wrapped. kind: of the part, such as `scorer`."""
    if not is_ours(type(part)):
        for method in METHODS:
            if not is_ours(getattr(type(part), method, Part)):  # what it inherits from ours stays
                check = CHECKS.get(kind if method == "forward" else method, _unchecked)
                setattr(part, method, partial(_called, part, method, getattr(part, method), check))
    return part


def _called(part: Part, method: str, bound: Callable[..., Any], check: "Check", *inputs: Any) -> Any:
    try:
        result = bound(*inputs)
    except Exception as error:
        # PyTorch ends a recomputation by an exception, when the last saved tensor is there.
        if isinstance(error, UserError) or type(error).__module__ == checkpoint.__name__:
            raise
        problem = failure_of(type(part), error)
        named = described(type(part), with_file=not problem.startswith(" at line"))
        raise PluginError(f"{named}: {method} failed{problem}") from error
    return check(part, method, result, *inputs)


Check = Callable[..., Any]  # (part, method, result, *inputs of the method) -> the result


def _unchecked(part: Part, method: str, result: Any, *inputs: Any) -> Any:
    return result


def _scores(part: Part, method: str, result: Any, hidden_TH: Tensor, context: Any) -> Any:
    """A scorer's scores_TE, and its extras if it has any."""
    scores_TE, extras = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    shape = len(hidden_TH), part.dims.num_experts
    _check_tensor(part, scores_TE, hidden_TH, shape, what=TABLE)
    if not isinstance(extras, dict):
        raise _wrong(part, f"{_shown(extras)} beside the scores", "a dict of tensors by name")
    for name, extra in extras.items():
        if not isinstance(extra, Tensor):
            raise _wrong(part, f"{_shown(extra)} as the extra {name!r}", "a tensor")
        if has_row_per_token(name) and extra.shape[:1] != shape[:1]:
            expected = f"a row for each of {shape[0]} tokens"
            raise _wrong(part, f"{_shown(extra)} as the extra {name!r}", expected)
    if "ranking_TE" in extras:
        _check_tensor(part, extras["ranking_TE"], hidden_TH, shape, what=TABLE, name="ranking_TE")
    return result


def _table(part: Part, method: str, result: Any, scores_TE: Tensor, *others: Any) -> Any:
    """What a residual or a score function returns."""
    _check_tensor(part, result, scores_TE, scores_TE.shape, what=TABLE)
    return result


def _allowed(part: Part, method: str, result: Any, scored: Scored, context: Any) -> Any:
    """What a mask returns."""
    if result is not None:
        like_TE = scored.scores_TE
        _check_tensor(part, result, like_TE, like_TE.shape, (torch.bool,), what=TABLE)
    return result


def _chosen(selector: Part, method: str, result: Any, scored: Scored, *inputs: Any) -> Any:
    """The pairs that a selector's `forward` or `replayed` chooses."""
    _check_pairs(selector, method, result, scored.scores_TE)
    rows = scored.num_tokens if result.rows is None else result.rows
    if result.each is not None:
        rows = len(result.token_N) // max(result.each, 1)
    if rows != scored.num_tokens:
        raise _wrong(selector, f"choices of {rows} tokens", f"of {scored.num_tokens}", method)
    if selector not in _seen and _has_numbers(result.expert_N):
        _check_numbers(selector, method, result, scored)
        _seen.add(selector)
    return result


def _weighed(selector: Part, method: str, result: Any, kept: Pairs) -> Any:
    """The kept pairs with their final weights."""
    _check_pairs(selector, method, result, kept.weight_N)
    return result


def _kept(capacity: Part, method: str, result: Any, wanted: Pairs, *inputs: Any) -> Any:
    """Which pairs a capacity keeps."""
    expert_N = wanted.expert_N
    if isinstance(result, CapacitySlots):
        place_N = result.place_N
        _check_tensor(capacity, place_N, expert_N, expert_N.shape, (torch.int64,), name="place_N")
    elif result is not None:
        what = "(pairs), CapacitySlots or None"
        _check_tensor(capacity, result, expert_N, expert_N.shape, (torch.bool,), what=what)
    return result


def _loss(loss: Part, method: str, result: Any, routing: Routing, *inputs: Any) -> Any:
    """The value of a loss, a scalar.

    A plugin's loss must have a gradient in its first training pass, unless its value is 0 there or the router
    does not learn: counts and chosen experts have none, and such a loss would change nothing.
    """
    _check_tensor(loss, result, routing.scores_TE, (), what="(a scalar)")
    if loss not in _seen and torch.is_grad_enabled() and routing.scores_TE.requires_grad:
        _seen.add(loss)
        if not result.requires_grad and _has_numbers(result) and bool(result != 0):
            raise _wrong(loss, "a value without gradient, which changes nothing", WITH_GRADIENT)
    return result


def _metrics(part: Part, method: str, result: Any) -> Any:
    """The part's own numbers by name."""
    if not isinstance(result, dict):
        raise _wrong(part, _shown(result), "a dict of scalar tensors by name", method)
    for name, value in result.items():
        if not isinstance(value, Tensor) or value.dim():
            raise _wrong(part, f"{_shown(value)} as {name!r}", "a tensor of shape []", method)
    return result


def _constraints(part: Part, method: str, result: Any) -> list[Constraint]:
    """The part's constraints, whose projections are checked when they are called."""
    expected = "a list of (parameter, function)"
    if not isinstance(result, list | tuple):
        raise _wrong(part, _shown(result), expected, method)
    for pair in result:
        right = isinstance(pair, tuple) and len(pair) == 2
        if not right or not isinstance(pair[0], nn.Parameter) or not callable(pair[1]):
            raise _wrong(part, f"{_shown(pair)} in its list", expected, method)
    return [(parameter, _checked_projection(part, projection)) for parameter, projection in result]


# By the part's kind for `forward`, and by name for the other methods.
CHECKS: dict[str, Check] = {
    "scorer": _scores,
    "residual": _table,
    "mask": _allowed,
    "score_function": _table,
    "selector": _chosen,
    "capacity": _kept,
    "loss": _loss,
    "replayed": _chosen,
    "after_drops": _weighed,
    "metrics": _metrics,
    "constraints": _constraints,
}


def _checked_projection(part: Part, projection: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    class_of_part = type(part)

    def checked(weight: Tensor) -> Tensor:
        try:
            found = projection(weight)
        except Exception as error:
            named = described(class_of_part)
            raise PluginError(f"{named}: a projection failed{failure_of(class_of_part, error)}") from error
        _check_tensor(part, found, weight, weight.shape, method="a projection")
        return found

    return checked


def _check_pairs(selector: Part, method: str, found: Any, like: Tensor) -> None:
    if not isinstance(found, Pairs):
        raise _wrong(selector, _shown(found), "Pairs, as Pairs.of_choices makes them", method)
    size = (found.expert_N.numel(),) if isinstance(found.expert_N, Tensor) else (0,)
    for name in ("expert_N", "token_N", "choice_N", "weight_N"):
        dtypes, value_N = NUMBERS if name == "weight_N" else (torch.int64,), getattr(found, name)
        _check_tensor(selector, value_N, like, size, dtypes, method, "(pairs)", name)


def _check_numbers(selector: Part, method: str, found: Pairs, scored: Scored) -> None:
    """Check the pairs' values; the host waits for the device."""
    token_N, expert_N = found.token_N, found.expert_N
    for what, number_N, count in (
        ("experts", expert_N, scored.num_experts),
        ("tokens", token_N, scored.num_tokens),
    ):
        least, most = int(number_N.min()), int(number_N.max())
        if least < 0 or most >= count:
            raise _wrong(selector, f"{what} from {least} to {most}", f"0 to {count - 1}", method)
    if bool((token_N.diff() < 0).any()):
        raise _wrong(selector, "pairs in another order", "those of the first token first", method)
    twice = len(token_N) - len((token_N * scored.num_experts + expert_N).unique())
    if twice:
        raise _wrong(
            selector, f"{twice} pairs a second time", "an expert at most once for each token", method
        )


def _has_numbers(values: Tensor) -> bool:
    """Whether there are values to look at: a plan's tensors are fake, and of another class."""
    return type(values) is Tensor and not values.is_meta and values.numel() > 0


def _check_tensor(
    part: Part,
    found: Any,
    like: Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...] = NUMBERS,
    method: str = "forward",
    what: str = "",
    name: str = "",
) -> None:
    """Refuse what is no tensor of the shape and one of the dtypes, on the device of `like`."""
    is_tensor = isinstance(found, Tensor)
    if is_tensor and found.shape == shape and found.dtype in dtypes and found.device == like.device:
        return
    elsewhere = is_tensor and found.device != like.device
    as_name = f" as {name}" if name else ""
    expected = f"{_words(dtypes[0], shape)}{f' on {like.device}' if elsewhere else ''} {what}".rstrip()
    raise _wrong(
        part, _shown(found) + (f" on {found.device}" if elsewhere else "") + as_name, expected, method
    )


def _wrong(part: Part, found: str, expected: str, method: str = "forward") -> UserError:
    return UserError(f"{described(type(part))}: {method} returned {found}, expected {expected}")


def _shown(value: Any) -> str:
    """Return a value in a few words: `int64 [4, 2]`, `None`, `a list`."""
    if isinstance(value, Tensor):
        return _words(value.dtype, value.shape)
    if value is None:
        return "None"
    kind = type(value).__name__
    size = f" of {len(value)}" if isinstance(value, tuple) else ""
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}{size}"


def _words(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
