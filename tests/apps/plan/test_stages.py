"""Plans of pipeline stages: from the figures of each stage to memory and the time of a step."""

import pytest

from megamoe.apps.plan.figures import BACKWARD_VOCABULARY, FORWARD_VOCABULARY, Figures
from megamoe.apps.plan.memory import ACTIVATIONS, PARAMETERS
from megamoe.apps.plan.stages import plan_stages
from megamoe.config import RunConfig
from megamoe.parallel.pipeline.schedule import Pass
from tests.support.tiny import tiny

KEPT, WEIGHTS = 100.0, 1000.0  # bytes of a block
FORWARD, BACKWARD = 1.0, 2.0  # seconds of a block


def stage_figures(config: RunConfig, stage: int, words_s: float = 0.0) -> Figures:
    """Figures of three simulated micro batches, of which a stage holds two, and the last stage one."""
    counts = config.parallel.blocks_per_stage
    assert counts is not None
    blocks, is_last = counts[stage], stage == len(counts) - 1
    outer = words_s if stage == 0 or is_last else 0.0
    held = KEPT * blocks * (1 if is_last else 2)
    return Figures(
        numbers={
            "parameters": blocks,
            "tokens": 6,
            "model_flops": 3 * blocks,
            "backward_seconds": 0,
            "overlapped": 0,
            "forward": FORWARD * blocks + outer,
            "backward": BACKWARD * blocks + 2 * outer,
            FORWARD_VOCABULARY: outer,
            BACKWARD_VOCABULARY: 2 * outer,
            "kept": KEPT * blocks,
            "sent": 0,
        },
        states={PARAMETERS: WEIGHTS * blocks},
        seconds={"all": 8 * (FORWARD * blocks + BACKWARD * blocks + 3 * outer) + 5},
        calls={},
        bytes={},
        peaks={("forward", ACTIVATIONS): held, ("forward", PARAMETERS): WEIGHTS * blocks},
        kept={},
    )


def config_of(*overrides: str) -> RunConfig:
    return tiny("model.num_layers=8", "moe.layers={every: 1}", "model.tie_embeddings=false", *overrides)


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_equal_stages_wait_as_the_formula_says(stages: int, chunks: int) -> None:
    config = config_of(
        f"parallel.pipeline={stages}",
        f"parallel.pipeline_chunks={chunks}",
        f"parallel.blocks_per_stage={[8 // (stages * chunks)] * stages * chunks}",
    )
    found = plan_stages(config, 64, lambda figures: 0.0, 8, False, stage_figures)
    of_stage = (FORWARD + BACKWARD) * 8 / stages
    assert found.timeline.idle == pytest.approx((stages - 1) / (chunks * 8 + stages - 1))
    assert found.timeline.total == pytest.approx(of_stage * (8 + (stages - 1) / chunks))
    assert found.once == pytest.approx(5)
    assert found.step_seconds == found.timeline.total + found.once


def test_a_stage_holds_the_micro_batches_that_are_alive() -> None:
    """1F1B: as many as there are stages from it to the end, each with the activations of its blocks."""
    config = config_of("parallel.pipeline=4", "parallel.blocks_per_stage=[1, 2, 4, 1]")
    found = plan_stages(config, 64, lambda figures: 0.0, 8, False, stage_figures)
    assert [stage.alive for stage in found.stages] == [4, 3, 2, 1]
    held = [stage.figures.peaks["forward", ACTIVATIONS] for stage in found.stages]
    assert held == [4 * 1 * KEPT, 3 * 2 * KEPT, 2 * 4 * KEPT, 1 * 1 * KEPT]
    assert found.fullest.number == 2
    assert found.fullest.figures.peak_bytes == 8 * KEPT + 4 * WEIGHTS


def test_the_embedding_and_the_loss_are_of_the_outer_chunks() -> None:
    config = config_of(
        "parallel.pipeline=2", "parallel.pipeline_chunks=2", "parallel.blocks_per_stage=[1, 3, 3, 1]"
    )

    def simulated(smaller: RunConfig, stage: int) -> Figures:
        return stage_figures(smaller, stage, words_s=0.5)

    first, last = plan_stages(config, 64, lambda figures: 0.0, 4, False, simulated).stages
    assert [first.seconds(Pass(True, 0, chunk), True, False) for chunk in (0, 1)] == [1.5, 3.0]
    assert [last.seconds(Pass(False, 0, chunk), False, True) for chunk in (0, 1)] == [6.0, 3.0]
