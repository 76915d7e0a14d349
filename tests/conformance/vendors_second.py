"""Asks the vendors what the tests of the second list ask us, on the CPU; prints a table of the page.

    python -m tests.conformance.vendors_second
    PYTHONPATH=FOLDER python -m tests.conformance.vendors_second    # those of `pip install --target FOLDER`

What is not in ANSWERS was not run, or needs CUDA.
"""

import inspect
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed.moe.sharded_moe import topkgating
from deepspeed.runtime.zero.muon.original_muon import zeropower_via_newtonschulz5
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional
from transformers import DeepseekV3Config
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward
from transformers.masking_utils import sliding_window_causal_mask_function
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from megamoe.parallel import launch
from megamoe.parallel.layout import Layout
from megamoe.parallel.process_groups import start_groups
from tests.conformance.vendors import Answer, logits, print_table, verdict
from tests.support.moe.build import gradient_of
from tests.support.ranks.pool import Pool

NEGATIVE = torch.full((8,), -2.0)


def scores(tokens: int = 16) -> Tensor:
    return logits(2 * tokens).view(tokens, 8)


def _on_two_ranks() -> dict[str, float]:
    """Job: norms of gradients of ones that this rank takes part in, and its unpadded tokens."""
    launch.start(launch.find_world(), timeout_minutes=1)
    start_groups(Layout(2, tensor=2), timeout_minutes=1)
    options: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 4}
    config = TransformerConfig(**options, tensor_model_parallel_size=2, softmax_type="learnable")
    with patch("torch.cuda.current_device", return_value="cpu"):
        attention = DotProductAttention(config, 1, AttnMaskType.causal, "self")
    expert = nn.Parameter(torch.ones(3))
    expert.allreduce = False  # type: ignore[attr-defined]
    group = parallel_state.get_tensor_model_parallel_group()
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]  # no expert tensor parallelism
    takes = "expert_tp_group" in inspect.signature(param_is_not_tensor_parallel_duplicate).parameters
    options = {"expert_tp_group": alone} if takes else {}
    counted = {"sinks": attention.softmax_offset, "experts": expert}
    found = {}
    for name, parameter in counted.items():
        is_counted = param_is_not_tensor_parallel_duplicate(parameter, group, **options)
        squares = torch.tensor(float(parameter.numel() * is_counted))
        dist.all_reduce(squares)
        found[name] = float(squares.sqrt())
    chosen_TE = functional.one_hot(torch.arange(3 + 2 * dist.get_rank()) % 4, 4).bool()
    counts = moe_utils.get_tokens_per_expert_and_token_count(chosen_TE, group, 1, with_padding_mask=True)
    return {**found, "tokens": float(counts[1])}


def on_two_ranks(name: str, expected: list[float]) -> Answer:
    return lambda: verdict([each[name] for each in Pool().run(_on_two_ranks, ranks=2)], expected)


def transformers_groups() -> str:
    options: dict[str, Any] = {"hidden_size": 8, "n_routed_experts": 8, "num_experts_per_tok": 2}
    router = DeepseekV3TopkRouter(DeepseekV3Config(**options, n_group=4, topk_group=2))
    router.weight.data.copy_(torch.eye(8))
    router.e_score_correction_bias.copy_(NEGATIVE)
    return outside_the_groups(router(scores())[2])


def outside_the_groups(expert_TK: Tensor) -> str:
    """Four groups of two experts, of which each token may use two: those with the largest sums."""
    best_T2 = scores().sigmoid().view(16, 4, 2).sum(-1).topk(2).indices
    allowed_TE = torch.zeros(16, 4).scatter(1, best_T2, 1.0).repeat_interleave(2, 1).bool()
    return verdict(float((~allowed_TE.gather(1, expert_TK)).sum()), 0.0)


def megatron_groups() -> str:
    """Its groups' scores are sums of the best k / groups experts, here two."""
    _, expert_TK = moe_utils.group_limited_topk(scores().sigmoid() + NEGATIVE, 4, 16, 8, 4, 2)
    return outside_the_groups(expert_TK)


def deepspeed_dropped() -> str:
    leaf = (logits(16) + torch.tensor([3.0, 0.0, 0.0, 0.0])).requires_grad_()
    weight_TEC = topkgating(leaf, 2, 0.5, 1)[1]
    (weight_TEC.sum((1, 2)) * torch.arange(16.0)).sum().backward()
    dropped_T = weight_TEC.sum((1, 2)) == 0
    assert dropped_T.any()
    return verdict(float(gradient_of(leaf)[dropped_T].abs().max()), 0.0)


def megatron_dropped() -> str:
    leaf = logits(16).softmax(-1).requires_grad_()
    chosen_TE = torch.zeros(16, 4).scatter(1, leaf.topk(2).indices, 1.0).bool()
    weight_TE, kept_TE = moe_utils.apply_router_token_dropping(leaf * chosen_TE, chosen_TE, 2, 0.5)
    weight_TE.sum().backward()
    return verdict(float((gradient_of(leaf) * ~kept_TE).abs().max()), 0.0)


def transformers_experts(forward: Any) -> tuple[Tensor, ...]:
    """Return the gradients of weights and tokens of a rank with experts 0 and 1; expert 2 is elsewhere."""
    generator = torch.Generator().manual_seed(1)
    experts = SimpleNamespace(
        _is_expert_parallel=True, num_experts=2, has_gate=True, has_bias=False, has_post_expert_norm=False,
        is_transposed=False, gate_up_proj=torch.randn(2, 16, 8, generator=generator),
        down_proj=torch.randn(2, 8, 8, generator=generator),
        _apply_gate=lambda rows: functional.silu(rows[:, :8]) * rows[:, 8:],
    )  # fmt: skip
    expert_TK = torch.tensor([[0, 1], [0, 2], [2, 1]])
    weight_TK = (torch.rand(3, 2, generator=generator) * (expert_TK < 2)).requires_grad_()
    hidden_TH = torch.randn(3, 8, generator=generator).requires_grad_()
    forward(experts, hidden_TH, expert_TK, weight_TK).sum().backward()
    return gradient_of(weight_TK)[expert_TK == 2], gradient_of(hidden_TH), gradient_of(weight_TK)


def transformers_sentinels() -> str:
    forwards = (batched_mm_experts_forward, grouped_mm_experts_forward)
    found = [float(transformers_experts(forward)[0].abs().max()) for forward in forwards]
    return verdict(found, [0.0, 0.0])


def transformers_filling() -> str:
    finite = all(bool(each.isfinite().all()) for each in transformers_experts(grouped_mm_experts_forward))
    return "right" if finite else "**WRONG**: gradients are not finite"


def deepspeed_muon() -> str:
    stack_EMN = scores(24).view(4, 6, 8)
    together_EMN = zeropower_via_newtonschulz5(stack_EMN, 5).float()
    each = torch.stack([zeropower_via_newtonschulz5(one, 5).float() for one in stack_EMN])
    return verdict(float((together_EMN - each).abs().max()), 0.0, 0.1)  # bf16, five steps


def transformers_window() -> str:
    sees = sliding_window_causal_mask_function(3)
    return verdict(float(sum(bool(sees(0, 0, torch.tensor(7), torch.tensor(key))) for key in range(8))), 3.0)


ANSWERS: dict[str, tuple[Answer, Answer, Answer]] = {
    "test_the_sinks_of_every_head_count_in_the_norm": (
        "has no sinks",
        on_two_ranks("sinks", [2.0, 2.0]),
        "leaves it to the caller",
    ),
    "test_the_experts_of_every_tensor_parallel_rank_count_in_the_norm": (
        "",
        on_two_ranks("experts", [6**0.5] * 2),
        "",
    ),
    "test_padding_does_not_scale_a_loss_under_tensor_parallelism": (
        "has no mask under tensor parallelism",
        on_two_ranks("tokens", [3.0, 5.0]),
        "has no loss over ranks",
    ),
    "test_an_expert_outside_the_groups_is_never_chosen": (
        "has no groups",
        megatron_groups,
        transformers_groups,
    ),
    "test_a_dropped_pair_gives_the_router_no_gradient": (
        deepspeed_dropped,
        megatron_dropped,
        transformers_sentinels,
    ),
    "test_rows_that_fill_up_an_experts_share_leave_gradients_finite": ("", "", transformers_filling),
    "test_muon_takes_each_expert_by_itself": (deepspeed_muon, "", "has no Muon"),
    "test_a_window_counts_the_querys_own_position": (
        "has no attention of its own",
        "cannot be run on a CPU: makes its mask on CUDA",
        transformers_window,
    ),
}

if __name__ == "__main__":
    print_table(("deepspeed", "megatron-core", "transformers"), ANSWERS)
