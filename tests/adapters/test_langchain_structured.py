"""What structured output promises: the whole schema is enforced, and a cut answer is an error. Scripted words."""

import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.tools import StructuredTool, tool
from pydantic import BaseModel, Field
from scripted import ScriptedHost, install, uninstall
from support import tiny_engine
from typing_extensions import TypedDict

from qkvshare_adapters.langchain.messages import response_format, to_schemas
from qkvshare_agents import ChatQKVShare
from qkvshare_agents.prompt.grammar import Grammar

NAME = "structured-output"
_ENGINE = tiny_engine()


class Sum(BaseModel):
    total: int
    notes: list[str] = []


class Tree(BaseModel):
    """A tree."""

    v: int = Field(ge=0, le=9)
    kids: list["Tree"] = Field(max_length=1)


class Node(TypedDict):
    """A node."""

    v: int
    kids: "list[Node]"


def grow(tree: Tree) -> str:
    """Grows a tree."""
    return ""


def model(words: str, **options: Any) -> ChatQKVShare:
    uninstall(NAME)
    install(ScriptedHost(lambda _: words, engine=_ENGINE), NAME)
    return ChatQKVShare(model="scripted", host=NAME, precision="native", **options)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    uninstall(NAME)


def said(method: str, arguments: str) -> str:
    if method != "function_calling":
        return arguments
    spaced = json.dumps(json.loads(arguments))
    return f'<tool_call>\n{{"name": "Sum", "arguments": {spaced}}}\n</tool_call>'


WHOLE = '{"total":123456789,"notes":["a","b"]}'
SCHEMAS = [Sum, {"title": "Sum", **Sum.model_json_schema()}]


@pytest.mark.parametrize("schema", SCHEMAS, ids=["class", "dict"])
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
async def test_an_answer_cut_by_its_limit_is_an_error(method: str, schema: Any) -> None:
    words = said(method, WHOLE)
    whole = len(_ENGINE.template.encoder.text(words))
    for limit in (1, whole // 2):
        chat = model(words, max_tokens=limit)
        both = chat.with_structured_output(schema, method=method, include_raw=True).invoke("x")
        assert both["parsed"] is None and "max_tokens" in str(both["parsing_error"]), limit
        runnable = chat.with_structured_output(schema, method=method)
        with pytest.raises(OutputParserException, match="cut by its limit"):
            runnable.invoke("x")
        with pytest.raises(OutputParserException, match="cut by its limit"):
            list(runnable.stream("x"))
        with pytest.raises(OutputParserException, match="cut by its limit"):
            _ = [part async for part in runnable.astream("x")]
    got = model(words, max_tokens=whole + 1).with_structured_output(schema, method=method).invoke("x")
    assert (got if isinstance(got, dict) else got.model_dump()) == json.loads(WHOLE)


def test_an_answer_cut_by_a_stop_string_is_an_error() -> None:
    runnable = model(WHOLE, stop=["789"]).with_structured_output(Sum)
    with pytest.raises(OutputParserException, match="stop string"):
        runnable.invoke("x")
    with pytest.raises(OutputParserException, match="stop string"):
        list(runnable.stream("x"))


FORMS = [
    Tree, Node, grow, tool(grow), StructuredTool(name="t", description="d", args_schema=Tree.model_json_schema()),
    {**Tree.model_json_schema(), "title": "Tree"},
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS[:-1], ids=["class", "typed dict", "function", "tool", "dict"])
def test_recursion_stays_in_the_schemas_of_tools(form: Any) -> None:
    function = to_schemas([form])[0]["function"]
    text = json.dumps(function)
    assert '"$ref": "#/$defs/' in text and '"title"' not in text and function["name"] and function["description"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Grammar.tool_calls(_ENGINE.tokenizer, to_schemas([form]))


@pytest.mark.parametrize("form", [Tree, Node, FORMS[-1], Tree.model_json_schema()])
def test_recursion_stays_in_the_schemas_of_answers(form: Any) -> None:
    schema = response_format(form)["json_schema"]["schema"]
    matcher = Grammar.json_schema(_ENGINE.tokenizer, schema).start()
    with pytest.raises(ValueError, match="enforced"):
        for token in _ENGINE.template.encoder.text('{"v":1,"kids":[{"name":"Bob"}]}'):
            matcher.accept(token)


def test_schemas_without_recursion_are_what_langchain_writes() -> None:
    assert "$defs" not in json.dumps(to_schemas([Sum])) and "$defs" not in json.dumps(response_format(Sum))
