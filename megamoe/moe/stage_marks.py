"""The marks between the stages of an MoE layer's pass, which its timers read."""

from collections.abc import Callable
from typing import Any

from megamoe.moe.dispatch.dispatcher import Dispatcher


def mark_stages(layer: Any) -> None:
    """Let the timers of the layer's step context know its stages: route, dispatch, experts, combine.

    The dispatch's methods are wrapped, and hooks stand around the router and the losses. The rank's own work
    (`LocalComputeTimer`) excludes what is sent and what the experts compute, whose time depends on the
    router.
    """

    def stage(name: str | None) -> None:
        timers = layer.context.timers
        if timers is not None and layer.training and not layer.recomputing:
            timers.pause()
            timers.resume(name)

    def leave_own_work(name: str) -> None:
        layer.context.compute_timer.pause()
        stage(name)

    def go_on(*unused: Any) -> None:
        stage(None)
        layer.context.compute_timer.resume()

    def around(method: str, before: Callable[[str], None], name: str, after: Callable[[], None]) -> None:
        inner = getattr(dispatcher, method)

        def marked(*inputs: Any) -> Any:
            before(name)
            result = inner(*inputs)
            after()
            return result

        setattr(dispatcher, method, marked)

    dispatcher: Dispatcher = layer.dispatcher
    layer.router.register_forward_pre_hook(lambda *unused: stage("route"))
    around("start", leave_own_work, "dispatch", go_on)  # the shared experts follow
    around("finish", leave_own_work, "dispatch", lambda: stage("experts"))
    around("combine", stage, "combine", lambda: None)
    around("combine_weighted", stage, "combine", lambda: None)
    layer.losses.register_forward_pre_hook(lambda *unused: stage(None))
    layer.losses.register_forward_hook(go_on)
