"""Systems in the configuration: `router: moec` written out, with what the user overrides in part.

    moe:
      router: {system: moec, selector: {k: 2}}    # or, without overrides, router: moec
      losses: {clustering: none}

A system may set any key of the section `moe`; the user's own stands above it. An option goes into the
system's part of that stage, another part's name replaces it, and a loss that is `none` is left out.
"""

import copy
from typing import Any

from megamoe import registry

ROUTER_PARTS = ("scorer", "gate", "selector", "capacity")


def expand_system(moe: dict[str, Any]) -> dict[str, Any]:
    """The section `moe` with its system, if it names one, written out.

    Raises:
        UserError: for an unknown system; the nearest known one is named.
    """
    moe = dict(moe)
    router = moe.get("router")
    if isinstance(router, str):
        router = {"system": router}
    if not isinstance(router, dict) or "system" not in router:
        return _without_dropped_losses(moe)
    router = dict(router)
    base = copy.deepcopy(registry.get_system(router.pop("system")).tree)
    moe["router"] = _merge_router(base.get("router", {}), router)
    losses = moe.get("losses", {})
    if isinstance(losses, dict):
        moe["losses"] = _merge_losses(base.get("losses", {}), losses)
    return _without_dropped_losses({**base, **moe})


def _merge_router(base: dict[str, Any], mine: dict[str, Any]) -> dict[str, Any]:
    merged = {**base, **mine}
    for stage in ROUTER_PARTS:
        if stage in base and stage in mine:
            merged[stage] = _merge_part(base[stage], mine[stage])
    return merged


def _merge_part(base: Any, mine: Any) -> Any:
    base = base if isinstance(base, dict) else {"name": base}
    if isinstance(mine, dict) and mine.get("name", base["name"]) == base["name"]:
        return {**base, **mine}
    return base if mine == base["name"] else mine


def _merge_losses(base: dict[str, Any], mine: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {**base, **mine}
    for name in base.keys() & mine.keys():
        options = _loss_options(mine[name])
        if isinstance(options, dict):
            merged[name] = {**_loss_options(base[name]), **options}
    return merged


def _loss_options(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"weight": value}
    return {} if value is None else value


def _without_dropped_losses(moe: dict[str, Any]) -> dict[str, Any]:
    if isinstance(moe.get("losses"), dict):
        moe["losses"] = {name: value for name, value in moe["losses"].items() if value != "none"}
    return moe
