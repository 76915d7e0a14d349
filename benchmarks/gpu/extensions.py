"""Section `transformer_engine`: its layers beside PyTorch's, in bf16 and in FP8."""

import statistics

from gpu import training
from gpu.findings import Machine, Section, Skip
from gpu.parity import BF16_TOLERANCE, CONFIG, MODEL, largest_error
from gpu.ranks import Failed, on_ranks, train
from megamoe.compat.transformer_engine_compat import FP8_ABILITY, fp8_ability
from megamoe.model.backends import find_transformer_engine

FP8_TOLERANCE = 0.1
FP8_SIZES = ("model.hidden_size=128", "moe.expert_ffn_hidden_size=128", "model.ffn_hidden_size=128")
BF16 = ("parallel.precision=bf16", "parallel.deepspeed=ds_configs/zero1_bf16.json")
TIMEOUT_S = 90.0


def run(machine: Machine, section: Section) -> None:
    """Require the losses of PyTorch's layers, within the error of bf16 and FP8; report the speed of each."""
    if machine.device == "cpu":
        raise Skip("needs CUDA")
    problem = find_transformer_engine().problem
    if problem:
        raise Skip(problem)
    settings = {"bf16": ["model.backend=transformer_engine"]}
    for scaling in FP8_ABILITY:
        able, reason = fp8_ability(scaling)
        if able:
            settings[f"FP8, {scaling}"] = [*settings["bf16"], f"model.fp8={scaling}"]
        else:
            section.add(f"FP8, {scaling}", reason, note="this device cannot")
    _losses(machine, section, settings)
    _speed(machine, section, {"PyTorch's layers": ["model.backend=torch"], **settings})


def _losses(machine: Machine, section: Section, settings: dict[str, list[str]]) -> None:
    """Require the losses and gradient norms of PyTorch's layers, on a small model."""
    model = [*MODEL, *FP8_SIZES, *BF16]
    reference = train(machine, 1, CONFIG, [*model, "model.backend=torch"])
    for name, overrides in settings.items():
        tolerance = BF16_TOLERANCE if name == "bf16" else FP8_TOLERANCE
        try:
            found = train(machine, 1, CONFIG, [*model, *overrides], machine.limit(TIMEOUT_S))
        except Failed as error:
            section.add(name, str(error), holds=False)
            continue
        error_found = largest_error(reference, found)
        section.add(
            name, error_found, holds=error_found <= tolerance, note=f"at most {tolerance:g}, relative"
        )


def _speed(machine: Machine, section: Section, settings: dict[str, list[str]]) -> None:
    """Report the time of a step of the model of section `training`; the loss must fall."""
    common = ["parallel.expert=1", *training.settings_on(machine, "tuned")]
    for name, overrides in settings.items():
        of_run = [*common, *(training.SMALL if machine.quick else ()), *overrides]
        try:
            given = {"overrides": of_run, "trace": False}
            found = on_ranks(machine, 1, "training", given, machine.limit(TIMEOUT_S))
        except Failed as error:
            section.add(f"{name}: step", str(error), holds=False)
            continue
        seconds, losses = statistics.median(found["seconds"]), found["losses"]
        note = f"{found['tokens'] / seconds:,.0f} tokens/s, {found['peak_bytes'] / 1e9:.1f} GB at most"
        section.add(f"{name}: step", 1e3 * seconds, "ms", losses[-1] < losses[0], note)
