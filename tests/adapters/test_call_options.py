"""Options of a call, in every adapter: each works, or is refused by an error that names the valid ones."""

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import UserMessage
from autogen_core.tools import FunctionTool
from scripted import ScriptedHost, install, uninstall
from support import tiny_engine

from qkvshare_agents import ChatQKVShare, QKVShareClient
from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.prompt.tool_calls import parse_tool_calls

NAME = "call-options"
_ENGINE = tiny_engine()
CALL = '<tool_call>\n{{"name": "add", "arguments": {{"a": {}, "b": 2}}}}\n</tool_call>'
BARE = '{{"name": "add", "parameters": {{"a": {}, "b": 2}}}}'
TASK = UserMessage(content="Add.", source="user")
SETTINGS = {"host": NAME, "precision": "native"}


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


TOOL = FunctionTool(add, description="Adds.")


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    uninstall(NAME)


def say(*words: str) -> None:
    answers = itertools.cycle(words)
    uninstall(NAME)
    install(ScriptedHost(lambda _: next(answers), engine=_ENGINE), NAME)


LANGCHAIN: list[tuple[Callable[[Any], Any], str]] = [
    (lambda m: m.bind_tools([add], parallel_tool_calls="no"), "True or False"),
    (lambda m: m.bind(tools=[add], parallel_tool_calls=0.5).invoke("x"), "True or False"),
    (lambda m: m.bind_tools([add], tool_choice="often"), "'auto', 'any', 'none'.*add"),
    (lambda m: m.bind_tools([add], strict=True), "tool_choice 'any'"),
    (lambda m: m.invoke("x", tool_choice="any"), "no tools are given"),
    (lambda m: m.invoke("x", response_format={"type": "xml", "json_schema": {"schema": {}}}), "json_object"),
    (lambda m: m.invoke("x", response_format="json"), "json_object"),
    (lambda m: m.invoke("x", strict=True), "options are .*parallel_tool_calls"),
    (lambda m: m.invoke("x", n=2), "options are .*max_tokens"),
    (lambda m: m.invoke("x", max_completion_tokens=2), "options are .*max_tokens"),
    (lambda m: m.invoke("x", temperature=-1), "temperature >= 0"),
    (lambda m: m.invoke("x", stop=[""]), "stop strings"),
    (lambda m: m.invoke("x", seed=2**70), "seed"),
]


@pytest.mark.parametrize(("call", "message"), LANGCHAIN)
def test_langchain_refuses_what_it_cannot_do(call: Callable[[Any], Any], message: str) -> None:
    say("hello")
    with pytest.raises((InvalidSetting, TypeError), match=message):
        call(ChatQKVShare(model="scripted", **SETTINGS))


@pytest.mark.parametrize("name", ["n", "response_format", "tool_choice", "frequency_penalty", "strict"])
async def test_autogen_refuses_what_it_cannot_do(name: str) -> None:
    say("hello")
    client = QKVShareClient("scripted", **SETTINGS)
    with pytest.raises(TypeError, match=f"{name}.*max_tokens.*parallel_tool_calls"):
        await client.create([TASK], extra_create_args={name: 1})
    with pytest.raises(InvalidSetting, match="True or False"):
        await client.create([TASK], extra_create_args={"parallel_tool_calls": "no"})
    with pytest.raises(InvalidSetting, match="True or False"):
        QKVShareClient("scripted", **SETTINGS, parallel_tool_calls=3)


SEVERAL = {
    "tagged": "Sure. " + CALL.format(1) + "\n" + CALL.format(3),
    "bare": BARE.format(1) + "; " + BARE.format(3),
    "list": "[TOOL_CALLS][" + BARE.format(1) + ", " + BARE.format(3) + "]",
}


@pytest.mark.parametrize("words", SEVERAL.values(), ids=SEVERAL)
async def test_one_call_is_one_call_in_every_form_and_adapter(words: str) -> None:
    say(words)
    model = ChatQKVShare(model="scripted", **SETTINGS)
    for several, count in ((False, 1), (True, 2), (None, 2)):
        bound = model.bind_tools([add], parallel_tool_calls=several)
        assert [c["args"]["a"] for c in bound.invoke("x").tool_calls] == [1, 3][:count]
        chunks = list(bound.stream("x"))
        assert len(sum(chunks[1:], chunks[0]).tool_calls) == count
    client = QKVShareClient("scripted", **SETTINGS)
    once = await client.create([TASK], tools=[TOOL], extra_create_args={"parallel_tool_calls": False})
    assert [json.loads(c.arguments)["a"] for c in once.content] == [1]
    assert len((await client.create([TASK], tools=[TOOL])).content) == 2
    single = QKVShareClient("scripted", **SETTINGS, parallel_tool_calls=False)
    assert len((await single.create([TASK], tools=[TOOL])).content) == 1
    loaded = QKVShareClient.load_component(single.dump_component())
    assert len((await loaded.create([TASK], tools=[TOOL])).content) == 1


def test_an_empty_list_of_stop_strings_takes_the_models_own_away() -> None:
    say("one END two")
    model = ChatQKVShare(model="scripted", **SETTINGS, stop=["END"])
    assert model.invoke("x").content == "one " and model.invoke("x", stop=[]).content == "one END two"


STREAMED = ["I will add.\n" + CALL.format(1), "[1] and {2}", "<think>hm</think>\n\nIt is 3, I think.", "a < b", "plain"]


@pytest.mark.parametrize("words", STREAMED)
async def test_every_adapter_streams_the_text_and_nothing_else(words: str) -> None:
    say(words)
    client, model = QKVShareClient("scripted", **SETTINGS), ChatQKVShare(model="scripted", **SETTINGS)
    *pieces, result = [part async for part in client.create_stream([TASK], tools=[TOOL])]
    chunks = list(model.bind_tools([add]).stream("Add."))
    text = result.thought if isinstance(result.content, list) else result.content
    assert "".join(pieces) == text == "".join(str(c.content) for c in chunks)
    assert "<t" not in text and (text.startswith("[") or len(pieces) > 1)


@pytest.mark.parametrize("words", [CALL.format(1), BARE.format(1), "So: " + CALL.format(1), "[TOOL_CALLS]" + "[]"])
async def test_a_reflection_can_not_end_in_markup(words: str) -> None:
    say(CALL.format(1), words)
    client = QKVShareClient("scripted", **SETTINGS, max_tokens=90)
    agent = AssistantAgent("coder", client, tools=[TOOL], reflect_on_tool_use=True, model_client_stream=True)
    said = (await agent.run(task="Add.")).messages[-1].content
    assert said and "<tool_call" not in said and "[TOOL_CALLS" not in said
    assert not parse_tool_calls(said, {"add"})[1]


def test_who_knows_no_tools_may_write_about_markup() -> None:
    say(CALL.format(1))
    assert ChatQKVShare(model="scripted", **SETTINGS).invoke("How?").content == CALL.format(1)


async def test_a_cut_answer_says_length_whatever_it_holds() -> None:
    words = "日本 " + CALL.format(1) + CALL.format(2)
    client, model = QKVShareClient("scripted", **SETTINGS), ChatQKVShare(model="scripted", **SETTINGS)
    for limit in (1, 2, 20, len(_ENGINE.template.encoder.text(words)) - 1):
        say(words)
        client, model = QKVShareClient("scripted", **SETTINGS), ChatQKVShare(model="scripted", **SETTINGS)
        result = await client.create([TASK], tools=[TOOL], extra_create_args={"max_tokens": limit})
        answer = model.bind_tools([add]).invoke("x", max_tokens=limit)
        assert result.finish_reason == answer.response_metadata["finish_reason"] == "length"
        assert "\ufffd" not in str(result.content) and "\ufffd" not in str(answer.content)
