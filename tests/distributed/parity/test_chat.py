"""Chat tuning equals a plain loop over transformers' `apply_chat_template`, on one rank and on four."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe.apps.chat.dataset import pack
from megamoe.apps.chat.named_templates import NAMED
from megamoe.apps.prepare.write import lengths_of
from megamoe.data.batches import Batch
from megamoe.data.card import DataFiles
from megamoe.train.micro_batch import micro_batch_of
from megamoe.train.step import model_inputs
from megamoe.train.trainer import Trainer
from tests.support.data.conversations import conversations, make_chat, make_folder
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import WORDS, Place, assert_as_alone, recorded_steps, small_run

TEMPLATES = ("chatml", "llama3", "zephyr")
STEPS = 2
CONVERSATIONS = 10
SEQUENCES = 4  # of an epoch, and of a step: a step's loss is that of all conversations
PLACES = [
    Place(4, tensor=2, expert=2, sequence=True),
    Place(4, expert=4, zero=3),
    Place(4, context=2, expert=2),
    Place(4, pipeline=2, expert=2),
]


def tuned(folder: Path, name: str, output: Path, **changes: Any) -> dict[str, Any]:
    """The changes of a run on the conversations of a template; its routers drop nothing and draw nothing."""
    return {
        "output": output,
        "model__vocab_size": None,
        "model__num_attention_heads": 4,
        "data__mock": False,
        "data__sources": [{"path": str(folder / name / "train")}],
        "data__split": [1, 0, 0],
        "data__sequence_length": size_of(folder / name / "train"),
        "moe__router": {"selector": {"name": "top_k", "k": 2}},
        "moe__losses": {"switch_balance": {"weight": 0.1, "scope": "sequence"}, "z_loss": 0.01},
        "train__objective": {"name": "chat"},
        "train__global_batch_size": SEQUENCES,
        **changes,
    }


def size_of(prefix: Path) -> int:
    """The shortest sequences of which so many hold all conversations; ranks can share their tokens."""
    length_N = lengths_of(DataFiles(prefix))
    sizes = range(-(-int(length_N.max()) // 8) * 8, 10_000, 8)
    return next(size for size in sizes if len(pack(length_N, size)) == SEQUENCES)


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations in three templates, and their tokenizers' folders."""
    folder = tmp_path_factory.mktemp("chat")
    for name in TEMPLATES:
        (folder / name).mkdir()
        records = conversations(CONVERSATIONS, tools=name != "zephyr")
        make_chat(folder / name, records, make_folder(folder / name, NAMED[name]))
    return folder


def run(runs: list[dict[str, Any]], steps: int, folders: list[str] | None = None) -> list[dict[str, Any]]:
    """Job: what the steps of each run show; folders: of the tokenizers, for `plain_loss` before them."""
    found = []
    of_runs: list[str | None] = [None] * len(runs) if folders is None else [*folders]
    for changes, folder in zip(runs, of_runs, strict=True):
        trainer = Trainer(small_run(**changes))
        shown: dict[str, Any] = {"epoch": trainer.run.objective.samples_per_epoch()}
        if folder is not None:
            shown["plain"] = plain_loss(trainer, folder)
        found.append({**shown, **recorded_steps(trainer, steps)})
        trainer.saver.checkpoints.close()
    return found


def plain_loss(trainer: Trainer, folder: str) -> float:
    """The loss by a loop over conversations, one at a time, as transformers renders and marks them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    total, count = 0.0, 0.0
    for record in conversations(CONVERSATIONS, tools="zephyr" not in folder):
        out = tokenizer.apply_chat_template(
            record["messages"], tools=record.get("tools"), return_dict=True, return_assistant_tokens_mask=True
        )
        ids_S, mask_S = (torch.tensor(out[key]) for key in ("input_ids", "assistant_masks"))
        place_S = torch.arange(len(ids_S) - 1)
        batch = Batch(
            tokens_BS=ids_S[None, :-1],
            labels_BS=ids_S[None, 1:],
            position_ids_BS=place_S[None],
            loss_mask_BS=mask_S[None, 1:].float(),
            document_start_BS=None,
            sample_index_B=torch.tensor([0]),
        )
        trainer.context.batch = micro_batch_of(batch, 0)
        inputs: Any = model_inputs(batch)
        with torch.no_grad():
            losses_S = trainer.model(**inputs)[0]
        total += float((losses_S.double() * batch.loss_mask_BS[0]).sum())
        count += float(batch.loss_mask_BS.sum())
    return total / count


@pytest.fixture(name="alone", scope="module")
def _alone(pool: Pool, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    output = tmp_path_factory.mktemp("alone")
    runs = [tuned(folder, name, output / name) for name in TEMPLATES]
    folders = [str(folder / name / "hf") for name in TEMPLATES]
    (found,) = pool.run(run, runs, STEPS, folders, ranks=1, timeout_s=300)
    return dict(zip(TEMPLATES, found, strict=True))


def test_the_loss_is_that_of_a_plain_loop(folder: Path, alone: dict[str, dict[str, Any]]) -> None:
    """And the one MoE layer routes each token of a conversation once, to 2 experts, and no padding."""
    for name, found in alone.items():
        tokens = int(lengths_of(DataFiles(folder / name / "train")).sum())
        assert [len(rows) for rows in found["chosen"]] == [2 * tokens] * STEPS
        assert found["epoch"] == SEQUENCES
        assert found["lm_loss"][0] == pytest.approx(found["plain"], rel=1e-6), name
        assert found["lm_loss"][1] < found["plain"], name


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_four_ranks_equal_one(pool: Pool, folder: Path, alone: Any, tmp_path: Path, place: Place) -> None:
    changes = place.changes(tmp_path)
    runs = [tuned(folder, name, **changes | {"output": tmp_path / name}) for name in TEMPLATES]
    by_rank = pool.run(run, runs, STEPS, ranks=place.ranks, timeout_s=300)
    for name, on_ranks in zip(TEMPLATES, zip(*by_rank, strict=True), strict=True):
        if place.context == place.pipeline == 1:
            assert_as_alone(on_ranks, alone[name], f"{name}: {place}")
        for word in WORDS:
            assert on_ranks[-1][word] == pytest.approx(alone[name][word], rel=1e-5), (name, word)


@pytest.mark.full
@pytest.mark.parametrize("place", [Place(4, pipeline=2, tensor=2), Place(4, pipeline=2, context=2)], ids=str)
def test_scores_go_from_stage_to_stage_without_the_padding(
    pool: Pool, folder: Path, tmp_path: Path, place: Place
) -> None:
    """The second stage's router adds the scores of the first one's, of the tokens that are no padding."""
    name = TEMPLATES[0]
    router = {"residual": "gating", "selector": {"name": "top_k", "k": 2}}
    chain = {"moe__layers": {"at": [1, 2]}, "moe__router": router}
    found = []
    for where in (Place(), place):
        changes = {**where.changes(tmp_path), **chain, "output": tmp_path / str(where.ranks)}
        by_rank = pool.run(run, [tuned(folder, name, **changes)], STEPS, ranks=where.ranks, timeout_s=300)
        found.append(by_rank[-1][0])
    for word in WORDS:
        assert found[1][word] == pytest.approx(found[0][word], rel=1e-5), word
