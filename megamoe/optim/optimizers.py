"""AdamW or Adam, its parameter groups, and global-norm clipping, because DeepSpeed's is wrong with
experts.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer
from torch import Tensor, nn

from megamoe.compat import replaced
from megamoe.compat.deepspeed_compat import expert_groups, set_grad_norm, without_inner_steps
from megamoe.compat.deepspeed_zero import whole_shape
from megamoe.config.schema import GroupConfig, ModelConfig, OptimizerConfig
from megamoe.kernels.adamw import AdamW, sum_of_squares
from megamoe.kernels.choice import DEFAULT_KERNELS, Kernels
from megamoe.optim.matrices import VECTORS, is_matrix, takes_muon
from megamoe.optim.parameter_groups import by_width, divide, weight_decay
from megamoe.optim.short_moments import ShortMoments
from megamoe.parallel.consensus import CollectiveError
from megamoe.parallel.process_groups import ModelParallelUnit


def parameter_groups(
    model: nn.Module, config: OptimizerConfig, of_model: ModelConfig | None = None
) -> list[dict[str, Any]]:
    """Return the optimiser's groups, with PyTorch's keys and `lr_scale`, a factor on the learning rate.

    Matrices have weight decay; norms, biases and other vectors do not, unless `optimizer.groups` sets one.
    Experts form separate groups. Their weights are stacked, so the shape of one expert's weight decides.
    of_model: whose muP divides the groups further, see `by_width`.

    Raises:
        CollectiveError: if a pattern of `optimizer.groups` matches no parameter.
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    rest, *chosen = divide(trained, config.groups, getattr(model, "trained_elsewhere", ()))
    names = {parameter: name for name, parameter in trained}
    muon_names = names if config.name == "muon" else {}
    rest, named = _of_muon("", rest, muon_names, None, config, weight_decay(config))
    named += _decaying("", rest, names, weight_decay(config), 0.0, 1.0)
    for number, (group, parameters) in enumerate(zip(config.groups, chosen, strict=True)):
        decay = weight_decay(config) if group.weight_decay is None else group.weight_decay
        others, of_muon = _of_muon(f"group_{number}_", parameters, muon_names, group, config, decay)
        named += of_muon
        of_vectors = group.weight_decay or 0.0
        named += _decaying(f"group_{number}_", others, names, decay, of_vectors, group.lr_scale)
    if of_model is not None and of_model.mup is not None:
        named = by_width(named, trained, of_model, config)
    split: list[dict[str, Any]] = split_params_into_different_moe_groups_for_optimizer(named)
    return [group for group in split if group["params"]]


def _of_muon(
    name: str,
    parameters: list[nn.Parameter],
    names: dict[nn.Parameter, str],
    group: GroupConfig | None,
    config: OptimizerConfig,
    decay: float,
) -> tuple[list[nn.Parameter], list[dict[str, Any]]]:
    """Return the parameters that AdamW updates, and the group of those that Muon does; no group without Muon.

    names: of the trained parameters; empty without Muon. group: which names the parameters; None: none does.

    Raises:
        CollectiveError: if `optimizer.groups` wants Muon for a vector.
    """
    algorithm = None if group is None else group.algorithm
    if not names or algorithm == "adamw":
        return parameters, []
    parts: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for parameter in parameters:
        if group is not None and algorithm == "muon" and not is_matrix(parameter):
            raise CollectiveError(
                f"optimizer.groups: {group.pattern!r} with algorithm: muon matches {names[parameter]}, which "
                "is no matrix; narrow the pattern, or leave algorithm out"
            )
        parts[algorithm == "muon" or takes_muon(names[parameter], parameter)].append(parameter)
    lr_scale = config.muon.lr_scale * (1.0 if group is None else group.lr_scale)
    muon = {"name": f"{name}muon", "params": parts[1], "weight_decay": decay, "lr_scale": lr_scale}
    return parts[0], [{**muon, "muon": True}]


def _decaying(
    name: str,
    parameters: list[nn.Parameter],
    names: dict[nn.Parameter, str],
    of_matrices: float,
    of_vectors: float,
    lr_scale: float,
) -> list[dict[str, Any]]:
    """Return two groups: matrices and vectors."""
    parts: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for parameter in parameters:
        is_stacked = is_moe_param(parameter) or VECTORS.search(names[parameter]) is not None
        parts[len(whole_shape(parameter)) - is_stacked < 2].append(parameter)
    decays = ((f"{name}decay", of_matrices), (f"{name}no_decay", of_vectors))
    return [
        {"name": part_name, "params": part, "weight_decay": decay, "lr_scale": lr_scale}
        for part, (part_name, decay) in zip(parts, decays, strict=True)
    ]


def adamw_options(config: OptimizerConfig) -> dict[str, Any]:
    """Return the keyword arguments of torch.optim.AdamW and Adam; fused makes one pass per tensor."""
    return {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": weight_decay(config),
        "fused": True,
    }


def zero_optimizer(
    config: OptimizerConfig, groups: list[dict[str, Any]], kernels: Kernels = DEFAULT_KERNELS
) -> AdamW:
    """AdamW or Adam, or the same with moments in bf16, whose tensors DeepSpeed partitions at ZeRO 1 to 3."""
    kind = ShortMoments if config.moments == "bf16" else AdamW
    decoupled = config.name == "adamw"
    return kind(groups, kernels=kernels, decoupled_weight_decay=decoupled, **adamw_options(config))


def global_grad_norm(
    gradients: Iterable[tuple[nn.Parameter, Tensor]], kernels: Kernels = DEFAULT_KERNELS
) -> Tensor:
    """L2 norm of the whole model's gradient, fp32 scalar, the same on every rank, finite or not.

    Each parameter counts once: replicated ones are counted on this rank, those that tensor parallelism splits
    are summed over its group, experts over the ranks that together hold all experts once, and everything
    over the pipeline stages.
    """
    whole: list[Tensor] = []
    cut: list[Tensor] = []
    expert: dict[str, list[Tensor]] = {}
    for parameter, gradient in gradients:
        if getattr(parameter, "counted_elsewhere", False):
            continue  # the first stage counts it
        if is_moe_param(parameter):
            expert.setdefault(parameter.group_name, []).append(gradient)  # type: ignore[attr-defined]
        else:
            (cut if getattr(parameter, "tensor_model_parallel", False) else whole).append(gradient)
    total = _sum_of_squares(whole, kernels)
    sums = [(cut, ModelParallelUnit.get_tensor_model_parallel_group())]
    sums += [(expert[name], expert_groups(name)[0]) for name in sorted(expert)]
    for tensors, group in sums:
        squares = _sum_of_squares(tensors, kernels)
        squares += 0 * total.to(squares.device)  # NaN where that is not finite: all ranks must see it
        dist.all_reduce(squares, group=group)
        total = total.to(squares.device) + squares
    if ModelParallelUnit.get_pipeline_model_parallel_world_size() > 1:
        dist.all_reduce(total, group=ModelParallelUnit.get_pipeline_model_parallel_group())
    return total.sqrt().float()


def _sum_of_squares(tensors: list[Tensor], kernels: Kernels) -> Tensor:
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=get_accelerator().current_device_name())
    return sum_of_squares(tensors, kernels)


def note_not_finite(found: dict[str, str], group: str, gradient: Tensor | None) -> None:
    """Note under a parameter group's name that a gradient of it is `nan` or `inf`, if it is; nan counts."""
    if gradient is not None and found.get(group) != "nan" and not gradient.isfinite().all():
        found[group] = "nan" if gradient.isnan().any() else "inf"


class Stage0AdamW(AdamW):
    """AdamW or Adam for ZeRO 0, with clipping by the global norm.

    DeepSpeed's clipping at stage 0 averages norms over data-parallel ranks, which hold different experts.
    grad_norm: of the last step, before clipping. options: from `adamw_options`, and `decoupled_weight_decay`.
    skips_update: set by `skip_update`.
    """

    def __init__(self, param_groups: list[dict[str, Any]], grad_clip: float, **options: Any) -> None:
        super().__init__(param_groups, **options)
        self.grad_clip = grad_clip
        self.skips_update = False
        self.grad_norm = math.nan
        self.not_finite: dict[str, str] = {}  # parameter groups of the last step; see `_groups_not_finite`

    def master_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the fp32 weight that the update changes."""
        return parameter

    def _gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return (parameter, gradient) pairs; the parameter tells whether it is dense or an expert's."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Clip by the global norm, then update; if the norm is not finite, the weights do not change."""
        gradients = self._gradients()
        self.grad_norm = float(global_grad_norm(gradients, self.kernels))
        set_grad_norm(self, self.grad_norm)
        self.not_finite = {} if math.isfinite(self.grad_norm) else self._groups_not_finite()
        if self.skips_update or not math.isfinite(self.grad_norm):
            return
        clips = self.grad_clip > 0
        factor = min(1.0, self.grad_clip / (self.grad_norm + 1e-6)) if clips else 1.0
        self.update(factor, self._rounded())

    def _groups_not_finite(self) -> dict[str, str]:
        """Return `nan` or `inf` for each parameter group with such a gradient on this rank, by its name."""
        found: dict[str, str] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                note_not_finite(found, group["name"], parameter.grad)
        return found

    def _rounded(self) -> dict[Tensor, Tensor] | None:
        """Return, by parameter, the tensor that receives its value in bf16."""
        return None


class MasterWeightAdamW(Stage0AdamW):
    """The same for a bf16 model: fp32 master weights, fp32 gradient accumulation and reduction.

    DeepSpeed has neither at stage 0. A hook adds each bf16 gradient to the master's fp32 gradient as soon as
    it is complete; the engine reduces the result of `get_grads_for_reduction`. is_stale: whether a master's
    gradient belongs to an earlier step and is to be overwritten.
    """

    def __init__(self, param_groups: list[dict[str, Any]], grad_clip: float, **options: Any) -> None:
        self.model_parameters: list[nn.Parameter] = []
        self.is_stale: dict[nn.Parameter, bool] = {}
        master_groups = []
        for group in param_groups:
            masters = [self._make_master(parameter) for parameter in group["params"]]
            self.model_parameters += group["params"]
            master_groups.append({**group, "params": masters})
        super().__init__(master_groups, grad_clip, **options)

    def _make_master(self, parameter: nn.Parameter) -> nn.Parameter:
        master = nn.Parameter(parameter.detach().float().clone())
        for mark in ("tensor_model_parallel", "counted_elsewhere"):
            setattr(master, mark, getattr(parameter, mark, False))
        if is_moe_param(parameter):
            master.allreduce = False  # type: ignore[attr-defined]
            master.group_name = parameter.group_name  # type: ignore[attr-defined]
        master.grad = torch.zeros_like(master)
        # Not `self` in the hook, which would keep the optimizer and the model alive.
        is_stale = self.is_stale
        is_stale[master] = False

        def accumulate(bf16_parameter: Tensor) -> None:
            assert master.grad is not None and bf16_parameter.grad is not None
            if is_stale[master]:
                master.grad.copy_(bf16_parameter.grad)
            else:
                master.grad.add_(bf16_parameter.grad)
            is_stale[master] = False
            bf16_parameter.grad = None

        parameter.register_post_accumulate_grad_hook(accumulate)
        return master

    def _gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        for master in self.masters():
            if self.is_stale[master]:
                assert master.grad is not None
                master.grad.zero_()
                self.is_stale[master] = False
        return super()._gradients()

    def master_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the fp32 weight that the update changes."""
        place = next(i for i, known in enumerate(self.model_parameters) if known is parameter)
        return self.masters()[place]

    def masters(self) -> list[nn.Parameter]:
        """Return the fp32 weights, in the order of `model_parameters`."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def get_grads_for_reduction(self) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """Return dense gradients, and expert gradients by group name; DeepSpeed calls it."""
        dense: list[Tensor] = []
        expert: dict[str, list[Tensor]] = {}
        for master, gradient in self._gradients():
            mine = expert.setdefault(master.group_name, []) if is_moe_param(master) else dense  # type: ignore[attr-defined]
            mine.append(gradient)
        return dense, expert

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the masters and round them into the model; the next gradients overwrite theirs."""
        super().step()
        self.is_stale.update(dict.fromkeys(self.masters(), True))

    def _rounded(self) -> dict[Tensor, Tensor]:
        return dict(zip(self.masters(), self.model_parameters, strict=True))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: `step` handles the masters' gradients, and the engine clears the model's."""


@contextmanager
def skip_update(optimizer: Any) -> Iterator[None]:
    """Context in which a step changes no weight, master or moment; all else works as usual.

    optimizer: DeepSpeed's wrapper of ours or its own, or ours alone at ZeRO 0.
    """
    is_ours = isinstance(optimizer, Stage0AdamW)
    with replaced(optimizer, skips_update=True) if is_ours else without_inner_steps(optimizer):
        yield


class WeightMean:
    """M <- d M + (1 - d) W after each step that is applied; M begins as the W of the first one.

    The tensors are those of the optimizer: ZeRO 1 to 3 thus partition the mean as the masters, and it lies
    where these lie. It is in fp32 whatever they are: bf16 would round (1 - d) W away. of: the mean of each
    tensor.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.of: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def update(self, tensors: Iterable[Tensor]) -> None:
        """Take in the weights after a step."""
        for tensor in tensors:
            if tensor in self.of:
                self.of[tensor].lerp_(tensor.detach().float(), 1 - self.decay)
            else:
                self.of[tensor] = tensor.detach().to(torch.float32, copy=True)
