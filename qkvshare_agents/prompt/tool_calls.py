"""Tool calls and thoughts as text: found in what a model wrote, and rendered where a template can't.

Chat models write a call as text in a form they were trained on. Known here: Hermes 2 Pro and Qwen
(`<tool_call>` around JSON), Qwen3-Coder (`<tool_call>` around `<function=…>`), Llama 3.1 (bare JSON, perhaps
behind `<|python_tag|>`) and Mistral (`[TOOL_CALLS]`). Some markers are special tokens, so the caller decodes
with special tokens kept. Reading is all or nothing: a call that is only half understood is ordinary text.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG, MISTRAL_TAG = "<|python_tag|>", "[TOOL_CALLS]"
MARKERS = (OPEN, MISTRAL_TAG, PYTHON_TAG)  # a call begins behind one of them, or is bare
ALL_MARKERS = (*MARKERS, CLOSE, "[CALL_ID]", "[ARGS]")  # all that may be control tokens inside of a call

# Not strict: models put raw line breaks into strings of source code, where they can mean nothing else.
_DECODER = json.JSONDecoder(strict=False)
# The token that ends the turn is kept in the text like every special token.
_END_OF_TURN = re.compile(r"(?:<\|\w+\|>|</s>|<end_of_turn>)\Z")
_FUNCTION = re.compile(r"<function=([^>\s]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?((?:(?!<parameter=).)*?)\n?</parameter>\s*", re.DOTALL)
_MISTRAL_CALL = re.compile(r"\[TOOL_CALLS\]\s*([^\s\[\]{}]+)(?:\[CALL_ID\][^\s\[\]{}]*)?(?:\[ARGS\])?")


@dataclass(frozen=True)
class ToolCall:
    """One call: `arguments` is a JSON object as text, `id` ties the result to it."""

    id: str
    name: str
    arguments: str


def parse_tool_calls(text: str, names: Collection[str]) -> tuple[str, tuple[ToolCall, ...]]:
    """Find the tool calls in generated text.

    Returns (text beside the calls, stripped; the calls in order), or (`text`, ()) unchanged when there is no
    call or anything about one is malformed: bad JSON, a name outside `names`, arguments that are no object,
    a truncated call. Never raises for any text.
    """
    body = _END_OF_TURN.sub("", text.rstrip()).rstrip()
    for read in (_bare, _tagged, _mistral):
        with suppress(ValueError, RecursionError):  # not this form, or hostile nesting
            beside, calls = read(body, names)
            return beside, tuple(calls)
    return text, ()


def split_thought(text: str, opened: bool = False) -> tuple[str | None, str]:
    """Separate `<think>…</think>` at the beginning from the answer.

    `opened`: the prompt ended with `<think>`, so only `</think>` can occur. Returns (thought or None, the
    rest without leading newlines). A thought that was cut off leaves "", text without a thought is unchanged.
    """
    begins = text.lstrip()
    if begins.startswith("<think>"):
        begins = begins.removeprefix("<think>")
    elif not opened:
        return None, text
    thought, _, rest = begins.partition("</think>")
    return thought.strip() or None, rest.lstrip("\r\n")


def join_thought(thought: str | None, text: str) -> str:
    """What `split_thought` separates, in one text."""
    return f"<think>\n{thought}\n</think>\n\n{text}".rstrip("\n") if thought else text


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Instructions in the Hermes form, for a system message whose template knows no tools ("" without tools).

    The order of `tools` and of the keys is kept: models fill in arguments in the order in which they read
    them. Equal input gives equal text, which keeps the prompt's prefix equal.
    """
    if not tools:
        return ""
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You can call these tools. Each line is the JSON schema of one:\n<tools>\n{schemas}\n</tools>\n"
        "To call a tool, answer with its name and its arguments in this form, once for each call:\n"
        f'{OPEN}\n{{"name": "tool name", "arguments": {{"argument": "value"}}}}\n{CLOSE}\n'
        "The results come back inside <tool_response>. When no tool is needed, answer in plain text."
    )


def calls_text(calls: Sequence[ToolCall]) -> str:
    """`calls` as the Hermes form, which `parse_tool_calls` reads back."""
    form = f'{OPEN}\n{{"name": %s, "arguments": %s}}\n{CLOSE}'
    return "\n".join(form % (json.dumps(call.name), call.arguments or "{}") for call in calls)


def result_text(name: str, content: str) -> str:
    """A tool's result in the Hermes form; `content` can't close the tag early and pose as something else."""
    body = json.dumps({"name": name, "content": content}, ensure_ascii=False).replace("</tool", r"<\/tool")
    return f"<tool_response>\n{body}\n</tool_response>"  # `\/` is `/` in JSON


def _bare(text: str, names: Collection[str]) -> tuple[str, list[ToolCall]]:
    """Llama 3.1: the whole text is calls, perhaps behind a marker; `;` or whitespace between them."""
    before, body = "", text
    if not text.lstrip().startswith("{"):  # a marker further on would be part of an argument
        before, marker, body = text.partition(PYTHON_TAG)
        if not marker:
            raise ValueError("no bare call")
    body = body.strip("; \t\r\n")
    calls: list[ToolCall] = []
    position = 0
    while position < len(body) or not calls:
        value, position = _decode(body, position)
        calls.append(_call(value, names))
        if body.startswith(";", position):
            position += 1
    return before.strip(), calls


def _tagged(text: str, names: Collection[str]) -> tuple[str, list[ToolCall]]:
    """Hermes, Qwen, Qwen3-Coder. The JSON is decoded where it starts: its strings may hold a closing tag."""
    beside: list[str] = []
    calls: list[ToolCall] = []
    position = 0
    while (start := text.find(OPEN, position)) >= 0:
        beside.append(text[position:start].strip())
        inner = _skip(text, start + len(OPEN))
        value, position = (_xml if text.startswith("<function=", inner) else _decode)(text, inner)
        calls.append(_call(value, names))
        if text.startswith(CLOSE, position):
            position += len(CLOSE)
        elif position < len(text):  # small models forget the last closing tag, and only that is harmless
            raise ValueError("a call is not closed")
    if not calls:
        raise ValueError("no tagged call")
    beside.append(text[position:].strip())
    return "\n".join(part for part in beside if part), calls


def _mistral(text: str, names: Collection[str]) -> tuple[str, list[ToolCall]]:
    """Mistral: a list of objects behind one marker, or a marker, a name and the arguments for each call."""
    if (start := text.find(MISTRAL_TAG)) < 0:
        raise ValueError("no marked call")
    position, values = start, _skip(text, start + len(MISTRAL_TAG))
    calls: list[ToolCall] = []
    if text.startswith("[", values):
        several, position = _decode(text, values)
        calls = [_call(value, names) for value in several]
    while match := _MISTRAL_CALL.match(text, position):
        arguments, position = _decode(text, match.end())
        calls.append(_call({"name": match[1], "arguments": arguments}, names))
    if not calls or position < len(text):
        raise ValueError("something else follows the marker")
    return text[:start].strip(), calls


def _call(value: object, names: Collection[str]) -> ToolCall:
    """Check one decoded call. Its arguments are written anew: one spelling, no duplicate keys."""
    if not isinstance(value, dict):
        raise ValueError("a call is no object")
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = _DECODER.decode(arguments)
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        raise ValueError("no known name, or arguments that are no object")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()  # half a surrogate pair could not be sent anywhere
    return ToolCall(f"call_{uuid.uuid4().hex[:24]}", name, text)


def _xml(text: str, position: int) -> tuple[dict[str, Any], int]:
    """Qwen3-Coder's form at `position`: (the call, the place behind it)."""
    if not (function := _FUNCTION.match(text, position)):
        raise ValueError("no function")
    arguments: dict[str, object] = {}
    position = function.end()
    while parameter := _PARAMETER.match(text, position):
        arguments[parameter[1]], position = _value(parameter[2]), parameter.end()
    if not text.startswith("</function>", position):
        raise ValueError("a function is not closed")
    return {"name": function[1], "arguments": arguments}, _skip(text, position + len("</function>"))


def _value(text: str) -> object:
    """A parameter without quotes. Numbers stay text: tools turn text into numbers, but not the reverse."""
    try:
        value = _DECODER.decode(text)
    except ValueError:
        return text
    return value if value is None or isinstance(value, dict | list) else text


def _decode(text: str, position: int) -> tuple[Any, int]:
    """The JSON value at or after `position`, and the place of what follows it."""
    value, end = _DECODER.raw_decode(text, _skip(text, position))
    return value, _skip(text, end)


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position
