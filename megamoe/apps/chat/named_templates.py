"""Chat templates by name, in Jinja as transformers reads it. `generation` marks what an assistant says.

A `generation` block holds the text of an answer and the end of its turn, which a model must learn to write.

chatml: OpenAI's, as Qwen's models have it. llama3: Llama 3's, with the tools listed as in ChatML and without
its lines of dates. zephyr: Zephyr's, whose turns end with the end-of-document token; it has no tools. plain:
for a tokenizer that reserves nothing but the end of a document, such as that of `make demo`.
"""

from pathlib import Path

CALLS = "tool_calls"  # the file of the macros for tools
FILES = {"chatml": [CALLS, "chatml"], "llama3": [CALLS, "llama3"], "zephyr": ["zephyr"], "plain": ["plain"]}


FOLDER = Path(__file__).with_name("named")
NAMED = {
    name: "".join((FOLDER / f"{each}.jinja").read_text(encoding="utf-8") for each in files)
    for name, files in FILES.items()
}
