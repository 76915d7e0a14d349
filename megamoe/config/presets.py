"""Presets in the configuration: `router: moec` written out, with the user's overrides.

    moe:
      router: {preset: moec, selector: {k: 2}}    # or, without overrides, router: moec
      losses: {clustering: none}

A preset may set any key of the section `moe`; the user's values take precedence. Options are merged into the
preset's part of that stage. Another part's name replaces the preset's part, and a loss that is `none` is left
out. An empty `losses:` keeps the preset's losses.
"""

import copy
from typing import Any

from megamoe import registry
from megamoe.config.messages import shown
from megamoe.config.parts import DEFAULTS
from megamoe.errors import UserError


class Dropped(str):
    """The value `none` of a loss under any name."""


def expand_preset(moe: dict[str, Any]) -> dict[str, Any]:
    """Return the section `moe` with its preset, if it names one, written out.

    Raises:
        UserError: for an unknown preset, or an unknown loss that is `none`; the message names the nearest.
    """
    return _without_dropped_losses(_over_preset(moe))


def _over_preset(moe: dict[str, Any]) -> dict[str, Any]:
    moe = dict(moe)
    router = moe.get("router")
    if isinstance(router, str):
        router = {"preset": router}
    if not isinstance(router, dict) or "preset" not in router:
        return moe
    router = dict(router)
    base = _over_preset(copy.deepcopy(_tree_of(router.pop("preset"))))
    moe["router"] = _merge_router(base.get("router", {}), router)
    losses = {} if moe.get("losses") is None else moe["losses"]
    if isinstance(losses, dict):
        base_losses = base.get("losses", {})
        moe["losses"] = _merge_losses({} if base_losses == "none" else base_losses, losses)
    return {**base, **moe}


def _tree_of(preset: Any) -> dict[str, Any]:
    if not isinstance(preset, str):
        raise UserError(
            f"moe.router.preset: expected the name of a preset, found {shown(preset)}; options of its parts "
            "stand beside it, as in moe.router.selector.k=2"
        )
    try:
        return registry.get_preset(preset).tree
    except UserError as error:
        raise UserError(f"moe.router: {error}") from None


def _merge_router(base: dict[str, Any], mine: dict[str, Any]) -> dict[str, Any]:
    merged = {**base, **mine}
    for stage in registry.STAGES:
        if stage in base and stage in mine:
            merged[stage] = _merge_part(base[stage], mine[stage], DEFAULTS[stage])
    return merged


def _merge_part(base: Any, mine: Any, default: str) -> Any:
    base = {"name": default, **base} if isinstance(base, dict) else {"name": base}
    if isinstance(mine, dict) and mine.get("name", base["name"]) == base["name"]:
        return {**base, **mine}
    return base if mine == base["name"] else mine


def _merge_losses(base: dict[str, Any], mine: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {**base, **mine}
    for name in base.keys() & mine.keys():
        before, options = _loss_options(base[name]), _loss_options(mine[name])
        if mine[name] is None:
            merged[name] = base[name]
        elif mine[name] == "none":
            merged[name] = Dropped("none")
        elif isinstance(before, dict) and isinstance(options, dict):
            known = before.get("name", name)
            merged[name] = {**before, **options} if options.get("name", known) == known else options
    return merged


def _loss_options(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"weight": value}
    return {} if value is None else value


def _without_dropped_losses(moe: dict[str, Any]) -> dict[str, Any]:
    losses = moe.get("losses")
    if not isinstance(losses, dict):
        return moe
    known = [*registry.list_parts("loss"), *(name for name, value in losses.items() if value != "none")]
    for name, value in losses.items():
        if value == "none" and name not in known and not isinstance(value, Dropped):
            raise UserError(f"moe.losses: {registry.unknown_name_message('loss', name, known)}")
    return {**moe, "losses": {name: value for name, value in losses.items() if value != "none"}}
