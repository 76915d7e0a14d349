"""tools/generate.py: what it writes."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megamoe.train.trainer import Trainer
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import small_run
from tests.support.tiny import tool


def trained_and_asked(folder: Path) -> tuple[int, str]:
    """Job: a run, and the tool on two prompts of it."""
    trainer = Trainer(small_run(folder, data__tokenizer="bytes", model__vocab_size=None))
    trainer.step()
    trainer.save()
    trainer.close()
    (folder / "prompts.txt").write_bytes("\ufeffone <b>\r\n\nanother\n".encode())
    options = ["--max-tokens=3", "--temperature=0", "--show-experts", f"--json={folder / 'out.json'}"]
    with redirect_stdout(StringIO()) as shown:
        files = [str(folder / "small"), f"--file={folder / 'prompts.txt'}"]
        code: int = tool("generate").main([*files, *options])
    return code, shown.getvalue()


@pytest.mark.full
def test_what_it_writes(pool: Pool, tmp_path: Path) -> None:
    ((code, shown),) = pool.run(trained_and_asked, tmp_path, ranks=1)
    assert code == 0
    rows: list[dict[str, Any]] = json.loads((tmp_path / "out.json").read_text())
    assert [row["prompt"] for row in rows] == ["one <b>", "another"]
    for row in rows:
        assert row["prompt_tokens"] == list(row["prompt"].encode())
        assert len(row["experts"]) == len(row["prompt_tokens"]) + len(row["tokens"])
        assert all(len(token["2"]) == 2 for token in row["experts"])
        assert row["reason"] == (
            "length" if len(row["tokens"]) == 3 and row["tokens"][-1] else "end_of_document"
        )
    assert shown.count("  layer 2: ") == sum(len(row["experts"]) for row in rows)


def asked_in_a_chat(folder: Path) -> tuple[int, str, Any]:
    """Job: a run on bytes, whose tool answers two lines and a prompt; the draws are the likeliest tokens."""
    from megamoe.apps.evaluation.trained_model import session
    from megamoe.apps.generation.chat import chat_of
    from megamoe.apps.generation.generate import generate
    from megamoe.apps.generation.sampling import Sampling

    trainer = Trainer(small_run(folder, data__tokenizer="bytes", model__vocab_size=None))
    trainer.step()
    trainer.save()
    trainer.close()
    common = [str(folder / "small"), "--chat", "--template=plain", "--max-tokens=4", "--temperature=0"]
    said = StringIO("one\n\n<|endoftext|>\ntwo\n")
    with redirect_stdout(StringIO()) as shown, mock.patch("sys.stdin", said):
        code: int = tool("generate").main(common)
    outputs = ["--prompt=one", "--system=s", f"--json={folder / 'out.json'}"]
    with redirect_stdout(StringIO()):
        code += tool("generate").main([*common, *outputs])
    with session() as ranks:
        trained = ranks.open(folder / "small")
        chat = chat_of(trained, "plain", None)
        prompt = chat.prompt(chat.ask("one"), 4)
        (free,) = generate(trained, [prompt], Sampling(4, 0.0))
        (ended,) = generate(trained, [prompt], Sampling(4, 0.0, stop_tokens=(free.tokens[1],)))
    return code, shown.getvalue(), (bytes(prompt).decode(), free, ended)


@pytest.mark.full
def test_answers_in_a_chat(pool: Pool, tmp_path: Path) -> None:
    ((code, shown, (prompt, free, ended)),) = pool.run(asked_in_a_chat, tmp_path, ranks=1)
    assert code == 0
    first, error, second = [line for line in shown.splitlines() if line.startswith("> ")]
    assert first == f"> {free.text.strip()}" and second.startswith("> ")
    assert "spells the special token <|endoftext|>" in error
    assert prompt == "User:\none\nAssistant:\n"
    (row,) = json.loads((tmp_path / "out.json").read_text())
    assert bytes(row["prompt_tokens"]).decode() == "System:\ns\nUser:\none\nAssistant:\n"
    place = free.tokens.index(free.tokens[1])
    assert ended.tokens == free.tokens[: place + 1] and ended.reason == "end_of_turn"
