"""What a router chooses and weighs, what it learns from, and how experts are updated, saved and exported."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megamoe.apps.hf.export_run import export_run
from megamoe.config.schema import MuonConfig
from megamoe.errors import UserError
from megamoe.optim.matrices import orthogonalise, step_rows
from tests.conformance.planting import Edit, fails_with
from tests.support.checkpoint_files import read_tensors
from tests.support.moe.build import (
    gradient_of,
    loss_of,
    make_hidden,
    make_layer,
    make_pairs,
    make_router,
    make_scored,
    moe_config,
    route_scores,
    routed,
)
from tests.support.tiny import check_on, tiny
from tests.train.test_loop import run, without_times

ROUTER = "megamoe.moe.router"
DISPATCH, SWITCH = "megamoe.moe.dispatch.dispatcher", "megamoe.moe.losses.switch_balance"
BIAS, EXPORT = "megamoe.moe.score_functions.expert_bias", "megamoe.apps.hf.export_run"
HIDDEN = "replace(wanted, weight_N=wanted.weight_N - (wanted.weight_N * ~kept).detach())"
HALF = ' / (2 if self.config.scope == "global_batch" else 1)'
BIASED = "moe.router.score_function={name: sigmoid, bias_update: 0.05}"


def scores(tokens: int, experts: int = 8) -> torch.Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(5))


@fails_with(Edit(ROUTER, '(scored.ranking_TE, float("-inf"), kernels)', "(scored.ranking_TE, 0.0, kernels)"))
def test_an_expert_outside_the_groups_is_never_chosen() -> None:
    """Experts outside a token's groups get the value 0, which wins where the biases are negative.

    Reported: huggingface/transformers#45440, vllm-project/vllm#13474, sgl-project/sglang#3705
    """
    router = make_router(
        8,
        masks=[{"name": "group_limit", "num_groups": 4, "keep": 2}],
        score_function={"name": "sigmoid", "bias_update": 0.01},
    )
    assert isinstance(router.score_function.bias_E, torch.Tensor)
    router.score_function.bias_E.fill_(-2.0)
    routing = route_scores(router, scores(16))
    assert routing.candidates_TE is not None
    assert bool(routing.candidates_TE[routing.pairs.token_N, routing.pairs.expert_N].all())


@fails_with(Edit(ROUTER, "self.selector.after_drops(wanted.keep(kept))", HIDDEN))
def test_a_dropped_pair_gives_the_router_no_gradient() -> None:
    """A slot that computes nothing has the weight 0, but its output reaches the router's gradient.

    Reported: huggingface/transformers#48687, huggingface/transformers#48689
    """
    capacity = {"name": "per_expert", "factor": 0.25}
    selector = {"name": "top_k", "k": 2, "weights": "raw"}
    layer = make_layer(moe_config(num_experts=4, router={"capacity": capacity, "selector": selector}))
    hidden_TH = make_hidden(16).requires_grad_()
    output_TH = layer(hidden_TH)
    output_TH.sum().backward()
    dropped_T = (output_TH == 0).all(1)
    assert 0 < int(dropped_T.sum()) < 16
    assert float(gradient_of(hidden_TH)[dropped_T].abs().max()) == 0


@fails_with(Edit(DISPATCH, "zeros(1, hidden_TH.shape[1])", "full((1, hidden_TH.shape[1]), torch.nan)"))
def test_rows_that_fill_up_an_experts_share_leave_gradients_finite() -> None:
    """Rows that only fill up are not initialised, and 0 times NaN reaches the experts' gradients.

    Reported: huggingface/transformers#48205, huggingface/transformers#45473
    """
    found = []
    for pad in (True, False):
        capacity = {"name": "per_expert", "factor": 4.0, "pad": pad}
        layer = make_layer(moe_config(num_experts=4, router={"capacity": capacity}))
        layer(make_hidden(16)).square().sum().backward()
        found.append([gradient_of(parameter) for parameter in layer.parameters()])
    for padded, plain in zip(*found, strict=True):
        torch.testing.assert_close(padded, plain, rtol=1e-4, atol=1e-5)


@fails_with(Edit(SWITCH, "self.dims.kernels)\n        probs_E", f"self.dims.kernels){HALF}\n        probs_E"))
def test_the_scopes_of_a_balance_loss_have_one_scale() -> None:
    """Losses over a micro batch, a sequence and the global batch have other scales at the same weight.

    Reported: NVIDIA/Megatron-LM#3672, NVIDIA/Megatron-LM#3768
    """
    scored = make_scored(scores(16, 4))
    routing = routed(scored, make_pairs(scored.scores_TE.topk(2).indices.tolist()))
    values = [
        loss_of("switch_balance", routing, dims={"num_choices": 2}, scope=scope).item()
        for scope in ("micro_batch", "sequence", "global_batch")
    ]
    assert values == pytest.approx([values[0]] * 3)


@fails_with(Edit("megamoe.validation.run", "if moe.weights_in_activation and (", "if False and ("))
def test_weights_inside_experts_with_biases_are_refused() -> None:
    """The weights multiply the activations, and the bias after them is added without a weight.

    Reported: NVIDIA-NeMo/Automodel#2591
    """
    refused = False
    try:
        check_on(tiny("moe.weights_in_activation=true", "moe.expert_bias=true"), 1)
    except UserError as error:
        refused = "no multiple of its activation" in str(error)
    assert refused


@fails_with(Edit("megamoe.optim.matrices", ".norm(dim=(-2, -1), keepdim=True)", ".norm()"))
def test_muon_takes_each_expert_by_itself() -> None:
    """Muon takes the norm over the stacked weights of all experts.

    Reported: marin-community/marin#8621
    """
    stack_EMN = scores(4 * 6, 8).view(4, 6, 8)
    rows = step_rows(MuonConfig())
    each = [orthogonalise(matrix_MN[None], rows)[0] for matrix_MN in stack_EMN]
    torch.testing.assert_close(orthogonalise(stack_EMN, rows), torch.stack(each), rtol=1e-4, atol=1e-5)


@pytest.mark.full
@fails_with(Edit(BIAS, "num_experts, dtype=torch.float32)", "num_experts), persistent=False"))
def test_a_resumed_run_has_its_biases(tmp_path: Path) -> None:
    """A checkpoint has no balancing biases, or zeros, and a resumed run begins to balance anew.

    Reported: pytorch/torchtitan#1222, flagos-ai/FlagScale#412
    """
    common = ["name=a", "train.steps=4", "checkpoint={every: 2, keep: 2}", "evaluation.batches=0", BIASED]
    whole = run(tmp_path / "whole", *common)
    resume = f"checkpoint.resume={tmp_path}/whole/a/checkpoints/step_00000002"
    assert without_times(run(tmp_path / "rest", *common, resume)) == without_times(whole[2:])


@fails_with(
    Edit(
        EXPORT,
        "+ rule.target)\n                reader",
        "+ rule.target) * (not rule.is_buffer)\n                reader",
    )
)
def test_an_export_has_the_biases(tmp_path: Path) -> None:
    """Models move to another framework without their balancing biases, and choose other experts.

    Reported: deepspeedai/DeepSpeed#8358, deepspeedai/DeepSpeed#8369
    """
    run(tmp_path, "name=a", "train.steps=1", "evaluation.batches=0", "model.tie_embeddings=false", BIASED)
    export_run(tmp_path / "a", tmp_path / "hf", report=lambda line: None)
    exported: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "hf").glob("*.safetensors"):
        exported |= load_file(path)
    biases = [tensor for name, tensor in exported.items() if name.endswith("e_score_correction_bias")]
    ours = read_tensors(tmp_path / "a/checkpoints/step_00000001")
    expected = [tensor for name, tensor in ours.items() if name.endswith("score_function.bias")]
    assert len(biases) == 2 and all(torch.equal(*both) for both in zip(biases, expected, strict=True))
