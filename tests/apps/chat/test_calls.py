"""Conversations with tools: the forms of calls, and templates that leave calls or tools out."""

import json
from pathlib import Path
from typing import Any

import pytest

from megamoe.apps.chat.conversation import conversation_of
from megamoe.apps.chat.templates import GENERATION, ChatTemplate, load_template
from megamoe.data.tokenizers import load_tokenizer
from megamoe.errors import UserError
from tests.support.data.conversations import make_chat

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
# A template without tools: what an answer has beside its content is not written.
CONTENT = (
    "{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}CALLS\n{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
CALL = "{{ m.tool_calls[0].function.name if m.tool_calls }}"
WHOLE_CALL = CALL.replace(".name", "")
OR_CALL = "{{ m.tool_calls[0].function.name if m.content is none else m.content }}"
NULL = {"content": None}


def call_of(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize(
    ("template", "message", "expected"),
    [
        (CONTENT.replace("CALLS", ""), NULL, "does not write the call of clock in tool_calls"),
        (
            CONTENT.replace("CALLS", WHOLE_CALL),
            {"tool_calls": [call_of("clock", {})] * 2},
            "does not write the call of clock in tool_calls",
        ),
        (CONTENT.replace("CALLS", CALL), NULL, "does not write the tool clock of tools"),
        ("{{ tools }}" + CONTENT.replace("CALLS", CALL), NULL, ["clock", "noon"]),
        ("{{ tools }}" + CONTENT.replace("{{ m.content }}CALLS", OR_CALL), NULL, ["clock", "noon"]),
    ],
)
def test_calls_and_tools_that_a_template_leaves_out(
    template: str, message: dict[str, Any], expected: str | list[str], blocks: bool
) -> None:
    """A conversation is refused then; a null content is no text, also for a template that tests for it."""
    if not blocks:
        template = GENERATION.sub("", template).replace("{% endgeneration %}", "")
    record = {
        "messages": [
            {"role": "user", "content": "What does the clock say?"},
            {"role": "assistant", "tool_calls": [call_of("clock", {})], **message},
            {"role": "tool", "content": "12"},
            {"role": "assistant", "content": "noon"},
        ],
        "tools": [{"type": "function", "function": {"name": "clock"}}],
    }
    try:
        rendered = ChatTemplate("mine", template, {}).render(conversation_of(record))
    except UserError as error:
        assert isinstance(expected, str) and f"template mine: it {expected}" in str(error)
    else:
        assert [rendered.text[start:end].strip() for start, end in rendered.spans] == expected


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_arguments_in_json_are_written_as_the_object(name: str) -> None:
    """OpenAI's own form of `arguments` is a string."""
    template = load_template(name, load_tokenizer("bytes"))
    arguments = {"city": "Zürich", "days": [1, 2]}
    texts = set()
    for form in (arguments, json.dumps(arguments)):
        for call in (call_of("weather", form), call_of("weather", form)["function"]):
            asks, said = {**ANSWER, "content": None, "tool_calls": [call]}, {"role": "tool", "content": "sun"}
            texts.add(template.render(conversation_of({"messages": [USER, asks, said, ANSWER]})).text)
    (text,) = texts
    assert '{"name": "weather", "arguments": {"city": "Zürich"' in text


def test_arguments_that_are_nested_too_deeply_are_a_bad_line(tmp_path: Path) -> None:
    """Python's JSON reads 450 levels, and nothing else does; 5000 it does not read either."""
    with pytest.raises(UserError, match=r"the call of f are no JSON object: '\[\[\["):
        conversation_of({"messages": [USER, {**ANSWER, "tool_calls": [call_of("f", "[" * 5000)]}]})
    deep = json.loads('{"a": ' * 450 + "1" + "}" * 450)
    record = {"messages": [USER, {**ANSWER, "tool_calls": [call_of("f", deep)]}]}
    with pytest.raises(UserError, match="train.jsonl:1: .*nested too deeply"):
        make_chat(tmp_path, [record], Path("bytes"), template="chatml")
