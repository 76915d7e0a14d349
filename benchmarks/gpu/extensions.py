"""Section `transformer_engine`: its layers beside PyTorch's, in bf16 and in FP8."""

from gpu.findings import Machine, Section, Skip
from gpu.parity import BF16_TOLERANCE, CONFIG, MODEL, largest_error
from gpu.ranks import Failed, train
from megamoe.model.backends import find_transformer_engine

FP8_TOLERANCE = 0.1
FP8_SIZES = ("model.hidden_size=128", "moe.expert_ffn_hidden_size=128", "model.ffn_hidden_size=128")
BF16 = ("parallel.precision=bf16", "parallel.deepspeed=ds_configs/zero1_bf16.json")


def run(machine: Machine, section: Section) -> None:
    """Require the losses of PyTorch's layers, within the error of bf16 and FP8."""
    if machine.device == "cpu":
        raise Skip("needs CUDA")
    problem = find_transformer_engine().problem
    if problem:
        raise Skip(problem)
    model = [*MODEL, *FP8_SIZES, *BF16]
    reference = train(machine, 1, CONFIG, [*model, "model.backend=torch"])
    for name, tolerance, settings in (
        ("bf16", BF16_TOLERANCE, []),
        *((f"FP8, {recipe}", FP8_TOLERANCE, [f"model.fp8={recipe}"]) for recipe in ("delayed", "tensorwise")),
    ):
        try:
            found = train(machine, 1, CONFIG, [*model, "model.backend=transformer_engine", *settings])
        except Failed as error:
            section.add(name, str(error), holds=False)
            continue
        error_found = largest_error(reference, found)
        section.add(
            name, error_found, holds=error_found <= tolerance, note=f"at most {tolerance:g}, relative"
        )
