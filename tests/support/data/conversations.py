"""Small conversations for the tests: a tokenizer that reserves the marks of the templates, and its folder for
transformers.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megamoe.apps.chat.prepare import ChatCard, ChatPreparation, prepare_chat
from megamoe.apps.prepare.new_tokenizers import train_bpe

MARKS = (
    *("<|begin_of_text|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|user|>", "<|assistant|>", "<|system|>"),
)


def conversation(number: int, turns: int = 2, system: bool = False, tool: bool = False) -> dict[str, Any]:
    """A conversation whose texts depend on the number; the answers have different lengths."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be short."}] if system else []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"What is {number} and {turn}? 🙂"})
        if tool and turn == 0:
            call = {"type": "function", "function": {"name": "add", "arguments": {"a": number, "b": turn}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": str(number + turn)})
        messages.append({"role": "assistant", "content": f"It is {number + turn}. " * (1 + number % 3) + "é"})
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    return {"messages": messages, **({"tools": tools} if tool else {})}


def conversations(count: int = 24, tools: bool = False) -> list[dict[str, Any]]:
    return [
        conversation(number, 1 + number % 3, number % 2 == 0, tools and number % 4 == 1)
        for number in range(count)
    ]


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def make_tokenizer(folder: Path) -> Path:
    """Train a small BPE with the marks; return its tokenizer.json."""
    path = folder / "tokenizer.json"
    texts = [message["content"] for each in conversations() for message in each["messages"]]
    train_bpe(texts, 300, path, MARKS)
    return path


def make_folder(folder: Path, template: str | None = None) -> Path:
    """Write the same tokenizer as a Hugging Face folder, with a chat template."""
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_file(str(make_tokenizer(folder)))
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", bos_token="<|begin_of_text|>"
    )
    made.chat_template = template
    output = folder / "hf"
    made.save_pretrained(str(output))
    return output


def make_chat(
    folder: Path, records: list[dict[str, Any]], tokenizer: Path, name: str = "train", **options: Any
) -> ChatCard:
    """Prepare conversations as `folder/NAME`."""
    lines = write_lines(folder / f"{name}.jsonl", records)
    return prepare_chat(ChatPreparation(str(folder / name), [str(lines)], str(tokenizer), **options))
