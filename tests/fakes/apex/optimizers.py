"""FusedAdam, whose steps are counted in the group and not in the state of a parameter."""

from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
    ) -> None:
        assert not amsgrad and not capturable
        self.adam_w_mode = adam_w_mode
        options = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**options, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group["step"] + 1 if "step" in group else 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(parameter).float()
                    state["exp_avg_sq"] = torch.zeros_like(parameter).float()
                self._update(parameter, state, group)

    def _update(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        (beta1, beta2), gradient = group["betas"], parameter.grad
        if self.adam_w_mode:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        else:
            gradient = gradient + group["weight_decay"] * parameter
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        mean = state["exp_avg"] / (1 - beta1 ** group["step"])
        square = state["exp_avg_sq"] / (1 - beta2 ** group["step"])
        parameter.addcdiv_(mean, square.sqrt() + group["eps"], value=-group["lr"])
