"""What is clipped, saved and resumed: the experts too, and every sample once."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megamoe.apps.hf.export_run import export_run
from megamoe.errors import UserError
from megamoe.parallel.chunks import Chunk, Sharding
from megamoe.parallel.layout import Layout
from tests.conformance.one_step import one_step
from tests.conformance.planting import Edit, fails_with
from tests.data.test_batches import stream
from tests.support.checkpoint_files import read_tensors
from tests.support.data.sources import take
from tests.support.ranks.runs import ds_config
from tests.support.tiny import check_on, tiny
from tests.train.test_loop import run, without_times

OPTIMIZERS, CHUNKS = "megamoe.optim.optimizers", "megamoe.parallel.chunks"
STATE, OF_EXPERTS = "megamoe.checkpoint.state", 'any(".experts." in self._name(f) for f in fragments)'


@fails_with(Edit(OPTIMIZERS, "(parameter.group_name, []).append(gradient)", "(parameter.group_name, [])"))
def test_clipping_counts_the_experts(one_rank: None) -> None:
    """The norm by which gradients are clipped leaves out the experts.

    Reported: deepspeedai/DeepSpeed#8613
    """
    record, gradients = one_step()
    assert any(".experts." in name for name in gradients)
    squares = sum(float(gradient.double().square().sum()) for gradient in gradients.values())
    assert record.grad_norm == pytest.approx(squares**0.5, rel=1e-5)


@fails_with(
    Edit(CHUNKS, "else None, layout.expert_rank(rank), layout.expert)", "else None, 0, layout.expert)")
)
def test_a_checkpoint_has_the_experts_of_every_rank() -> None:
    """Every expert-parallel rank saves its experts under the same places, and those of one rank remain.

    Reported: KempnerInstitute/KempnerForge#202, verl-project/verl#2086
    """
    layout = Layout(4, expert=4)
    local, saved = (2, 3, 5), set()  # two experts of 3 x 5 on each rank
    for rank in range(4):
        placement = Sharding(expert=True).placement(local, layout, rank)
        assert placement.global_shape == (8, 3, 5)
        for chunk, _ in placement.global_chunks(Chunk((0, 0, 0), local)):
            saved |= set(range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]))
    assert saved == set(range(8))


@fails_with(Edit("megamoe.apps.hf.rules", "format(b=block, e=expert)", "format(b=block, e=0)"))
def test_an_export_has_every_expert(tmp_path: Path) -> None:
    """All experts are exported under the name of one, and the last one written remains.

    Reported: NVIDIA/Model-Optimizer#1631, NVIDIA-NeMo/Megatron-Bridge#1716
    """
    run(tmp_path, "name=a", "train.steps=1", "evaluation.batches=0", "model.tie_embeddings=false")
    export_run(tmp_path / "a", tmp_path / "hf", report=lambda line: None)
    exported = {
        name: tensor
        for path in (tmp_path / "hf").glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    ours = read_tensors(tmp_path / "a/checkpoints/step_00000001")
    for block in range(2):
        down_EHX = ours[f"model/model.decoder.layers.{block}.mlp.layer.experts.down"]
        for expert, down_HX in enumerate(down_EHX):
            name = f"model.layers.{block}.block_sparse_moe.experts.{expert}.w2.weight"
            assert name in exported and torch.equal(exported[name], down_HX), name


@fails_with(Edit(STATE, "if not stepped:", f"if not stepped or {OF_EXPERTS}:"))
def test_a_resumed_run_has_the_moments_of_its_experts(tmp_path: Path) -> None:
    """After a resume under ZeRO, the experts' Adam moments are stale or start from zero.

    Reported: deepspeedai/DeepSpeed#8147
    """
    zero = f"parallel.deepspeed={ds_config('zero1_fp32')}"
    common = ["name=a", "train.steps=4", "checkpoint={every: 2, keep: 2}", "evaluation.batches=0", zero]
    whole = run(tmp_path / "whole", *common, "optimizer.lr=0.01")
    resume = f"checkpoint.resume={tmp_path}/whole/a/checkpoints/step_00000002"
    rest = run(tmp_path / "rest", *common, "optimizer.lr=0.01", resume)
    assert without_times(rest) == without_times(whole[2:])


@fails_with(Edit("megamoe.data.batches", "= start_sample + number * stride", "= number * stride"))
def test_a_resumed_run_repeats_and_skips_no_sample() -> None:
    """The resumed data loader begins again at the first sample, or skips what it had read ahead.

    Reported: huggingface/accelerate#2016, modelscope/ms-swift#10050, verl-project/verl#7401
    """
    first = [batch.sample_index_B.tolist() for batch in take(stream(), 3)]
    rest = [batch.sample_index_B.tolist() for batch in take(stream(start=6), 2)]
    assert [number for batch in first + rest for number in batch] == list(range(10))


@fails_with(Edit("megamoe.validation.run", 'getattr(options, "k", None) == 1 and', "False and"))
def test_renormalised_weights_at_k_1_are_refused() -> None:
    """With one expert per token and renormalised weights, the router gets no gradient from the loss.

    Reported: jingyaogong/minimind#858
    """
    refused = False
    try:
        check_on(tiny("moe.router.selector={name: top_k, k: 1, weights: renormalised}"), 1)
    except UserError as error:
        refused = "the router would get no gradient" in str(error)
    assert refused
