"""Tool calls in generated text: every form, everything that is nearly one, and the way back."""

import json
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkvshare_agents.prompt.tool_calls import (
    ToolCall,
    calls_text,
    join_thought,
    parse_tool_calls,
    result_text,
    split_thought,
    tools_text,
)

NAMES = ("add", "get_weather", "größe")
CITY = {"city": "Zürich 🌧", "days": [1, 2], "opt": None}
CITY_JSON = json.dumps(CITY, ensure_ascii=False)


def tag(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


ADD = '{"name": "add", "arguments": {"a": 1}}'
CLOSING = '{"name": "add", "arguments": {"a": "</tool_call> <tool_call> [TOOL_CALLS] <|python_tag|>"}}'
CLOSING_ARGUMENTS = json.loads(CLOSING)["arguments"]

FORMS = {
    "hermes": (tag(ADD), "", [("add", {"a": 1})]),
    "hermes compact": ('<tool_call>{"name":"add","arguments":{}}</tool_call>', "", [("add", {})]),
    "hermes arguments first": (tag('{"arguments": {"a": 1}, "name": "add"}'), "", [("add", {"a": 1})]),
    "hermes several": (f"{tag(ADD)}\n{tag(ADD)}", "", [("add", {"a": 1})] * 2),
    "hermes text beside": (f"First.\n\n{tag(ADD)}\nThen. ", "First.\nThen.", [("add", {"a": 1})]),
    "hermes unclosed last": (f"{tag(ADD)}<tool_call>{ADD} \n", "", [("add", {"a": 1})] * 2),
    "hermes end of turn kept": (f"{tag(ADD)}<|im_end|>", "", [("add", {"a": 1})]),
    "hermes unicode": (
        tag(f'{{"name": "größe", "arguments": {CITY_JSON}}}'),
        "",
        [("größe", CITY)],
    ),
    "hermes arguments as text": (
        tag(json.dumps({"name": "add", "arguments": '{"a": 1}'})),
        "",
        [("add", {"a": 1})],
    ),
    "hermes markers in a string": (tag(CLOSING), "", [("add", CLOSING_ARGUMENTS)]),
    "hermes line break in a string": (
        tag('{"name": "add", "arguments": {"code": "a\nb"}}'),
        "",
        [("add", {"code": "a\nb"})],
    ),
    "hermes duplicate keys": (
        tag('{"name": "x", "name": "add", "arguments": {"a": 0, "a": 1}}'),
        "",
        [("add", {"a": 1})],
    ),
    "coder": (
        "Now:\n<tool_call>\n<function=get_weather>\n<parameter=city>\n 12\n</parameter>\n<parameter=days>\n"
        "[1, 2]\n</parameter>\n<parameter=opt>\nnull\n</parameter>\n</function>\n</tool_call>",
        "Now:",
        [("get_weather", {"city": " 12", "days": [1, 2], "opt": None})],
    ),
    "coder in one line": (
        "<tool_call><function=add><parameter=k>if (a < b) {</parameter></function></tool_call>",
        "",
        [("add", {"k": "if (a < b) {"})],
    ),
    "coder no parameter": (tag("<function=add>\n</function>"), "", [("add", {})]),
    "llama": ('{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
    "llama marked": (
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}<|eom_id|>',
        "",
        [("add", {"a": 1})],
    ),
    "llama type": ('{"type": "function", "name": "add", "parameters": {}}', "", [("add", {})]),
    "llama semicolons": (f"<|python_tag|>{ADD}; {ADD};{ADD}", "", [("add", {"a": 1})] * 3),
    "llama lines": (f"\n{ADD}\n{ADD}\n", "", [("add", {"a": 1})] * 2),
    "llama markers in a string": (CLOSING, "", [("add", CLOSING_ARGUMENTS)]),
    "mistral list": (f"[TOOL_CALLS][{ADD}, {ADD}]</s>", "", [("add", {"a": 1})] * 2),
    "mistral list spaced": (f"Well. [TOOL_CALLS] [{ADD}]", "Well.", [("add", {"a": 1})]),
    "mistral args": ('[TOOL_CALLS]add[ARGS]{"a": 1}', "", [("add", {"a": 1})]),
    "mistral bare": ('[TOOL_CALLS]add{"a": 1}', "", [("add", {"a": 1})]),
    "mistral id": ('[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}', "", [("add", {"a": 1})]),
    "mistral several": (
        '[TOOL_CALLS]add[ARGS]{"a": "[TOOL_CALLS]"}[TOOL_CALLS]get_weather[ARGS]{}',
        "",
        [("add", {"a": "[TOOL_CALLS]"}), ("get_weather", {})],
    ),
}

DEEP = '{"a":' * 10_000 + "1" + "}" * 10_000
NOT_CALLS = {
    "empty": "",
    "prose": "The sum is 3.",
    "prose with JSON": f"Use this: {ADD} and you are done.",
    "prose, JSON last": f"Use this: {ADD}",
    "fenced JSON": f"```json\n{ADD}\n```",
    "JSON answer": '{"a": 1}',
    "JSON list": f"[{ADD}]",
    "the tag in prose": "Write <tool_call> and then JSON.",
    "the tag at the end": "Write <tool_call>",
    "broken JSON": tag('{"name": "add", "arguments": {"a": }}'),
    "truncated": '<tool_call>\n{"name": "add", "arguments": {"a": 1}',
    "one of two truncated": f'{tag(ADD)}\n<tool_call>\n{{"name": "add", "argum',
    "unclosed first": f"<tool_call>{ADD}\n{tag(ADD)}",
    "text before the closing tag": tag(f"{ADD} as asked"),
    "unknown name": tag('{"name": "rm", "arguments": {}}'),
    "one of two unknown": f"{tag(ADD)}{tag('{}')}",
    "name is no text": tag('{"name": ["add"], "arguments": {}}'),
    "no arguments": tag('{"name": "add"}'),
    "null": tag('{"name": "add", "arguments": null}'),
    "list": tag('{"name": "add", "arguments": [1]}'),
    "text that is no object": tag('{"name": "add", "arguments": "[1]"}'),
    "text that is no JSON": tag('{"name": "add", "arguments": "a=1"}'),
    "call is a list": tag(f"[{ADD}]"),
    "not a number": tag('{"name": "add", "arguments": {"a": NaN}}'),
    "infinite": tag('{"name": "add", "arguments": {"a": 1e999}}'),
    "endless integer": tag('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}"),
    "half a surrogate pair": tag('{"name": "add", "arguments": {"a": "\\ud800"}}'),
    "deep": tag(f'{{"name": "add", "arguments": {DEEP}}}'),
    "deep text": tag(json.dumps({"name": "add", "arguments": DEEP})),
    "deep lists": tag("[" * 10_000),
    "deep bare": DEEP,
    "deep mistral": f"[TOOL_CALLS]add[ARGS]{DEEP}",
    "deep coder": tag(f"<function=add><parameter=a>{DEEP}</parameter></function>"),
    "coder parameter unclosed": tag(
        "<function=add><parameter=a>1<parameter=b>2</parameter></function>",
    ),
    "coder function unclosed": "<tool_call><function=add><parameter=a>1</parameter>",
    "coder without name": tag("<function=></function>"),
    "coder unknown": tag("<function=rm></function>"),
    "llama text behind": f"{ADD} is what I'd call.",
    "llama python": '<|python_tag|>brave_search.call(query="x")',
    "llama one unknown": f'{ADD}; {{"name": "rm", "parameters": {{}}}}',
    "mistral nothing": "[TOOL_CALLS]",
    "mistral empty list": "[TOOL_CALLS][]",
    "mistral truncated": f"[TOOL_CALLS][{ADD}",
    "mistral text behind": f"[TOOL_CALLS][{ADD}] done",
    "mistral marker behind": "[TOOL_CALLS]add{}[TOOL_CALLS]",
    "mistral unknown": "[TOOL_CALLS]rm[ARGS]{}",
    "mistral no object": "[TOOL_CALLS]add[ARGS][1]",
    "mistral prose": "[TOOL_CALLS] is a marker",
}


@pytest.mark.parametrize(("text", "beside", "expected"), FORMS.values(), ids=FORMS)
def test_forms(text: str, beside: str, expected: list[tuple[str, dict]]) -> None:
    rest, calls = parse_tool_calls(text, NAMES)
    assert rest == beside
    assert [(call.name, json.loads(call.arguments)) for call in calls] == expected
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", call.id) for call in calls)
    assert len({call.id for call in calls}) == len(calls)


@pytest.mark.parametrize("text", NOT_CALLS.values(), ids=NOT_CALLS)
def test_not_calls(text: str) -> None:
    assert parse_tool_calls(text, NAMES) == (text, ())
    padded = f"  {text}\n"
    assert parse_tool_calls(padded, NAMES) == (padded, ())


def test_no_names_no_calls() -> None:
    assert parse_tool_calls(tag(ADD), ()) == (tag(ADD), ())


def test_arguments_keep_their_letters() -> None:
    call = ToolCall("", "größe", CITY_JSON)
    _, (read,) = parse_tool_calls(calls_text([call]), NAMES)
    assert read.arguments == CITY_JSON


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(), JSON, max_size=4)


@given(st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=4), st.booleans())
def test_round_trip(pairs: list[tuple[str, dict]], ascii_only: bool) -> None:
    calls = [ToolCall("", name, json.dumps(value, ensure_ascii=ascii_only)) for name, value in pairs]
    beside, read = parse_tool_calls(f"Let me see.\n{calls_text(calls)}", NAMES)
    assert beside == "Let me see."
    assert [(call.name, json.loads(call.arguments)) for call in read] == pairs
    assert parse_tool_calls(calls_text(read), NAMES)[1] != ()


MARKS = "<tool_call> </tool_call> <|python_tag|> [TOOL_CALLS] [ARGS] <function=add> <parameter=a> </parameter>"
PIECES = st.sampled_from([*MARKS.split(), *'{} } [ ] add ; "'.split(), "\n", '{"name": "add", "arguments": '])


@settings(max_examples=500)
@given(st.lists(PIECES | st.text(max_size=3), max_size=12).map("".join))
def test_never_raises(text: str) -> None:
    rest, calls = parse_tool_calls(text, NAMES)
    assert calls or rest == text
    assert all(call.name in NAMES and isinstance(json.loads(call.arguments), dict) for call in calls)
    split_thought(text)


THOUGHTS = {
    "none": ("Hello <think>", False, (None, "Hello <think>")),
    "whole": ("<think>\nWhy?\n</think>\n\nBecause.", False, ("Why?", "Because.")),
    "leading line break": ("\n<think>Why?</think>Because.", False, ("Why?", "Because.")),
    "opened by the prompt": ("Why?\n</think>\n\n Because.", True, ("Why?", " Because.")),
    "opened twice": ("<think>Why?</think>Because.", True, ("Why?", "Because.")),
    "empty": ("<think>\n\n</think>\n\nBecause.", False, (None, "Because.")),
    "truncated": ("<think>\nWhy", False, ("Why", "")),
    "truncated, opened": ("Why", True, ("Why", "")),
    "nothing, opened": ("", True, (None, "")),
    "closing tag alone": ("a</think>b", False, (None, "a</think>b")),
    "closing tag again": ("<think>a</think>b</think>", False, ("a", "b</think>")),
    "call in the thought": (f"<think>{tag(ADD)}</think>No.", False, (tag(ADD), "No.")),
}


@pytest.mark.parametrize(("text", "opened", "expected"), THOUGHTS.values(), ids=THOUGHTS)
def test_split_thought(text: str, opened: bool, expected: tuple[str | None, str]) -> None:
    assert split_thought(text, opened) == expected


@given(st.none() | st.text().map(str.strip).filter(lambda t: t and "</think>" not in t), st.text().map(str.strip))
def test_a_thought_and_a_text_are_told_apart_again(thought: str | None, text: str) -> None:
    assert split_thought(join_thought(thought, text)) == (thought, text) or (not thought and "<think>" in text)


def test_tools_text() -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
        for name in NAMES
    ]
    text = tools_text(tools)
    assert text == tools_text(json.loads(json.dumps(tools)))
    listed = text.split("<tools>\n")[1].split("\n</tools>")[0]
    assert [json.loads(line) for line in listed.splitlines()] == tools
    assert "<tool_call>" in text and "größe" in text
    assert parse_tool_calls(text, [*NAMES, "tool name"])[0] != text, "the example must be a call in our own form"
    assert tools_text([]) == ""


def test_result_text_stays_inside_its_tag() -> None:
    content = 'é "x"\n</tool_response>\n<tool_call>'
    text = result_text("add", content)
    assert text.startswith("<tool_response>\n") and text.endswith("\n</tool_response>")
    assert text.count("</tool_response>") == 1
    body = text.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
    assert json.loads(body) == {"name": "add", "content": content}


def test_calls_without_arguments_text() -> None:
    assert json.loads(parse_tool_calls(calls_text([ToolCall("", "add", "")]), NAMES)[1][0].arguments) == {}


def test_pure_stdlib() -> None:
    code = "import sys; from qkvshare_agents.prompt import tool_calls; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
