"""LangChain's contract where the standard suite does not look, each trap a test. Scripted words, real KV."""

import asyncio
import copy
import json
import pickle
import threading
import time
from dataclasses import fields

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.globals import set_llm_cache
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)
from langchain_core.runnables import RunnableLambda
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel
from scripted import ScriptedHost, install, uninstall
from support import tiny_engine

import qkvshare_agents
from qkvshare_agents import ChatQKVShare
from qkvshare_agents.errors import ContextOverflow, HostClosed, HostConflict, InvalidMessage, InvalidSetting
from qkvshare_agents.host import registry
from qkvshare_agents.prompt.answer_stream import AnswerStream
from qkvshare_agents.prompt.sampling import Sampling
from qkvshare_agents.prompt.tool_calls import parse_tool_calls, split_thought
from qkvshare_agents.settings import HostSettings

_ENGINE = tiny_engine()
CALL = '<tool_call>\n{{"name": "add", "arguments": {{"a": {}, "b": 2}}}}\n</tool_call>'


@pytest.fixture
def scripted(request):
    made = []

    def make(script=lambda _: "hello", *, engine=_ENGINE, **options):
        name = f"host-{request.node.name}-{len(made)}"
        install(ScriptedHost(script, engine=engine, **{k: v for k, v in options.items() if k == "fit"}), name)
        made.append(name)
        return ChatQKVShare(model="scripted", host=name, precision="native", **options)

    yield make
    for name in made:
        uninstall(name)


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


class Recorder(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.events: list[tuple[str, dict]] = []

    def on_llm_new_token(self, token, **kwargs):
        self.tokens.append(token)

    def on_custom_event(self, name, data, **kwargs):
        self.events.append((name, data))


def test_an_unknown_option_is_a_type_error_with_the_choices(scripted) -> None:
    with pytest.raises(TypeError, match=r"tempratur.*temperature"):
        ChatQKVShare(tempratur=0.1)
    with pytest.raises(TypeError, match=r"frequency_penalty.*max_tokens"):
        scripted().invoke("hi", frequency_penalty=1)
    with pytest.raises(InvalidSetting, match="temperature"):
        ChatQKVShare(temperature=-1)
    with pytest.raises(InvalidSetting, match="native"):
        ChatQKVShare(precision="int1")
    with pytest.raises(ValueError, match="policy"):
        ChatQKVShare(policy="some")


def test_every_setting_of_host_and_sampling_is_an_option() -> None:
    names = {f.name for f in (*fields(HostSettings), *fields(Sampling)) if f.repr}  # the others are not dumped
    assert not names - ChatQKVShare.model_fields.keys(), "add these as fields of ChatQKVShare"
    model = ChatQKVShare()
    assert model.settings == HostSettings("smollm2-135m") and model._sampling(None, {}) == Sampling()


def test_the_object_holds_names_only(scripted) -> None:
    model = scripted(temperature=0.5, api_key="sk-secret", stop="END")
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.model_copy(deep=True)]
    assert all(c == model and c.shared_host is model.shared_host for c in copies)
    assert "sk-secret" not in repr(model) + str(model.model_dump()) and model.stop == ["END"]


def test_what_changes_answers_changes_the_key_of_the_answer_cache(scripted) -> None:
    model = scripted()
    changed = {
        "precision": "safe", "layout": "stock", "temperature": 1.0, "seed": 3, "top_k": 5, "agent": "x",
        "members": {"a": "b"}, "policy": "all", "system": "s", "stop": ["x"], "handoff": False, "model": "other",
    }  # fmt: skip
    keys = [m._get_llm_string() for m in (model, *(model.model_copy(update={k: v}) for k, v in changed.items()))]
    assert len(set(keys)) == len(keys)
    params = [m._identifying_params for m in (model, *(model.model_copy(update={k: v}) for k, v in changed.items()))]
    assert len({json.dumps(p) for p in params}) == len(params)


def test_langchains_answer_cache_works(scripted) -> None:
    model = scripted()
    set_llm_cache(InMemoryCache())
    try:
        assert model.invoke("hi").content == model.invoke("hi").content == "hello"
        assert len(model.reports) == 1
    finally:
        set_llm_cache(None)


def test_an_answer_carries_usage_the_report_and_a_handle(scripted) -> None:
    model = scripted(agent="coder")
    model.invoke("Say hello to everybody in this room, please.")
    answer = model.invoke("Say hello to everybody in this room, please.")
    report = model.reports[-1]
    assert answer.usage_metadata == {
        "input_tokens": report.prompt_tokens,
        "output_tokens": report.generated_tokens,
        "total_tokens": report.prompt_tokens + report.generated_tokens,
        "input_token_details": {"cache_read": report.reused_tokens},
    }
    assert report.reused_tokens > 0
    handoff = answer.response_metadata["qkvshare"]
    assert handoff == {**report.to_dict(), "handle": handoff["handle"]} and handoff["agent"] == "coder"
    assert isinstance(handoff["handle"], str) and len(handoff["handle"]) == 64
    assert json.loads(json.dumps(handoff)) == handoff
    assert answer.response_metadata["finish_reason"] == "stop" and answer.response_metadata["model_name"] == "scripted"


@pytest.mark.parametrize(
    "text",
    [
        "naïve — 日本 text",
        "Let me see. " + CALL.format(1) + "\n" + CALL.format(3),
        CALL.format(1),
        "a < b [x] {y}",
        "<b> x",
        "",
    ],
)
async def test_streams_add_up_to_the_answer(scripted, text: str) -> None:
    model = scripted(lambda _: text).bind_tools([add])
    whole = model.invoke("go")
    chunks = list(model.stream("go"))
    achunks = [chunk async for chunk in model.astream("go")]
    for got in (chunks, achunks):
        full = sum(got[1:], got[0])
        assert (full.content, [c["args"] for c in full.tool_calls]) == (
            whole.content,
            [c["args"] for c in whole.tool_calls],
        )
        assert full.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
        assert got[-1].chunk_position == "last" and full.response_metadata["qkvshare"]["handle"]
        assert "<tool_call>" not in "".join(str(chunk.content) for chunk in got)
    assert (await model.ainvoke("go")).content == whole.content


@pytest.mark.parametrize(
    ("raw", "thinking"),
    [
        ("plain", False), ("  spaced", False), ("<think>hm</think>\n\nYes", False), ("<th", False),
        ("so\n</think>\nYes", True), ("never ends", True), ("<think>cut", False),
        ("Look:\n" + CALL.format(1), False), ("1 < 2 [TOOL", False), ("x <tool_calm> y", False),
    ],
)  # fmt: skip
def test_shown_text_is_the_answers_text_whatever_the_pieces(raw: str, thinking: bool) -> None:
    _, text = split_thought(raw, opened=thinking)
    text, _ = parse_tool_calls(text, {"add"})
    for size in (1, 2, 3, 7, 100):
        shown = AnswerStream(thinking=thinking, tools=True)
        pieces = [shown.push(raw[i : i + size]) for i in range(0, len(raw), size)]
        assert "".join(pieces) + shown.finish(text) == text


def test_token_callbacks_get_every_piece(scripted) -> None:
    recorder = Recorder()
    model = scripted(lambda _: "one two three four")
    text = "".join(str(c.content) for c in model.stream("go", {"callbacks": [recorder]}))
    assert "".join(recorder.tokens) == text == "one two three four" and len(recorder.tokens) > 2


def test_stop_strings_and_call_options(scripted) -> None:
    model = scripted(lambda _: "before ENDafter", stop=["never"])
    assert model.invoke("go", stop=["END"]).content == "before "
    cut = model.invoke("go", max_tokens=2)
    assert cut.response_metadata["finish_reason"] == "length" and cut.usage_metadata["output_tokens"] == 2
    assert model.bind(max_tokens=2).invoke("go").content == cut.content


def test_tool_choice_says_what_it_takes(scripted) -> None:
    model = scripted(lambda _: CALL.format(1))
    with pytest.raises(InvalidSetting, match=r"'sub'.*'auto', 'any', 'none'.*add"):
        model.bind_tools([add], tool_choice="sub")
    with pytest.raises(InvalidSetting, match="no tools"):
        model.bind_tools([], tool_choice="any")
    with pytest.raises(InvalidSetting, match="provider"):
        model.bind_tools([{"type": "web_search"}])
    assert not model.bind_tools([add], tool_choice="none").invoke("go").tool_calls
    for choice in ("add", True, {"type": "function", "function": {"name": "add"}}):
        assert model.bind_tools([add], tool_choice=choice).invoke("go").tool_calls[0]["args"] == {"a": 1, "b": 2}


def test_a_tool_conversation_continues_the_call(scripted) -> None:
    answers = iter([CALL.format(1) + CALL.format(2), "They are 3 and 4."])
    model = scripted(lambda _: next(answers)).bind_tools([add])
    task = HumanMessage("Add 1 and 2, and 2 and 2.")
    first = model.invoke([task])
    assert len(first.tool_calls) == 2 and first.response_metadata["finish_reason"] == "tool_calls"
    results = [ToolMessage("3", tool_call_id=c["id"]) for c in first.tool_calls]
    model.invoke([task, first, *results])
    host = model.bound.shared_host
    assert host.modes == ["TEXT", "KV"]
    host.assert_exact()


def test_a_call_whose_arguments_were_edited_is_shown_as_edited(scripted) -> None:
    """Approval by a human may change arguments under the same id: the generated ids must not come back."""
    answers = iter(["Adding. " + CALL.format(1), "done"])
    model = scripted(lambda _: next(answers)).bind_tools([add])
    first = model.invoke("Add.")
    edited = first.model_copy(update={"tool_calls": [{**first.tool_calls[0], "args": {"a": 777, "b": 2}}]})
    model.invoke([HumanMessage("Add."), edited, ToolMessage("779", tool_call_id=first.tool_calls[0]["id"])])
    host = model.bound.shared_host
    assert '"a": 777' in host.texts[1] and '"a": 1,' not in host.texts[1]
    host.assert_exact()


class Verdict(BaseModel):
    passed: bool
    score: int


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output_with_raw_and_errors(scripted, method: str) -> None:
    said = '{"passed":true,"score":7}'
    if method == "function_calling":
        said = '<tool_call>\n{"name": "Verdict", "arguments": {"passed": true, "score": 7}}\n</tool_call>'
    model = scripted(lambda _: said)
    both = model.with_structured_output(Verdict, method=method, include_raw=True).invoke("Judge.")
    assert both["parsed"] == Verdict(passed=True, score=7) and both["parsing_error"] is None
    assert isinstance(both["raw"], AIMessage)
    short = model.model_copy(update={"max_tokens": 3})
    broken = short.with_structured_output(Verdict, method=method, include_raw=True).invoke("Judge.")
    assert broken["parsed"] is None
    with pytest.raises(InvalidSetting, match="json_schema, function_calling, json_mode"):
        model.with_structured_output(Verdict, method="magic")
    with pytest.raises(TypeError, match="include_raw"):
        model.with_structured_output(Verdict, raw=True)


@pytest.mark.parametrize("strategy", [ToolStrategy, ProviderStrategy])
def test_create_agents_structured_responses(scripted, strategy: type) -> None:
    said = '{"passed":true,"score":7}'
    if strategy is ToolStrategy:
        said = '<tool_call>\n{"name": "Verdict", "arguments": {"passed": true, "score": 7}}\n</tool_call>'
    agent = create_agent(scripted(lambda _: said), response_format=strategy(Verdict))
    assert agent.invoke({"messages": [("user", "Judge.")]})["structured_response"] == Verdict(passed=True, score=7)


def test_spans_carry_usage_and_no_text(scripted) -> None:
    exporter, provider = InMemorySpanExporter(), trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = TracerProvider()
        trace.set_tracer_provider(provider)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    model = scripted(lambda _: "sesame")
    model.invoke("the password is hunter2")
    list(model.stream("the password is hunter2"))
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["chat scripted"] * 2
    assert spans[1].attributes["gen_ai.usage.cache_read.input_tokens"] > 0
    assert not [span for span in spans if "hunter2" in span.to_json() or "sesame" in span.to_json()]


def test_a_schema_without_a_title_and_none(scripted) -> None:
    model = scripted(lambda _: '{"n":1}')
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    assert model.with_structured_output(schema).invoke("n?") == {"n": 1}
    assert model.with_structured_output(method="json_mode").invoke("n?") == {"n": 1}
    with pytest.raises(InvalidSetting, match="with a schema"):
        model.with_structured_output(None)


def test_media_and_odd_messages_are_refused_with_a_reason(scripted) -> None:
    model = scripted()
    image = {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}
    with pytest.raises(InvalidMessage, match=r"human.*image_url.*text only"):
        model.invoke([HumanMessage([{"type": "text", "text": "look"}, image])])
    with pytest.raises(InvalidMessage, match="RemoveMessage"):
        model.invoke([RemoveMessage(id="1")])
    model.invoke([ChatMessage("hi", role="user"), AIMessage([{"type": "text", "text": "a"}, {"type": "tool_use"}])])
    assert "user\nhi" in model.shared_host.texts[0]


def test_names_and_later_system_messages_are_text(scripted) -> None:
    model = scripted()
    model.invoke([SystemMessage("be brief"), HumanMessage("hi", name="ann"), SystemMessage("now"), HumanMessage("yo")])
    assert "system\nbe brief" in model.shared_host.texts[0] and "ann: hi\n\nnow\n\nyo" in model.shared_host.texts[0]


def test_tokens_are_counted_with_the_models_tokenizer(scripted) -> None:
    model = scripted(engine=tiny_engine(max_position_embeddings=256), fit="error")
    messages = [SystemMessage("You write Python."), HumanMessage("Write add.")]
    assert model.get_num_tokens_from_messages(messages) == model.invoke(messages).usage_metadata["input_tokens"]
    assert model.get_num_tokens_from_messages(messages, [add]) > model.get_num_tokens_from_messages(messages)
    assert model.get_num_tokens("hello") == len(model.get_token_ids("hello"))
    long = [HumanMessage(f"message {i} " + "word " * 10) for i in range(20)]
    kept = trim_messages(long, max_tokens=200, token_counter=model, strategy="last")
    assert 0 < len(kept) < 20
    with pytest.raises(ContextOverflow, match="context length exceeded"):
        model.invoke("word " * 300)
    assert model.invoke("hi").content == "hello"


def test_a_host_of_that_name_with_other_settings_is_a_conflict(scripted) -> None:
    model = scripted()
    with pytest.raises(HostConflict, match="budget_bytes"):
        model.model_copy(update={"budget_bytes": 1}).invoke("hi")


def test_hosts_are_kept_until_closed_and_shared_with_others() -> None:
    model = ChatQKVShare(model="tiny", host="kept", precision="native")
    model.shared_host._engine = _ENGINE
    other = registry.open_host(model.settings, "kept")
    threads = [threading.Thread(target=lambda: model.shared_host) for _ in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert registry._users["kept"] == 2
    model.close()
    model.close()
    assert registry._users["kept"] == 1 and registry._hosts["kept"] is other
    registry.release_host(model.settings, "kept")
    assert "kept" not in registry._hosts


def _slow(scripted, **options):
    said = threading.Event()
    return scripted(lambda _: said.set() or "word " * 3000, max_tokens=None, **options), said


async def _assert_free(model) -> None:
    """The host's thread is idle within a token or two, what was cancelled left nothing, and the next call works."""
    host, started = model.shared_host, time.monotonic()
    host.engine._script = lambda _: "free"
    assert (await asyncio.wait_for(model.model_copy(update={"timeout": None}).ainvoke("next"), 10)).content == "free"
    assert [r.generated_tokens < 50 for r in host.reports] == [True] and time.monotonic() - started < 5


async def test_cancelling_the_task_stops_the_decode_loop(scripted) -> None:
    model, said = _slow(scripted)
    task = asyncio.create_task(model.ainvoke("go"))
    await asyncio.to_thread(said.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await _assert_free(model)


async def test_leaving_streams_early_stops_the_decode_loop(scripted) -> None:
    model, _ = _slow(scripted)
    stream = model.astream("go")
    assert await anext(stream)
    await stream.aclose()
    await asyncio.sleep(0)  # LangChain's generator around ours leaves closing it to the loop
    pieces = model.stream("go")
    assert next(pieces)
    pieces.close()
    await _assert_free(model)


async def test_a_timeout_stops_the_decode_loop_and_says_what_to_do(scripted) -> None:
    model, _ = _slow(scripted, timeout=0.2)
    with pytest.raises(TimeoutError, match=r"0\.2 s; raise `timeout`"):
        model.invoke("go")
    with pytest.raises(TimeoutError, match=r"0\.2 s"):
        await model.ainvoke("go")
    with pytest.raises(TimeoutError, match=r"0\.2 s"):
        list(model.stream("go"))
    with pytest.raises(TimeoutError, match=r"0\.2 s"):
        [_ async for _ in model.astream("go")]
    await _assert_free(model)


async def test_turns_that_wait_when_the_host_closes_say_so(scripted) -> None:
    said, go_on = threading.Event(), threading.Event()
    model = scripted(lambda _: (said.set(), go_on.wait(10), "hello")[2])
    first = asyncio.create_task(model.ainvoke("go"))
    await asyncio.to_thread(said.wait, 10)
    waiting = asyncio.create_task(model.ainvoke("next"))
    await asyncio.sleep(0.05)
    closing = asyncio.create_task(asyncio.to_thread(model.shared_host.close))
    await asyncio.sleep(0.05)
    go_on.set()
    assert (await first).content == "hello"
    with pytest.raises(HostClosed, match="before this turn began"):
        await waiting
    await closing


def test_many_threads_and_loops_on_one_object(scripted) -> None:
    model, results = scripted(), []

    def run(i: int) -> None:
        async def ask() -> None:
            results.extend(a.content for a in await asyncio.gather(*(model.ainvoke(f"question {i}") for _ in range(3))))

        asyncio.run(ask())
        results.append(model.invoke(f"question {i}").content)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    [t.start() for t in threads]
    [t.join(60) for t in threads]
    assert results == ["hello"] * 16
    model.shared_host.assert_exact()


@pytest.mark.parametrize("call", ["invoke", "stream", "ainvoke", "astream"])
async def test_every_turn_is_an_event_with_counts_and_no_text(scripted, call: str) -> None:
    recorder = Recorder()
    model = scripted(lambda _: "sesame")

    async def inside(_):
        if call == "astream":
            return [c async for c in model.astream("the password is hunter2")]
        if call == "stream":
            return list(model.stream("the password is hunter2"))
        return (
            await model.ainvoke("the password is hunter2")
            if call == "ainvoke"
            else model.invoke("the password is hunter2")
        )

    await RunnableLambda(inside).ainvoke(None, {"callbacks": [recorder]})
    [(name, data)] = recorder.events
    assert name == "kv_handoff" and data["mode"] == "TEXT" and data["prefilled_tokens"] > 0 and data["handle"]
    shown = f"{recorder.events} {model} {model.reports} {model.shared_host}"
    assert "hunter2" not in shown and "sesame" not in shown


def test_agents_of_one_model_are_isolated_without_a_graph(scripted) -> None:
    model = scripted()
    question = [SystemMessage("You answer at length and with great care, whatever the question."), HumanMessage("Why?")]
    for name in ("coder", "tester", None, "coder"):
        model.bind(agent=name).invoke(question)
    reused = [r.reused_tokens for r in model.reports]
    assert reused[:3] == [0, 0, 0] and reused[3] > 0
    shared = model.model_copy(update={"policy": "all"})
    shared.bind(agent="coder").invoke(question)
    shared.bind(agent="tester").invoke([*question, AIMessage("hello", name="coder")])
    assert (shared.reports[-1].source, shared.reports[-1].mode.value) == ("coder", "KV")


def test_lazy_exports() -> None:
    assert qkvshare_agents.ChatQKVShare is ChatQKVShare
    assert callable(qkvshare_agents.add_cache_handoff) and callable(qkvshare_agents.share_cache)
