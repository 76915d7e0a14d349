"""Small random models of transformers, of each class that can be converted, in folders as it saves them."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

WORDS = 48
TEXT = "The river runs to the sea, and the sea runs to no one. " * 20
LENGTH = 64
SHAPE: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2 * LENGTH,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
OTHER = {
    **SHAPE,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
}
CONFIGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    kind: (each["class"], {**SHAPE, **each["first"]}, {**OTHER, **each["second"]})
    for kind, each in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}


def both_of(kinds: Iterable[str]) -> list[Any]:
    """Return (kind, number) of both configurations as parameters; the second is a full test."""
    return [
        pytest.param(kind, number, id=f"{kind}-{number}", marks=[pytest.mark.full] if number else [])
        for kind in kinds
        for number in (0, 1)
    ]


def make(kind: str, folder: Path, number: int = 0, **changes: Any) -> Any:
    """Save a random model of a class as transformers does; return it. number: which configuration."""
    import transformers  # here: its import takes two seconds

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    name, *configs = CONFIGS[kind]
    kwargs = configs[number] | changes
    shard = kwargs.pop("max_shard_size", "5GB")
    config = getattr(transformers, name)(**kwargs)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model)
    model.save_pretrained(folder, max_shard_size=shard)
    if kind != config.model_type:
        change_config(folder, model_type=kind)  # another name for a class
    return model


@torch.no_grad()
def randomise(model: Any) -> None:
    """Give every weight a value that a mistake would show: norms and biases too."""
    generator = torch.Generator().manual_seed(5)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        if "inv_freq" in name or not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("norm.weight"):
            tensor.copy_(1 + 0.3 * noise)
        else:
            tensor.copy_(noise * (0.2 if tensor.dim() > 1 else 0.3))


def change_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json."""
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes, indent=2) + "\n")


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Replace the tensors."""
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def tokens(count: int = 3, length: int = LENGTH) -> Tensor:
    """Random words, int64 [count, length]."""
    return torch.randint(WORDS, (count, length), generator=torch.Generator().manual_seed(3))


def with_tokenizer(folder: Path) -> None:
    """A tokenizer of 48 words at most, as transformers saves one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = sorted(set(re.findall(r"\w+|[^\w\s]", TEXT)))
    backend = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(["<eos>", "<unk>", *words])}, "<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")
    tokenizer.save_pretrained(folder)
