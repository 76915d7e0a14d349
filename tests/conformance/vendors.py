"""Asks the pinned DeepSpeed and Megatron-Core what our tests ask us, on the CPU; prints a table of the page.

    python -m tests.conformance.vendors

Each function calls the vendor's own code on the case of one of our tests, and returns what it found: `right`,
or `WRONG` with the numbers. What needs CUDA, or does not exist there, has the reason
instead; what is not in ANSWERS was not run.
"""

import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.sharded_moe import TopKGate, multiplicative_jitter, top1gating, topkgating
from deepspeed.runtime.utils import clip_grad_norm_
from deepspeed.utils import groups
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megamoe.parallel import launch
from tests.support.moe.build import make_hidden
from tests.support.ranks.pool import Pool
from tests.support.tiny import world_of_one

EXPERTS, HIDDEN = 4, 16
NAMES = {"deepspeed": "DeepSpeed", "megatron-core": "Megatron-Core", "transformers": "transformers"}
NEEDS_CUDA = "cannot be run on a CPU: "
ROUTER = NEEDS_CUDA + "the router moves its weight to `torch.cuda.current_device()`"
NORM = NEEDS_CUDA + "the norm is computed on CUDA tensors"
CALLER = "leaves it to the caller, to whom it returns the loss"
Answer = str | Callable[[], str]  # what is said of a vendor, or the function that asks it


def verdict(found: Any, expected: Any, tolerance: float = 1e-4) -> str:
    """Return `right`, or `WRONG` with both values: floats, or lists of them."""
    pairs = zip(found, expected, strict=True) if isinstance(found, list) else [(found, expected)]
    if all(abs(one - other) <= tolerance * max(1.0, abs(other)) for one, other in pairs):
        return "right"
    return f"**WRONG**: {shown(found)} instead of {shown(expected)}"


def shown(value: Any) -> str:
    """Return a number, or a list of them, with four digits."""
    return ", ".join(f"{each:.4g}" for each in (value if isinstance(value, list) else [value]))


def megatron_router(**options: Any) -> TopKRouter:
    """Return Megatron-Core's router with its weights still on the CPU; `routing` takes logits there."""
    options = {"moe_router_topk": 2, "moe_aux_loss_coeff": 0.5} | options
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        add_bias_linear=False,
        **{"moe_router_load_balancing_type": "aux_loss"} | options,
    )
    router = TopKRouter(config, ProcessGroupCollection.use_mpu_process_groups())
    router.set_layer_number(1)
    return router.train()


def megatron_loss(router: TopKRouter, logits_SBE: Tensor, **more: Any) -> float:
    """Return the loss that the router records in one pass."""
    moe_utils.clear_aux_losses_tracker()
    moe_utils.get_moe_layer_wise_logging_tracker().clear()
    router.routing(logits_SBE, **more)
    (entry,) = moe_utils.get_moe_layer_wise_logging_tracker().values()
    return float(entry["values"][0])


def logits(tokens: int, seed: int = 5) -> Tensor:
    return torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(seed))


def balance(of_TE: Tensor, k: int) -> float:
    """Return E sum f P, with all pairs counted."""
    probs_TE = of_TE.softmax(-1)
    counts_E = torch.zeros_like(probs_TE).scatter(1, of_TE.topk(k).indices, 1.0).sum(0)
    return float(EXPERTS * (counts_E / counts_E.sum() * probs_TE.mean(0)).sum())


# --- losses


def deepspeed_balance_for_any_k() -> str:
    """The fraction of the pairs is of k choices, P is even."""
    even_TE = torch.zeros(8, EXPERTS)
    found = [float(top1gating(even_TE, 8.0, 1)[0]), float(topkgating(even_TE, 2, 8.0, 1)[0])]
    return verdict(found, [1.0, 1.0])


def megatron_balance_for_any_k() -> str:
    probs_TE, counts_E = torch.full((4, 4), 0.25), torch.ones(4)
    found = [
        float(moe_utils.switch_load_balancing_loss_func(probs_TE, k * counts_E, 4, k, 4, 1.0)) for k in (1, 2)
    ]
    return verdict(found, [1.0, 1.0])


def megatron_small_sigmoids() -> str:
    found = []
    for low in (0.0, -60.0):
        low_TE = torch.full((4, 4), low)
        _, shares_TE = moe_utils.compute_routing_scores_for_aux_loss(low_TE, 1, "sigmoid")
        found.append(float(moe_utils.switch_load_balancing_loss_func(shares_TE, torch.ones(4), 4, 1, 4, 1.0)))
    return verdict(found, [1.0, 1.0])


def deepspeed_loss_counts_drops() -> str:
    skewed_TE = logits(16) + torch.tensor([3.0, 0.0, 0.0, 0.0])
    return verdict(float(topkgating(skewed_TE, 2, 0.5, 1)[0]), balance(skewed_TE, 2))


def megatron_loss_counts_drops() -> str:
    skewed_TE = logits(16) + torch.tensor([3.0, 0.0, 0.0, 0.0])
    router = megatron_router(moe_expert_capacity_factor=0.5)
    return verdict(megatron_loss(router, skewed_TE[:, None]), balance(skewed_TE, 2))


def megatron_packed_sequences() -> str:
    """Two packed sequences of six and two tokens reach the router as one row: [S, 1, E]."""
    packed_TE = logits(8)
    router = megatron_router(moe_router_load_balancing_type="seq_aux_loss")
    one_by_one = [balance(packed_TE[:6], 2), balance(packed_TE[6:], 2)]
    return verdict(megatron_loss(router, packed_TE[:, None]), sum(one_by_one) / 2)


def megatron_recorded_once() -> str:
    """Its `checkpoint` needs CUDA's random state: here are its two passes, without gradient and with it."""
    router, logits_SBE = megatron_router(), logits(8)[:, None]
    expected = megatron_loss(router, logits_SBE)
    moe_utils.get_moe_layer_wise_logging_tracker().clear()
    with torch.no_grad():
        router.routing(logits_SBE)
    router.routing(logits_SBE)
    (entry,) = moe_utils.get_moe_layer_wise_logging_tracker().values()
    own = verdict(float(entry["values"][0]), expected)
    moe_utils.get_moe_layer_wise_logging_tracker().clear()
    leaf = logits_SBE.clone().requires_grad_()
    checkpoint(router.routing, leaf, use_reentrant=False)[0].sum().backward()
    (entry,) = moe_utils.get_moe_layer_wise_logging_tracker().values()
    other = verdict(float(entry["values"][0]), expected)
    return f"{own}; under PyTorch's `checkpoint(use_reentrant=False)`: {other}"


def gradient_of_balance(of_TE: Tensor, k: int) -> Tensor:
    """Return the gradient of E sum f P, whose f has none."""
    leaf = of_TE.clone().requires_grad_()
    counts_E = torch.zeros_like(leaf).scatter(1, of_TE.topk(k).indices, 1.0).sum(0)
    (EXPERTS * (counts_E / counts_E.sum() * leaf.softmax(-1).mean(0)).sum()).backward()
    assert leaf.grad is not None
    return leaf.grad


def deepspeed_gradient_of_a_loss() -> str:
    leaf = logits(16).requires_grad_()
    topkgating(leaf, 2, 8.0, 1)[0].backward()
    assert leaf.grad is not None
    return verdict(float((leaf.grad - gradient_of_balance(logits(16), 2)).abs().max()), 0.0, 1e-6)


def megatron_gradient_of_a_loss() -> str:
    leaf = logits(16)[:, None].requires_grad_()
    (megatron_router(moe_aux_loss_coeff=1.0).routing(leaf)[0] * 0).sum().backward()
    assert leaf.grad is not None
    return verdict(float((leaf.grad[:, 0] - gradient_of_balance(logits(16), 2)).abs().max()), 0.0, 1e-6)


# --- counts, draws and precision


def deepspeed_padding() -> str:
    """With `used_token` (k = 1 alone has it), two of ten tokens are padding."""
    of_TE, used_T = logits(10), torch.tensor([1] * 8 + [0] * 2)
    loss, _, _, counts_E = top1gating(of_TE, 8.0, 1, used_token=used_T)
    counted = f"load {int(counts_E.sum())} of 8 tokens"
    return f"k = 1 only: {counted}; loss {verdict(float(loss), balance(of_TE[:8], 1))}"


def megatron_padding() -> str:
    of_TE, is_padding_T = logits(10), torch.tensor([False] * 8 + [True] * 2)
    router = megatron_router()
    loss = megatron_loss(router, of_TE[:, None], padding_mask=is_padding_T[:, None])
    _, chosen_TE = router.routing(of_TE[:, None], padding_mask=is_padding_T[:, None])
    routed = verdict(float(chosen_TE.sum()), 16.0)
    return f"loss {verdict(loss, balance(of_TE[:8], 2))}; pairs sent to experts {routed}"


def deepspeed_large_counts() -> str:
    crowded_TE = torch.tensor([[5.0, 0.0, 0.0, 0.0]]).repeat(599, 1)
    crowded_TE = torch.cat([crowded_TE, crowded_TE[:1].roll(1, 1)]).bfloat16()
    return verdict(top1gating(crowded_TE, 4.0, 1)[3].tolist(), [599, 1, 0, 0], 0)


def megatron_large_counts() -> str:
    crowded_TE = torch.zeros(600, EXPERTS, dtype=torch.bool)
    crowded_TE[:599, 0] = crowded_TE[599, 1] = True
    counts_E, *_ = moe_utils.get_tokens_per_expert_and_token_count(
        crowded_TE, parallel_state.get_tensor_model_parallel_group(), 1
    )
    return verdict(counts_E.tolist(), [599, 1, 0, 0], 0)


def deepspeed_bf16_router() -> str:
    """The probabilities of one expert per token, whose weight the gate returns."""
    gate = TopKGate(HIDDEN, EXPERTS, k=1, capacity_factor=8.0, use_rts=False).bfloat16()
    hidden_TH = make_hidden(64).bfloat16()
    exact_T = (hidden_TH.double() @ gate.wg.weight.detach().double().T).softmax(-1).max(-1).values
    found_T = gate(hidden_TH)[1].sum((1, 2)).detach()
    return verdict(float((found_T - exact_T).abs().max()), 0.0, 1e-5)


def megatron_small_bias_updates() -> str:
    bias_E = torch.zeros(EXPERTS)
    for _ in range(400):
        bias_E = moe_utils.get_updated_expert_bias(torch.tensor([9.0, 1.0, 1.0, 1.0]), bias_E, 0.001)
    return verdict(bias_E.tolist(), [-0.4, 0.4, 0.4, 0.4])


def deepspeed_same_noise() -> str:
    """Under PyTorch's `checkpoint`, which restores the CPU's random state."""
    torch.manual_seed(1)
    hidden_TH = torch.ones(8, HIDDEN, requires_grad=True)
    drawn: list[Tensor] = []

    def jittered(rows_TH: Tensor) -> Tensor:
        drawn.append(multiplicative_jitter(rows_TH, torch.device("cpu")))
        return drawn[-1].square()

    checkpoint(jittered, hidden_TH, use_reentrant=False).sum().backward()
    return verdict(float((drawn[0] - drawn[1]).abs().max()), 0.0)


# --- state


def deepspeed_top_1() -> str:
    """Its top-1 gate takes the probability itself as the weight."""
    leaf = logits(16).requires_grad_()
    top1gating(leaf, 8.0, 1)[1].square().sum().backward()
    assert leaf.grad is not None
    return "right: the weight is p" if leaf.grad.abs().max() > 1e-4 else "**WRONG**: no gradient"


def megatron_top_1() -> str:
    try:
        megatron_router(moe_router_topk=1)
    except ValueError as error:
        return f"right: refused ({error})"
    return "**WRONG**: not refused"


def deepspeed_norm_of_one_rank() -> str:
    dense, expert = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    dense.grad, expert.grad = torch.tensor([2.0]), torch.tensor([3.0])
    expert.allreduce, expert.group_name = False, "ep_size_1"  # type: ignore[attr-defined]
    return verdict(float(clip_grad_norm_([dense, expert], 1.0)), 13**0.5)


def _norm_of_experts() -> float:
    launch.start(launch.find_world(), timeout_minutes=1)
    groups._create_expert_and_data_parallel(dist.get_world_size())
    dense, expert = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    dense.grad, expert.grad = torch.tensor([2.0]), torch.tensor([3.0 + dist.get_rank()])
    expert.allreduce, expert.group_name = False, "ep_size_2"  # type: ignore[attr-defined]
    return float(clip_grad_norm_([dense, expert], 1.0))


def deepspeed_one_norm() -> str:
    """Dense gradient 2 on both ranks, experts' 3 and 4; its engine without ZeRO clips so in fp32."""
    found = Pool().run(_norm_of_experts, ranks=2)
    return verdict(found, [29**0.5] * 2)


ANSWERS: dict[str, tuple[Answer, ...]] = {
    "test_a_loss_is_recorded_once_under_recomputation": (CALLER, megatron_recorded_once),
    "test_the_gradient_of_a_loss_reaches_the_router": (
        deepspeed_gradient_of_a_loss,
        megatron_gradient_of_a_loss,
    ),
    "test_the_balance_loss_is_1_at_balance_for_any_k": (
        deepspeed_balance_for_any_k,
        megatron_balance_for_any_k,
    ),
    "test_small_sigmoids_do_not_lower_the_balance_loss": ("has no sigmoid", megatron_small_sigmoids),
    "test_the_balance_loss_counts_what_the_capacity_drops": (
        deepspeed_loss_counts_drops,
        megatron_loss_counts_drops,
    ),
    "test_a_sequence_loss_of_packed_sequences": ("has no loss of sequences", megatron_packed_sequences),
    "test_padding_is_not_routed": (deepspeed_padding, megatron_padding),
    "test_counts_above_256_are_exact": (deepspeed_large_counts, megatron_large_counts),
    "test_a_router_of_a_bf16_model_computes_in_fp32": (
        deepspeed_bf16_router,
        "cannot be run on a CPU: without Transformer Engine `router_gating_linear` ends with a NameError",
    ),
    "test_a_bias_keeps_small_updates": ("has no bias", megatron_small_bias_updates),
    "test_a_recomputed_router_draws_the_same_noise": (
        deepspeed_same_noise,
        NEEDS_CUDA + "`checkpoint` saves CUDA's random state",
    ),
    "test_renormalised_weights_at_k_1_are_refused": (deepspeed_top_1, megatron_top_1),
    "test_clipping_counts_the_experts": (deepspeed_norm_of_one_rank, NORM),
    "test_every_rank_clips_by_one_norm": (deepspeed_one_norm, NORM),
    "test_accumulation_does_not_scale_a_loss": (CALLER, "not run: its training loop sets the scale"),
    "test_a_token_weighs_the_same_in_every_micro_batch": (CALLER, "not run: the caller's `loss_func`"),
    "test_an_experts_gradient_does_not_depend_on_expert_parallelism": (
        "right at ZeRO 0: our test runs its reduction",
        ROUTER,
    ),
    "test_a_rank_whose_experts_are_idle_takes_part_in_the_exchange": (
        "does not arise: it exchanges as many rows as the capacity has",
        ROUTER,
    ),
}


def print_table(vendors: tuple[str, ...], answers: Mapping[str, tuple[Answer, ...]]) -> None:
    """Print a row for each test, with the vendors' versions above."""
    warnings.simplefilter("ignore")  # for the vendors' own users
    print(f"| our test | {' | '.join(f'{NAMES[vendor]} {version(vendor)}' for vendor in vendors)} |")
    print("|---" * (1 + len(vendors)) + "|")
    with world_of_one():
        for name, asked in answers.items():
            found = [each if isinstance(each, str) else each() for each in asked]
            print(f"| `{name}` | {' | '.join(each or 'not run' for each in found)} |", flush=True)


if __name__ == "__main__":
    print_table(("deepspeed", "megatron-core"), ANSWERS)
