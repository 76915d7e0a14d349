"""Calls of a layer's parts: what a plugin's part raises or returns by mistake becomes one line.

A built-in part is called and nothing else: an error in it is a bug and keeps its traceback. Of what a
plugin's part returns, types, dtypes, devices and shapes are checked in every pass, which the host knows. The
numbers of its pairs, and whether a loss has a gradient, are checked in the first pass alone, because the
host waits for the device.

All functions here raise UserError for a plugin's mistake, with the part's kind, name and file.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from megamoe.errors import PluginError, UserError
from megamoe.moe.part import Constraint, Part, StepContext
from megamoe.moe.routing import Pairs, Places, Routing, Scored, has_row_per_token
from megamoe.registry import described, failure_of, is_ours

_seen: WeakSet[nn.Module] = WeakSet()  # the selectors and losses whose first values were checked
TABLE = "(tokens, experts)"
WITH_GRADIENT = (
    "one computed from routing.scores_TE or probs_TE (counts and chosen experts have no gradient); to record "
    "a number, use metrics()"
)
NUMBERS = torch.float32, torch.float64  # computing in more than fp32 is no mistake


def called(part: Any, method: str, *inputs: Any) -> Any:
    """Return part.method(*inputs); a UserError of the plugin's own passes as it is."""
    try:
        return part(*inputs) if method == "forward" else getattr(part, method)(*inputs)
    except Exception as error:
        # PyTorch ends a recomputation by an exception, when the last saved tensor is there.
        of_torch = type(error).__module__ == checkpoint.__name__
        if is_ours(type(part)) or isinstance(error, UserError) or of_torch:
            raise
        problem = failure_of(type(part), error)
        named = described(type(part), with_file=not problem.startswith(" at line"))
        raise PluginError(f"{named}: {method} failed{problem}") from error


def scores(
    scorer: Part, hidden_TH: Tensor, context: StepContext, num_experts: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a scorer's scores_TE and its extras."""
    found = called(scorer, "forward", hidden_TH, context)
    scores_TE, extras = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
    if is_ours(type(scorer)):
        return scores_TE, extras
    shape = len(hidden_TH), num_experts
    _check_tensor(scorer, scores_TE, hidden_TH, shape, what=TABLE)
    if not isinstance(extras, dict):
        raise _wrong(scorer, f"{_shown(extras)} beside the scores", "a dict of tensors by name")
    for name, extra in extras.items():
        if not isinstance(extra, Tensor):
            raise _wrong(scorer, f"{_shown(extra)} as the extra {name!r}", "a tensor")
        if has_row_per_token(name) and extra.shape[:1] != shape[:1]:
            raise _wrong(
                scorer, f"{_shown(extra)} as the extra {name!r}", f"a row for each of {shape[0]} tokens"
            )
    if "ranking_TE" in extras:
        _check_tensor(scorer, extras["ranking_TE"], hidden_TH, shape, what=TABLE, name="ranking_TE")
    return scores_TE, extras


def table(
    part: Any,
    like_TE: Tensor,
    *inputs: Any,
    dtypes: tuple[torch.dtype, ...] = NUMBERS,
    optional: bool = False,
) -> Any:
    """Return what a residual, a mask or a score function returns, [T, E] as `like_TE`; optional: or None."""
    found_TE = called(part, "forward", *inputs)
    if not is_ours(type(part)) and not (optional and found_TE is None):
        _check_tensor(part, found_TE, like_TE, like_TE.shape, dtypes, what=TABLE)
    return found_TE


def pairs(selector: Part, method: str, scored: Scored, *inputs: Any) -> Pairs:
    """Return the pairs that a selector's `forward` or `replayed` chooses."""
    found = called(selector, method, scored, *inputs)
    if not is_ours(type(selector)):
        _check_pairs(selector, method, found, scored)
        rows = scored.num_tokens if found.rows is None else found.rows
        if found.each is not None:
            rows = len(found.token_N) // max(found.each, 1)
        if rows != scored.num_tokens:
            raise _wrong(selector, f"choices of {rows} tokens", f"of {scored.num_tokens}", method)
        if selector not in _seen and _has_numbers(found.expert_N):
            _check_numbers(selector, method, found, scored)
            _seen.add(selector)
    chosen: Pairs = found
    return chosen


def after_drops(selector: Part, kept: Pairs, scored: Scored) -> Pairs:
    """Return the kept pairs with their final weights."""
    found = called(selector, "after_drops", kept)
    if not is_ours(type(selector)):
        _check_pairs(selector, "after_drops", found, scored)
    weighed: Pairs = found
    return weighed


def kept(capacity: Part, wanted: Pairs, scored: Scored, context: StepContext) -> Tensor | Places | None:
    """Return which pairs a capacity keeps."""
    found: Tensor | Places | None = called(capacity, "forward", wanted, scored, context)
    if is_ours(type(capacity)) or found is None:
        return found
    expert_N = wanted.expert_N
    if isinstance(found, Places):
        _check_tensor(capacity, found.place_N, expert_N, expert_N.shape, (torch.int64,), name="place_N")
    else:
        _check_tensor(
            capacity, found, expert_N, expert_N.shape, (torch.bool,), what="(pairs), Places or None"
        )
    return found


def loss_value(loss: Any, routing: Routing, *inputs: Any) -> Tensor:
    """Return the value of a loss of the routing, a scalar.

    A plugin's loss must have a gradient in its first training pass, unless its value is 0 there or the router
    does not learn: counts and chosen experts have none, and such a loss would change nothing.
    """
    value = called(loss, "forward", routing, *inputs)
    if not is_ours(type(loss)):
        _check_tensor(loss, value, routing.scores_TE, (), what="(a scalar)")
        if loss not in _seen and torch.is_grad_enabled() and routing.scores_TE.requires_grad:
            _seen.add(loss)
            if not value.requires_grad and _has_numbers(value) and bool(value != 0):
                raise _wrong(loss, "a value without gradient, which changes nothing", WITH_GRADIENT)
    found: Tensor = value
    return found


def metrics(part: Part) -> dict[str, Tensor]:
    """Return the part's own numbers by name."""
    found = called(part, "metrics")
    if not is_ours(type(part)):
        if not isinstance(found, dict):
            raise _wrong(part, _shown(found), "a dict of scalar tensors by name", "metrics")
        for name, value in found.items():
            if not isinstance(value, Tensor) or value.dim():
                raise _wrong(part, f"{_shown(value)} as {name!r}", "a tensor of shape []", "metrics")
    by_name: dict[str, Tensor] = found
    return by_name


def constraints(part: Part) -> list[Constraint]:
    """Return the part's constraints; a plugin's projections are checked when they are called."""
    found = called(part, "constraints")
    if is_ours(type(part)):
        ours: list[Constraint] = found
        return ours
    expected = "a list of (parameter, function)"
    if not isinstance(found, list | tuple):
        raise _wrong(part, _shown(found), expected, "constraints")
    for each in found:
        right = isinstance(each, tuple) and len(each) == 2
        if not right or not isinstance(each[0], nn.Parameter) or not callable(each[1]):
            raise _wrong(part, f"{_shown(each)} in its list", expected, "constraints")
    return [(parameter, _checked_projection(part, projection)) for parameter, projection in found]


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


def _check_pairs(selector: Part, method: str, found: Any, scored: Scored) -> None:
    if not isinstance(found, Pairs):
        raise _wrong(selector, _shown(found), "Pairs, as Pairs.of_choices makes them", method)
    size = (found.expert_N.numel(),) if isinstance(found.expert_N, Tensor) else (0,)
    for name in ("expert_N", "token_N", "choice_N", "weight_N"):
        dtypes, value_N = NUMBERS if name == "weight_N" else (torch.int64,), getattr(found, name)
        _check_tensor(selector, value_N, scored.scores_TE, size, dtypes, method, "(pairs)", name)


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
