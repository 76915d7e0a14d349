"""The largest attention logits against loops, and QK-Clip: a head's largest logit becomes the limit."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megamoe.kernels.attention.documents import Documents
from megamoe.kernels.attention.variants import CHUNK, largest_scores
from megamoe.model.attention.qk_clip import clipping
from megamoe.train.loop import train
from tests.support.tiny import restored_process, tiny, tiny_gpt

S, B, N, G, D = 7, 2, 4, 2, 3
LATENT = {"key_value_rank": 6, "nope_size": 4, "rope_size": 2, "value_size": 4}
SYSTEMS = {
    "own keys": ("model.attention.input_bias=true",),
    "shared keys": ("model.num_query_groups=2", "model.position=learned"),
    "latent": tuple(f"model.latent.{key}={value}" for key, value in LATENT.items()),
    "latent queries": tuple(f"model.latent.{k}={v}" for k, v in {**LATENT, "query_rank": 5}.items()),
}
# One block, whose input no other attention changes; the same batch twice, and nothing moves but by QK-Clip.
STILL = (
    *("model.num_layers=1", "model.num_attention_heads=4", "model.init_std=0.4", "data.sequence_length=8"),
    *("optimizer.lr=1e-12", "optimizer.weight_decay=0", "train.global_batch_size=4", "train.steps=2"),
)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_largest_scores_are_those_of_loops(packed: bool, window: int | None) -> None:
    torch.manual_seed(1)
    query, key = torch.randn(S, B, N, D), torch.randn(S, B, G, D)
    start = torch.tensor([[0, 0, 0, 3, 3, 3, 3], [0, 0, 0, 0, 0, 5, 5]]) if packed else torch.zeros(B, S)
    documents = Documents.of(start.long()) if packed else None
    expected = torch.full((N,), -math.inf)
    for b in range(B):
        for head in range(N):
            for i in range(S):
                first = max(int(start[b, i]), 0 if window is None else i - window + 1)
                for j in range(first, i + 1):
                    logit = 0.5 * (query[i, b, head] @ key[j, b, head // (N // G)])
                    expected[head] = max(expected[head], logit)
    torch.testing.assert_close(largest_scores(query, key, 0.5, documents, window), expected)


def test_a_long_sequence_is_measured_in_chunks() -> None:
    """The largest logit is that of the last query, in another chunk than the first."""
    query, key = torch.zeros(CHUNK + 5, 1, 1, 1), torch.ones(CHUNK + 5, 1, 1, 1)
    query[-1], key[0] = 2.0, 3.0
    assert largest_scores(query, key, None).tolist() == [6.0]


def attention_of(system: str) -> Any:
    torch.manual_seed(1)
    return tiny_gpt(tiny(*SYSTEMS[system], *STILL)).model.decoder.layers[0].self_attention


def factors_by_hand(system: str, c: list[float]) -> dict[str, Tensor]:
    """The rows' factors of each weight that changes; 16 columns are 4 heads of 4."""
    root = [math.sqrt(each) for each in c]
    if system == "own keys":
        rows = [[root[h]] * 8 + [1.0] * 4 for h in range(4)]
        return dict.fromkeys(("linear_qkv.weight", "linear_qkv.bias"), torch.tensor(rows).flatten())
    if system == "shared keys":
        rows = [[c[h]] * 4 + [c[h + 1]] * 4 + [1.0] * 8 for h in (0, 2)]
        return {"linear_qkv.weight": torch.tensor(rows).flatten()}
    queries = "linear_q_up_proj.weight" if system == "latent queries" else "linear_q_proj.weight"
    return {
        queries: torch.tensor([[root[h]] * 4 + [c[h]] * 2 for h in range(4)]).flatten(),
        "linear_kv_up_proj.weight": torch.tensor([[root[h]] * 4 + [1.0] * 4 for h in range(4)]).flatten(),
    }


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_rows_of_each_weight(one_rank: None, system: str) -> None:
    attention, c = attention_of(system), [0.25, 1.0, 0.5, 0.81]
    nn.init.ones_(attention.linear_qkv.bias) if system == "own keys" else None
    names = {id(parameter): name for name, parameter in attention.named_parameters()}
    expected = factors_by_hand(system, c)
    found = {names[id(p)]: (p, scale(p.detach())) for p, scale in clipping(attention, torch.tensor(c))}
    assert found.keys() == expected.keys()
    for name, (parameter, scaled) in found.items():
        rows = expected[name].view(-1, *[1] * (parameter.dim() - 1))
        torch.testing.assert_close(scaled, parameter.detach() * rows)


def trained(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    with restored_process():
        train(tiny(*STILL, f"output={folder}", *overrides))
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def repeating(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step gets the batch of the first one."""
    from megamoe.train.trainer import Trainer

    take, kept = Trainer._take, list[Any]()

    def same(self: Trainer, stream: Any, count: int) -> list[Any]:
        if not kept:
            kept.extend(take(self, stream, count))
        return list(kept)

    monkeypatch.setattr(Trainer, "_take", same)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_the_largest_logit_becomes_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, name: str
) -> None:
    repeating(monkeypatch)
    common = (*SYSTEMS[system], f"optimizer.name={name}", "evaluation.batches=0")
    key = "attention/layer_01/largest_logit"
    (plain, _) = (row[key] for row in trained(tmp_path / "plain", *common, "log.attention_logits_every=1"))
    limit = sorted(plain)[1] * 1.01  # two heads of four are above
    first, second = trained(tmp_path / "clipped", *common, f"optimizer.qk_clip={limit!r}")
    assert first[key] == plain and first["attention/clipped_heads"] == 2
    assert first["attention/largest_logit"] == max(plain)
    assert second[key] == pytest.approx([min(logit, limit) for logit in plain], rel=1e-5)


def test_only_the_steps_that_are_due_are_measured(tmp_path: Path) -> None:
    rows = trained(tmp_path, "train.steps=5", "log.attention_logits_every=2", "evaluation.every=1")
    assert [row["step"] for row in rows if "attention/largest_logit" in row] == [2, 4]
    assert not any("attention/clipped_heads" in row for row in rows)
