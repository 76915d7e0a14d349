"""Memory that a conversion between Hugging Face folders and checkpoints takes beside the libraries.

    python benchmarks/convert_memory.py [--layers 16] [--folder FOLDER]

Writes a Mixtral of random bfloat16 weights (16 blocks of 8 experts: 4.6 GB), imports and exports it, and
prints for both the seconds, and by how much the peak resident memory of this process grew, mapped files
included. --folder: where; default: the system's temporary folder, which needs three times the model's size.
"""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megamoe.compat.startup import configure_libraries

configure_libraries()

from common import resident  # noqa: E402
from common.command import parser_of, positive  # noqa: E402
from megamoe.apps.hf.export_run import export_run  # noqa: E402
from megamoe.apps.hf.families import FAMILIES  # noqa: E402
from megamoe.apps.hf.family import as_config  # noqa: E402
from megamoe.apps.hf.folder import CONFIG, WEIGHTS  # noqa: E402
from megamoe.apps.hf.import_folder import import_folder  # noqa: E402
from megamoe.apps.hf.tensor_files import Stored, TensorWriter  # noqa: E402

SHAPE = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "dtype": "bfloat16",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 2560,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
}


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=positive, default=16)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        place = Path(name)
        size = write_model(place / "hf", arguments.layers)
        print(f"model: {size / 1e9:.2f} GB; libraries: {resident.now() / 1e9:.2f} GB")
        measured("import", lambda: import_folder(place / "hf", place / "run", report=lambda line: None))
        measured("export", lambda: export_run(place / "run", place / "back", report=lambda line: None))


def write_model(folder: Path, layers: int) -> int:
    """Write the model, one block's file after the other; return the bytes of its tensors."""
    folder.mkdir()
    config = {**SHAPE, "num_hidden_layers": layers}
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    family = FAMILIES["mixtral"]
    groups = family.rules(as_config(family.read(config)), int(config["vocab_size"]))  # type: ignore[call-overload]
    places: dict[str, str] = {}
    total = 0
    for number, group in enumerate(groups):
        shapes = {name: shape for rule in group for name, shape in rule.source_shapes().items()}
        tensors = {name: Stored(torch.bfloat16, shape) for name, shape in shapes.items()}
        file = f"model-{number:05d}.safetensors"
        with TensorWriter(folder / file, tensors, {"format": "pt"}) as writer:
            for name, stored in tensors.items():
                writer.write(name, torch.randn(stored.shape).to(torch.bfloat16))
        places |= dict.fromkeys(tensors, file)
        total += sum(stored.num_bytes for stored in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index), encoding="utf-8")
    return total


def measured(name: str, work: Callable[[], None]) -> None:
    """Print the seconds and the growth of the peak of resident memory."""
    resident.forget_peak()
    before, start = resident.now(), time.perf_counter()
    work()
    seconds, grown = time.perf_counter() - start, resident.peak() - before
    print(f"{name}: {seconds:.0f} s, peak grew by {grown / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
