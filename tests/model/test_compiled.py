"""The model by the compiled kernels against PyTorch's operators: the same losses and gradients."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.cpu_kernels.library import CompiledLibrary
from megamoe.kernels.attention.documents import Documents
from megamoe.kernels.library import find_library
from megamoe.model.attention.core import SplittingSelfAttention
from megamoe.model.build import use_one_stream
from tests.support.tiny import VOCABULARY, tiny, tiny_gpt

S = 8
TOKENS = torch.arange(2 * S).view(2, S) * 5 % VOCABULARY
POSITIONS = torch.arange(S).expand(2, S)
DOCUMENTS = Documents.of(torch.tensor([[0, 0, 0, 3, 3, 3, 3, 3], [0, 0, 0, 0, 0, 5, 5, 5]]))
FOUR_HEADS = "model.num_attention_heads=4"
CASES = {
    "plain": [],
    "learned positions": ["model.position=learned", "model.bias=true"],
    "two key heads": [FOUR_HEADS, "model.num_query_groups=2"],
    "one key head": [FOUR_HEADS, "model.num_query_groups=1"],
    "dropout": ["model.attention_dropout=0.3", "moe.expert_activation_dropout=0.2"],
    "gelu": ["model.activation=gelu"],
    "geglu experts": ["moe.expert_activation=geglu"],
}
# By what is recomputed: how often attention and experts are called in two blocks.
CALLS = {"none": (2, 2), "selective": (2, 4), "full": (4, 4)}
# Documents and recomputation: each choice with the plain model, two that differ in both with the others.
CHOICES = [("plain", documents, recompute) for documents in (False, True) for recompute in CALLS]
CHOICES += [
    (case, *choice) for case in CASES if case != "plain" for choice in ((False, "full"), (True, "selective"))
]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each compiled function is called."""
    library, problem = find_library()
    if library is None or library.sgemm is None:
        pytest.skip(f"no compiled kernels: {problem}")
    count: Counter[str] = Counter()
    run = CompiledLibrary.run

    def counting(self: CompiledLibrary, name: str, *arguments: Any) -> None:
        count[name.removesuffix("_fp32").removesuffix("_bf16")] += 1
        run(self, name, *arguments)

    monkeypatch.setattr(CompiledLibrary, "run", counting)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a key head for each
    yield count
    torch.set_num_threads(threads)


def losses_and_gradients(
    changes: list[str], documents: Documents | None, compiled: bool
) -> dict[str, Tensor]:
    use_one_stream()
    torch.manual_seed(0)
    model = tiny_gpt(
        tiny("model.init_std=0.3", f"model.cpu_kernels={'auto' if compiled else 'plain'}", *changes)
    )
    torch.manual_seed(3)
    losses_BS = model(TOKENS, POSITIONS, TOKENS.roll(1), documents)
    losses_BS.sum().backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {"losses": losses_BS.detach(), **found}


@pytest.mark.parametrize(("case", "documents", "recompute"), CHOICES)
def test_same_gradients(
    case: str, documents: bool, recompute: str, one_rank: None, called: Counter[str]
) -> None:
    changes = [*CASES[case], f"model.recompute={recompute}"]
    packed = DOCUMENTS if documents else None
    ours = losses_and_gradients(changes, packed, True)
    attention, experts = CALLS[recompute]
    assert called["attention"] == (0 if case == "dropout" else attention)
    assert called["experts"] == (0 if case in ("dropout", "gelu", "geglu experts") else experts)
    called.clear()
    theirs = losses_and_gradients(changes, packed, False)
    assert not called and ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5 * (largest + 1e-3), msg=name)


def test_heads_are_split_without_a_copy_of_their_gradients(one_rank: None, called: Counter[str]) -> None:
    model = tiny_gpt(tiny("model.num_layers=1", "model.tie_embeddings=false"))
    (attention,) = (module for module in model.modules() if isinstance(module, SplittingSelfAttention))
    hidden_SBH = torch.randn(S, 2, 16, requires_grad=True)
    query, key, value = attention.get_query_key_value_tensors(hidden_SBH)
    assert query.grad_fn is key.grad_fn is value.grad_fn
    assert "_Split" in query.grad_fn.name()


def test_two_models_of_a_process_choose_their_kernels(one_rank: None, called: Counter[str]) -> None:
    """Router, norms, attention, experts and draws of the plain model never reach the library."""
    use_one_stream()
    changes = ["moe.router.scorer=noisy", "moe.num_shared_experts=1", "moe.router.capacity=per_expert"]
    plain, compiled = (
        tiny_gpt(tiny(f"model.cpu_kernels={name}", *changes)).train() for name in ("plain", "compiled")
    )
    for model in (compiled, plain, compiled):
        called.clear()
        model(TOKENS, POSITIONS, TOKENS.roll(1)).sum().backward()
        used = {
            "attention",
            "rms_norm",
            "top_k",
            "uniform",
            "experts",
            "experts_backward",
            "swiglu",
            "combine",
        }
        assert used <= called.keys() if model is compiled else not called
