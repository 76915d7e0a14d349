"""`megamoe verify` notices planted faults of layouts, and names a tensor or a metric."""

from pathlib import Path
from typing import Any

import pytest

from megamoe.apps.verify.command import WITHOUT_DATA
from megamoe.apps.verify.layouts import variants_of
from megamoe.apps.verify.session import Session
from megamoe.apps.verify.small import shrunk
from megamoe.config import load_config
from tests.conformance import test_attention, test_parallel, test_ranks, test_routing, test_state
from tests.conformance.planting import Edit, edits_of, with_edits
from tests.planted_faults import FAULTS
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import ROOT

# Most of what the faults concern; in one run, since each fault costs three.
RUN = (
    "data.document_aware=true",
    "model.attention={sinks: true, query_key_norm: head, window: 6}",
    "model.multi_token_prediction={depth: 2}",
    "moe.num_shared_experts=1",
    "moe.shared_expert_mode=gated",
    "moe.expert_bias=true",
    "moe.router.scorer.jitter=0.1",
    "moe.router.score_function={name: sigmoid, bias_update: 0.01}",
    "optimizer.grad_clip=0.1",
    "optimizer.ema=0.5",
)
EP, CP, ETP, PP, TP, ZERO_1 = (
    f"2 ranks, {size}" for size in ("EP 2", "CP 2", "ETP 2", "PP 2", "TP 2", "ZeRO 1")
)
SP = "4 ranks, TP 2, SP"
RECOMPUTED = "model.recompute=full"
# By fault, or by the test of a reported defect: a part of the layout's line, and overrides of the run.
NOTICED: dict[str, tuple[str, ...]] = {
    "tensor-sync": (TP,),
    "draws": (EP,),
    "aux-scale": (TP,),
    "token-count": (ZERO_1,),
    "expert-slices": (ETP,),
    "by-node-forward": ("by_node",),
    "by-node-backward": ("by_node",),
    "muon-slices": (ZERO_1, "optimizer.name=muon"),
    "muon-momentum": (ZERO_1, "optimizer.name=muon"),
    "ema-restored": (ZERO_1,),
    "resume-position": (ZERO_1,),
    "clipping": (EP,),
    "routing-metrics": (EP,),
    "stage-context": ("model.recompute", "parallel.pipeline=2", RECOMPUTED),
    "tied-stages": (PP,),
    "stages-norm": (PP,),
    "turn-recomputed": ("in_flight 2", "parallel.expert=2", "train.in_flight=2", RECOMPUTED),
    "test_sinks_reach_attention_under_context_parallelism": (CP,),
    "test_a_window_remains_under_context_parallelism": (CP,),
    "test_documents_remain_apart_under_context_parallelism": (CP,),
    "test_the_sinks_of_every_head_count_in_the_norm": (TP,),
    "test_a_replicated_weight_counts_once_in_the_norm": (TP,),
    "test_the_experts_of_every_tensor_parallel_rank_count_in_the_norm": ("8 ranks",),  # EP and TP at ZeRO 0
    "test_the_gradients_of_head_norms_are_summed_without_sequence_parallelism": (TP,),
    "test_the_gradients_of_norms_are_summed_under_sequence_parallelism": (SP,),
    "test_the_gradient_of_a_shared_experts_gate_is_summed": (TP,),
    "test_a_gather_of_what_all_ranks_compute_alike_does_not_sum_gradients": (TP,),
    "test_the_loss_of_tokens_trains_the_router_under_expert_parallelism": (EP,),
    "test_the_bias_balances_the_tokens_of_all_ranks": (ZERO_1,),
    "test_gradients_of_different_slices_of_an_expert_do_not_mix": (ETP,),
    "test_the_slices_of_an_expert_add_its_bias_once": (ETP,),
    "test_context_parallelism_does_not_scale_a_loss": (CP,),
    "test_a_token_weighs_the_same_in_every_part_of_a_sequence": (CP,),
    "test_multi_token_losses_are_means_over_the_tokens_of_all_ranks": (ZERO_1,),
    "test_multi_token_inputs_are_shifted_before_they_are_cut": (CP,),
    "test_the_copy_of_an_untied_embedding_gets_both_gradients": (PP, "model.tie_embeddings=false"),
    "test_an_experts_gradient_does_not_depend_on_expert_parallelism": (EP,),
    "test_every_rank_clips_by_one_norm": (EP,),
    "test_a_checkpoint_has_the_experts_of_every_rank": (EP,),
    "test_a_resumed_run_has_the_moments_of_its_experts": (ZERO_1,),
    "test_a_resumed_run_has_its_biases": (ZERO_1,),
}
# Those that end the run, and words of the reason.
ENDED = {
    "turn-recomputed": "Recomputed values",
    "test_a_checkpoint_has_the_experts_of_every_rank": "does not make a checkpoint",
}
DEFECTS = {
    name: test
    for module in (test_attention, test_parallel, test_ranks, test_routing, test_state)
    for name, test in vars(module).items()
    if name in NOTICED
}


class PlantedPool(Pool):
    """Ranks with a fault."""

    edits: tuple[Edit, ...] = ()

    def run(self, function: Any, *arguments: Any, **options: Any) -> list[Any]:
        """See `Pool`."""
        return super().run(with_edits, self.edits, function, arguments, **options)


@pytest.mark.full
@pytest.mark.parametrize("name", NOTICED)
def test_a_fault_of_layouts_is_noticed(tmp_path: Path, name: str) -> None:
    only, *overrides = NOTICED[name]
    config = load_config(ROOT / "examples" / "demo.yaml", [*WITHOUT_DATA, *RUN, *overrides])
    tree, _ = shrunk(config)
    variant = next(each for each in variants_of(config, tree) if only in str(each))
    pool = PlantedPool()
    if name in DEFECTS:
        pool.edits = edits_of(DEFECTS[name])
    else:
        [fault] = [fault for fault in FAULTS if fault.name == name]
        pool.edits = (Edit(fault.file.removesuffix(".py").replace("/", "."), fault.before, fault.after),)
    wrong, _, problem = Session(tree, tmp_path, pool, most_tries=0).compare(variant)
    assert ENDED[name] in problem if name in ENDED else wrong, problem
