"""AutoGen's client contract, each trap a test. The words are scripted, the KV is real."""

import asyncio
import copy
import json
import logging
import threading
import time

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import EVENT_LOGGER_NAME, CancellationToken, FunctionCall, Image
from autogen_core.model_context import TokenLimitedChatCompletionContext
from autogen_core.models import (
    AssistantMessage,
    CreateResult,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    SystemMessage,
    UserMessage,
)
from autogen_core.tools import FunctionTool
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from PIL import Image as PILImage
from pydantic import BaseModel
from scripted import ScriptedHost, install, uninstall
from support import tiny_engine

import qkvshare_agents
from qkvshare_agents import QKVShareClient
from qkvshare_agents.errors import ContextOverflow, HostConflict, InvalidMessage, InvalidSetting, ModelNotFound
from qkvshare_agents.host import registry

TASK = UserMessage(content="Write add(a, b).", source="user")


def speak(prompt: str) -> str:
    return "def add(a, b):\n    return a + b" if "[coder]" in prompt[-80:] else "hello"


@pytest.fixture
def scripted(request):
    made = []

    def make(script=speak, *, members=None, engine=None, **options):
        name = f"host-{request.node.name}-{len(made)}"
        settings = {k: v for k, v in options.items() if k not in ("temperature", "max_tokens", "stop", "seed")}
        host = ScriptedHost(script, engine=engine, **settings)
        install(host, name)
        made.append(name)
        return QKVShareClient("scripted", host=name, members=members, **{"precision": "native", **options})

    yield make
    for name in made:
        uninstall(name)


@pytest.fixture
def spans():
    exporter = InMemorySpanExporter()
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = TracerProvider()
        trace.set_tracer_provider(provider)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


async def test_create_answers_with_real_usage(scripted) -> None:
    client = scripted()
    result = await client.create([SystemMessage(content="You write Python."), TASK])
    assert result.content == "hello" and result.finish_reason == "stop" and result.cached is False
    prompt = client.host.prompts[0]
    assert result.usage.prompt_tokens == len(prompt.ids)
    assert result.usage.completion_tokens == len(client.host.engine.template.encoder.text("hello"))
    await client.create([TASK])
    total = client.total_usage()
    assert total.prompt_tokens == sum(len(p.ids) for p in client.host.prompts) == client.actual_usage().prompt_tokens


async def test_stream_gives_pieces_then_one_result(scripted) -> None:
    client = scripted(lambda _: "naïve — 日本 text")
    parts = [part async for part in client.create_stream([TASK])]
    *pieces, result = parts
    assert len(pieces) > 1 and all(isinstance(p, str) for p in pieces)
    assert isinstance(result, CreateResult) and "".join(pieces) == result.content == "naïve — 日本 text"


async def test_messages_are_not_changed(scripted) -> None:
    client = scripted()
    messages = [SystemMessage(content="s"), TASK, AssistantMessage(content="x", source="coder"), TASK]
    before = [m.model_dump() for m in messages]
    await client.create(messages)
    assert [m.model_dump() for m in messages] == before


async def test_unknown_options_are_type_errors_with_the_choices(scripted) -> None:
    with pytest.raises(TypeError, match=r"tempratur.*temperature"):
        QKVShareClient("scripted", tempratur=0.1)
    client = scripted()
    with pytest.raises(TypeError, match=r"frequency_penalty.*max_tokens"):
        await client.create([TASK], extra_create_args={"frequency_penalty": 1})
    with pytest.raises(InvalidSetting, match="temperature"):
        await client.create([TASK], extra_create_args={"temperature": -1})


async def test_max_tokens_ends_with_length(scripted) -> None:
    client = scripted(lambda _: "one two three four five six seven eight nine ten", max_tokens=3)
    result = await client.create([TASK])
    assert result.finish_reason == "length" and result.usage.completion_tokens == 3


async def test_stop_string_is_cut_and_the_ledger_still_matches(scripted) -> None:
    answers = iter(["before ENDafter", "second"])
    client = scripted(lambda _: next(answers), stop=("END",))
    first = await client.for_agent("coder").create([SystemMessage(content="c"), TASK])
    assert first.content == "before "
    history = [TASK, AssistantMessage(content=first.content, source="coder"), TASK]
    await client.for_agent("coder").create([SystemMessage(content="c"), *history])
    assert client.host.modes == ["TEXT", "KV"]
    client.host.assert_exact()


async def test_images_are_refused_with_a_reason(scripted) -> None:
    image = Image(PILImage.new("RGB", (2, 2)))
    with pytest.raises(InvalidMessage, match="image"):
        await scripted().create([UserMessage(content=["look", image], source="user")])


async def test_context_overflow_says_how_much_and_who(scripted) -> None:
    client = scripted(engine=tiny_engine(max_position_embeddings=256), fit="error")
    with pytest.raises(ContextOverflow, match=r"context length exceeded: \d+ .* 256 \(coder\)"):
        await client.for_agent("coder").create([UserMessage(content="word " * 300, source="user")])
    agent = AssistantAgent("coder", client)
    with pytest.raises(RuntimeError, match="context length exceeded"):
        await RoundRobinGroupChat([agent], max_turns=1).run(task="word " * 300)
    result = await client.create([UserMessage(content="hi", source="user")])
    assert result.content == "hello", "an overflow must leave the host usable"


async def test_count_and_remaining_tokens(scripted) -> None:
    client = scripted(engine=tiny_engine(max_position_embeddings=256), fit="error")
    messages = [SystemMessage(content="You write Python."), TASK]
    counted = client.count_tokens(messages)
    result = await client.create(messages)
    assert counted == result.usage.prompt_tokens
    assert client.remaining_tokens(messages) == 256 - counted
    assert client.remaining_tokens([UserMessage(content="word " * 300, source="user")]) < 0


async def test_token_limited_context_trims(scripted) -> None:
    client = scripted(engine=tiny_engine(max_position_embeddings=400))
    context = TokenLimitedChatCompletionContext(client)
    for i in range(30):
        await context.add_message(UserMessage(content=f"message {i} " + "word " * 10, source="user"))
    kept = await context.get_messages()
    assert 0 < len(kept) < 30


async def test_tools_are_called_several_in_one_turn(scripted) -> None:
    call = '<tool_call>\n{{"name": "add", "arguments": {{"a": {}, "b": 2}}}}\n</tool_call>'
    client = scripted(lambda _: "Let me see. " + call.format(1) + "\n" + call.format(3))

    def add(a: int, b: int) -> int:
        return a + b

    tool = FunctionTool(add, description="adds")
    result = await client.create([TASK], tools=[tool])
    assert result.finish_reason == "function_calls" and isinstance(result.content, list)
    assert [json.loads(c.arguments) for c in result.content] == [{"a": 1, "b": 2}, {"a": 3, "b": 2}]
    assert result.thought == "Let me see." and len({c.id for c in result.content}) == 2
    assert "adds" in client.host.texts[0]
    plain = await client.create([TASK], tools=[tool], tool_choice="none")
    assert isinstance(plain.content, str)
    streamed = [part async for part in client.create_stream([TASK], tools=[tool])]
    assert isinstance(streamed[-1].content, list) and not any("<tool_call>" in p for p in streamed[:-1])


async def test_malformed_tool_calls_come_back_as_text(scripted) -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1,\n</tool_call>'
    client = scripted(lambda _: text)
    tool = _add_tool()
    result = await client.create([TASK], tools=[tool])
    assert result.content == text and result.finish_reason == "stop"
    streamed = [part async for part in client.create_stream([TASK], tools=[tool])]
    assert "".join(streamed[:-1]) == text, "text that was held back as a possible call must be delivered"


async def test_calls_of_tools_that_are_not_offered_are_text(scripted) -> None:
    text = '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>'
    result = await scripted(lambda _: text).create([TASK], tools=[_add_tool()])
    assert result.content == text


async def test_tool_choice_errors(scripted) -> None:
    client = scripted()
    with pytest.raises(ValueError, match="required"):
        await client.create([TASK], tool_choice="required")
    with pytest.raises(ValueError, match=r"add.*not among.*none"):
        await client.create([TASK], tool_choice=_add_tool())
    with pytest.raises(ValueError, match="often"):
        await client.create([TASK], tool_choice="often")


async def test_tool_conversation_reuses_the_call(scripted) -> None:
    answers = iter(['<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', "It is 3."])
    client = scripted(lambda _: next(answers)).for_agent("coder")
    system = SystemMessage(content="You add.")
    first = await client.create([system, TASK], tools=[_add_tool()])
    call: FunctionCall = first.content[0]
    done = FunctionExecutionResult(content="3", name="add", call_id=call.id, is_error=False)
    messages = [
        system, TASK,
        AssistantMessage(content=first.content, source="coder"),
        FunctionExecutionResultMessage(content=[done]),
    ]  # fmt: skip
    second = await client.create(messages, tools=[], tool_choice="none")  # a reflection call
    assert second.content == "It is 3."
    assert client.host.modes == ["TEXT", "KV"]
    client.host.assert_exact()


class Verdict(BaseModel):
    passed: bool
    score: int


@pytest.mark.parametrize("stream", [False, True])
async def test_structured_output_on_a_model_that_knows_nothing(stream: bool) -> None:
    name = f"structured-{stream}"
    client = QKVShareClient("tiny", host=name, temperature=1.0, seed=3, max_tokens=200)
    registry._hosts[name]._engine = tiny_engine()
    try:
        if stream:
            result = [part async for part in client.create_stream([TASK], json_output=Verdict)][-1]
        else:
            result = await client.create([TASK], json_output=Verdict)
        Verdict.model_validate_json(result.content)
        forced = await client.create([TASK], tools=[_add_tool()], tool_choice="required")
        assert forced.finish_reason == "function_calls" and forced.content[0].name == "add"
        loose = await client.create([TASK], json_output=True, extra_create_args={"max_tokens": 40})
        assert loose.content.startswith("{")
        with pytest.raises(ValueError, match="json_output"):
            await client.create([TASK], json_output="yes")
    finally:
        await client.close()


async def test_component_round_trip_shares_one_model(scripted) -> None:
    client = scripted(members={"coder": "You write Python."}, temperature=0.5)
    team = RoundRobinGroupChat([AssistantAgent("coder", client), AssistantAgent("tester", client)], max_turns=2)
    dumped = team.dump_component()
    text = dumped.model_dump_json()
    assert "qkvshare_agents.QKVShareClient" in text
    loaded = RoundRobinGroupChat.load_component(json.loads(text))
    clients = [p._model_client for p in loaded._participants]
    assert clients[0] is not clients[1] and clients[0].host is clients[1].host is client.host
    assert clients[0]._config == client._config
    copied = copy.deepcopy(client)
    assert copied.host is client.host


async def test_same_name_with_other_settings_is_a_conflict(scripted) -> None:
    client = scripted()
    with pytest.raises(HostConflict, match="budget_bytes"):
        QKVShareClient("scripted", host=client._config.host, precision="native", budget_bytes=1)


async def test_loading_says_what_is_missing() -> None:
    for name, match in (("nothere", "give a directory"), ("no/such-model", "can't be loaded")):
        client = QKVShareClient(name)
        with pytest.raises(ModelNotFound, match=match):
            await client.load()
        await client.close()
    with pytest.raises(InvalidSetting, match="float32"):
        QKVShareClient("no/such-model", dtype="float12")


async def test_closing_one_client_leaves_the_others(scripted) -> None:
    client = scripted()
    other = client.for_agent("x")
    await client.close()
    await client.close()
    assert (await other.create([TASK])).content == "hello"


async def test_cancellation_stops_the_decode_loop(scripted) -> None:
    said = threading.Event()
    client = scripted(lambda _: said.set() or "word " * 3000, max_tokens=None, engine=tiny_engine())
    token = CancellationToken()
    task = asyncio.create_task(client.create([TASK], cancellation_token=token))
    await asyncio.to_thread(said.wait, 10)
    token.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await _assert_free(client)


async def test_cancelled_task_without_token_stops_the_decode_loop(scripted) -> None:
    said = threading.Event()
    client = scripted(lambda _: said.set() or "word " * 3000, max_tokens=None)
    task = asyncio.create_task(client.create([TASK]))
    await asyncio.to_thread(said.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await _assert_free(client)


async def test_leaving_a_stream_early_stops_the_decode_loop(scripted) -> None:
    client = scripted(lambda _: "word " * 3000, max_tokens=None)
    stream = client.create_stream([TASK])
    assert await anext(stream)
    await stream.aclose()
    await _assert_free(client)


async def test_token_cancels_a_stream(scripted) -> None:
    client = scripted(lambda _: "word " * 3000, max_tokens=None)
    token = CancellationToken()
    with pytest.raises(asyncio.CancelledError):
        async for _ in client.create_stream([TASK], cancellation_token=token):
            token.cancel()
    await _assert_free(client)


async def _assert_free(client) -> None:
    """The host's thread is idle within a token or two, nothing was kept, and the next call works."""
    pages = client.host.store.page_count
    started = time.monotonic()
    client.host.engine._script = lambda _: "free"
    result = await asyncio.wait_for(client.create([TASK]), 10)
    assert result.content == "free" and time.monotonic() - started < 5
    assert pages == 0


def test_one_client_in_several_event_loops_and_threads(scripted) -> None:
    client = scripted()
    results: list[str] = []

    def run(i: int) -> None:
        async def ask() -> None:
            messages = [UserMessage(content=f"question {i}", source="user")]
            gathered = await asyncio.gather(*(client.create(messages) for _ in range(3)))
            results.extend(r.content for r in gathered)

        asyncio.run(ask())

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == ["hello"] * 12
    client.host.assert_exact()


async def test_events_carry_the_handoff(scripted, caplog) -> None:
    client = scripted()
    with caplog.at_level(logging.INFO, logger=EVENT_LOGGER_NAME):
        await client.create([TASK])
        [_ async for _ in client.create_stream([TASK])]
    events = [json.loads(str(r.msg)) for r in caplog.records if r.name == EVENT_LOGGER_NAME]
    assert [e["type"] for e in events] == ["LLMCall", "LLMStreamStart", "LLMStreamEnd"]
    assert events[0]["handoff"]["mode"] == "TEXT" and events[0]["prompt_tokens"] > 0
    assert events[2]["handoff"]["reused_tokens"] > 0


async def test_spans_carry_usage_and_no_text(scripted, spans) -> None:
    client = scripted(lambda _: "sesame")
    secret = UserMessage(content="the password is hunter2", source="user")
    await client.create([secret])
    await client.create([secret])
    first, second = spans.get_finished_spans()[-2:]
    assert first.name == "chat scripted"
    assert second.attributes["gen_ai.usage.cache_read.input_tokens"] > 0
    assert second.attributes["gen_ai.usage.input_tokens"] > second.attributes["gen_ai.usage.cache_read.input_tokens"]
    assert "hunter2" not in first.to_json() + second.to_json() and "sesame" not in first.to_json()


async def test_nothing_of_the_conversation_is_in_reports_or_reprs(scripted) -> None:
    client = scripted(lambda _: "sesame")
    await client.create([UserMessage(content="the password is hunter2", source="user")])
    shown = f"{client.reports} {client.reports[0].to_dict()} {client} {client.host} {client.host.settings}"
    assert "hunter2" not in shown and "sesame" not in shown


def test_lazy_exports() -> None:
    assert qkvshare_agents.QKVShareClient is QKVShareClient
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = qkvshare_agents.nothing_here


def _add_tool() -> FunctionTool:
    def add(a: int, b: int) -> int:
        return a + b

    return FunctionTool(add, description="adds two numbers")
