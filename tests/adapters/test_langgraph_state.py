"""What happens to a graph's state: saved, resumed elsewhere, rewound, edited, interrupted, retried, forked, joined.

In each case KV is found where it exists and is right, the rest is read again, and every turn's logits equal text
replay of the same tokens (`assert_exact`).
"""

import asyncio
import itertools
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from graphs import INSTRUCTIONS, TASK, builder, node, speak, turns
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.errors import NodeTimeoutError
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.types import Command, RetryPolicy, Send, interrupt
from support import tiny_engine

from qkvshare_agents import add_cache_handoff
from qkvshare_agents.store.prefix_tree import SHORTEST_SLICE

_ENGINE = tiny_engine()
THREAD = {"configurable": {"thread_id": "t"}}


def pair(model, **compiled):
    """coder <-> tester, both ways annotated; stops behind the tester."""
    graph = builder(model, "coder", "tester")
    add_cache_handoff(graph, "coder", "tester")
    add_cache_handoff(graph, "tester", "coder", dynamic=True)
    return graph.compile(**compiled)


def ask(app, text: str = TASK, config=THREAD):
    return app.invoke({"messages": [HumanMessage(text)]}, config)["messages"]


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_saved_conversation_goes_on_from_its_kv(chat, kind: str, tmp_path: Path) -> None:
    model = chat(speak, engine=_ENGINE)
    if kind == "memory":
        app = pair(model, checkpointer=InMemorySaver())
        ask(app)
        ask(app, "Now without the modulo operator.")
    else:
        for text in (TASK, "Now without the modulo operator."):
            with SqliteSaver.from_conn_string(str(tmp_path / "state.sqlite")) as saver:
                app = pair(model, checkpointer=saver)  # a graph made anew: the thread is the same
                messages = ask(app, text)
        assert len(messages) == 6
    assert turns(model) == [
        ("coder", "", "TEXT"), ("tester", "coder", "KV"), ("coder", "tester", "KV"), ("tester", "coder", "KV"),
    ]  # fmt: skip
    model.shared_host.assert_exact()


def test_the_state_holds_messages_with_a_handle_and_nothing_else(chat, tmp_path: Path) -> None:
    model = chat(speak, engine=_ENGINE)
    with SqliteSaver.from_conn_string(str(tmp_path / "state.sqlite")) as saver:
        app = pair(model, checkpointer=saver)
        ask(app)
        state = app.get_state(THREAD).values
        assert state.keys() == {"messages"} and "qkvshare" not in str(app.get_state(THREAD).metadata)
        handoff = state["messages"][-1].response_metadata["qkvshare"]
        assert json.loads(json.dumps(handoff)) == handoff and isinstance(handoff["handle"], str)
    stored = (tmp_path / "state.sqlite").stat().st_size
    assert stored < 200_000, "no cache is in there"


RESUME = """
import json, sys
sys.path[:0] = [{tests!r}, {tests!r} + '/adapters']
from graphs import INSTRUCTIONS, TASK, speak
from test_langgraph_state import THREAD, ask, pair
from scripted import ScriptedHost, install
from langgraph.checkpoint.sqlite import SqliteSaver
from qkvshare_agents import ChatQKVShare
host = ScriptedHost(speak)
install(host, "resumed")
model = ChatQKVShare(model="scripted", host="resumed", precision="native", members=INSTRUCTIONS if {declared} else {{}})
with SqliteSaver.from_conn_string({path!r}) as saver:
    app = pair(model, checkpointer=saver)
    messages = ask(app, "Go on.")
host.assert_exact()
print(json.dumps([[r.agent, r.mode.value, r.reused_tokens, r.reasons] for r in host.reports]))
print(len(messages))
"""


@pytest.mark.parametrize("declared", [True, False])
def test_a_new_process_replays_the_text_and_goes_on_with_kv(chat, tmp_path: Path, declared: bool) -> None:
    """Instructions that were declared give the prompts of before; others are unknown until their agent's call."""
    path = str(tmp_path / "state.sqlite")
    with SqliteSaver.from_conn_string(path) as saver:
        ask(pair(chat(speak, engine=_ENGINE), checkpointer=saver))
    code = RESUME.format(tests=str(Path(__file__).parents[1]), path=path, declared=declared)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    reports, count = done.stdout.strip().splitlines()
    (first, second) = json.loads(reports)
    assert first[:3] == ["coder", "TEXT", 0] and "stored KV agrees with 0 of" in first[3][0]
    assert second[1] == ("KV" if declared else "PARTIAL") and second[2] > 0 and count == "6"


def test_time_travel_goes_on_from_the_kv_of_then(chat) -> None:
    model = chat(speak, engine=_ENGINE)
    app = pair(model, checkpointer=InMemorySaver())
    ask(app)
    ask(app, "Now without the modulo operator.")
    before = next(s for s in app.get_state_history(THREAD) if s.next == ("tester",) and len(s.values["messages"]) == 2)
    app.invoke(None, before.config)
    report = model.reports[-1]
    assert report.agent == "tester" and report.mode.value == "KV"
    assert report.prompt_tokens == model.reports[1].prompt_tokens and report.prefilled_tokens < 20
    model.shared_host.assert_exact()


def test_an_edited_answer_ends_the_match_there(chat) -> None:
    model = chat(speak, engine=_ENGINE)
    app = pair(model, checkpointer=InMemorySaver())
    messages = ask(app)
    edited = AIMessage("def is_even(n): return not n & 1", id=messages[1].id, name="coder")
    app.update_state(THREAD, {"messages": [edited]})
    ask(app, "And now?")
    report, text = model.reports[2], model.shared_host.texts[2]
    assert "return not n & 1" in text and messages[1].content not in text
    assert report.mode.value == "PARTIAL" and 0 < report.reused_tokens < model.reports[0].prompt_tokens + 16
    assert "edited" in report.reasons[0]
    model.shared_host.assert_exact()


def test_removed_messages_give_no_stale_answer(chat) -> None:
    model = chat(speak, engine=_ENGINE)
    app = pair(model, checkpointer=InMemorySaver())
    ask(app)
    app.update_state(THREAD, {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES), HumanMessage("Something else.")]})
    ask(app, "What is it?")
    assert TASK not in model.shared_host.texts[2]
    assert model.reports[2].reused_tokens < model.reports[0].prompt_tokens
    model.shared_host.assert_exact()


def test_an_interrupted_node_runs_again_on_its_own_kv(chat) -> None:
    model = chat(speak, engine=_ENGINE)

    def tester(state: MessagesState) -> dict:
        answer = node(model, "tester")(state)
        return {"messages": [*answer["messages"], HumanMessage(interrupt("Is it good?"), name="human")]}

    graph = builder(model, "coder")
    graph.add_node("tester", tester)
    add_cache_handoff(graph, "coder", "tester")
    app = graph.compile(checkpointer=InMemorySaver())
    ask(app)
    pages = model.shared_host.store.page_count
    state = app.invoke(Command(resume="It is."), THREAD)
    assert turns(model) == [("coder", "", "TEXT"), ("tester", "coder", "KV"), ("tester", "coder", "KV")]
    assert model.reports[-1].prefilled_tokens < SHORTEST_SLICE and model.shared_host.store.page_count == pages
    assert state["messages"][-1].content == "It is."
    model.shared_host.assert_exact()


def test_a_retried_node_reads_nothing_again(chat) -> None:
    model, failures = chat(speak, engine=_ENGINE), iter([True, True, False])

    def tester(state: MessagesState) -> dict:
        answer = node(model, "tester")(state)
        if next(failures):
            raise ConnectionError("a tool is out of reach")
        return answer

    graph = builder(model, "coder")
    graph.add_node("tester", tester, retry_policy=RetryPolicy(max_attempts=3, initial_interval=0.01))
    add_cache_handoff(graph, "coder", "tester")
    graph.compile().invoke({"messages": [HumanMessage(TASK)]})
    assert [r.prefilled_tokens < SHORTEST_SLICE for r in model.reports[2:]] == [True, True]
    model.shared_host.assert_exact()


def slowly(prompt: str) -> str:
    return "word " * 3000 if "slow" in prompt.rpartition("user\n")[2] else speak(prompt)


async def test_a_node_that_times_out_stops_and_leaves_the_kv_right(chat) -> None:
    model = chat(slowly, engine=_ENGINE, max_tokens=None)
    graph = StateGraph(MessagesState)

    def answer(name: str):
        async def run(state: MessagesState) -> dict:
            return {"messages": [await model.ainvoke(state["messages"])]}

        return run

    graph.add_node("coder", answer("coder"))
    graph.add_node("tester", answer("tester"), timeout=0.3)
    graph.add_edge(START, "coder")
    add_cache_handoff(graph, "coder", "tester", instruction="Be slow.")
    with pytest.raises(NodeTimeoutError):
        await graph.compile().ainvoke({"messages": [HumanMessage(TASK)]})
    await asyncio.wait_for(model.ainvoke("hi"), 5)
    assert [r.agent for r in model.reports] == ["coder", ""], "the turn that timed out was stopped"
    model.shared_host.assert_exact()


async def test_cancelling_one_branch_leaves_the_others_right(chat) -> None:
    """Four branches on one host: one is slow and is cancelled by its own timeout, three go on from the planner's KV."""
    model = chat(slowly, engine=_ENGINE, max_tokens=None)
    outcomes: dict[str, str] = {}

    async def worker(state: dict) -> dict:
        call = model.ainvoke([*state["messages"], HumanMessage(f"Be {state['manner']}.")])
        try:
            outcomes[state["manner"]] = (await asyncio.wait_for(call, 2 if state["manner"] == "slow" else None)).content
        except TimeoutError:
            outcomes[state["manner"]] = "cancelled"
        return {}

    def fan_out(state: MessagesState) -> list[Send]:
        return [Send("worker", {**state, "manner": manner}) for manner in ("slow", "calm", "brief", "exact")]

    async def planner(state: MessagesState) -> dict:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("planner", planner)
    graph.add_node("worker", worker)
    graph.add_edge(START, "planner")
    add_cache_handoff(graph, "planner", "worker", path=fan_out)
    await graph.compile().ainvoke({"messages": [HumanMessage(TASK)]})
    assert outcomes.pop("slow") == "cancelled"
    assert len(outcomes) == 3 and all(text.startswith("This is what somebody") for text in outcomes.values())
    assert turns(model)[1:] == [("worker", "planner", "KV")] * 3
    model.shared_host.assert_exact()


def test_parallel_branches_in_threads_join(chat) -> None:
    """planner -> coder, tester in parallel -> reviewer: the branches fork the planner's KV, the join goes on from
    the first branch's and reads the rest."""
    model = chat(speak, engine=_ENGINE)
    graph = builder(model, "planner", "coder", "tester", "reviewer")
    add_cache_handoff(graph, "planner", ["coder", "tester"])
    add_cache_handoff(graph, ["coder", "tester"], "reviewer", instruction="Weigh both.")
    graph.compile().invoke({"messages": [HumanMessage(TASK)]})
    told = turns(model)
    assert told[0] == ("planner", "", "TEXT") and sorted(told[1:3]) == [
        ("coder", "planner", "KV"),
        ("tester", "planner", "KV"),
    ]
    assert told[3] == ("reviewer", "coder", "PARTIAL")
    text = model.shared_host.texts[3]
    assert all(f"[{name}] {INSTRUCTIONS[name]}" in text for name in INSTRUCTIONS) and "Weigh both." in text
    model.shared_host.assert_exact()


def test_many_threads_of_one_graph_at_once(chat) -> None:
    model = chat(speak, engine=_ENGINE)
    app = pair(model, checkpointer=InMemorySaver())

    def run(i: int) -> None:
        ask(app, f"{TASK} This is task {i}.", {"configurable": {"thread_id": str(i)}})

    workers = [threading.Thread(target=run, args=(i,)) for i in range(6)]
    [w.start() for w in workers]
    [w.join(60) for w in workers]
    assert sorted(turns(model)) == [("coder", "", "TEXT")] * 6 + [("tester", "coder", "KV")] * 6
    model.shared_host.assert_exact()


def test_an_evicted_conversation_is_read_again(chat) -> None:
    model = chat(speak, engine=_ENGINE)
    app = pair(model, checkpointer=InMemorySaver())
    ask(app)
    model.shared_host.store.clear()
    ask(app, "And now?")
    assert turns(model)[2:] == [("coder", "", "TEXT"), ("tester", "coder", "KV")]
    model.shared_host.assert_exact()


def test_three_agents_in_a_loop_compute_each_token_at_most_twice(chat) -> None:
    """As tokens once when generated or read, and never again, where text replay reads the conversation every turn."""
    model, names = chat(speak, engine=_ENGINE), ("coder", "tester", "reviewer")
    graph = builder(model, *names)
    for source, target in itertools.pairwise(names):
        add_cache_handoff(graph, source, target)
    add_cache_handoff(
        graph,
        "reviewer",
        "coder",
        path=lambda s: END if len(s["messages"]) > 6 else "coder",
        path_map=["coder", END],
    )
    graph.compile().invoke({"messages": [HumanMessage(TASK)]})
    reports = model.reports
    assert len(reports) == 6 and [r.mode.value for r in reports[1:]] == ["KV"] * 5
    final = reports[-1].prompt_tokens
    assert sum(r.prefilled_tokens for r in reports) <= final < sum(r.prompt_tokens for r in reports) / 2
    model.shared_host.assert_exact()


def test_the_answers_are_those_of_text_replay(chat, demo_engine) -> None:
    """The real model, exact pages: the same graph with and without handoff says the same, word for word."""
    said = []
    for handoff in (True, False):
        model = chat(speak, max_tokens=12)
        host = model.shared_host
        host._engine, settings = demo_engine, host.settings
        object.__setattr__(settings, "handoff", handoff)
        model = model.model_copy(update={"handoff": handoff})
        app = pair(model, checkpointer=InMemorySaver())
        said.append([m.content for m in [*ask(app), *ask(app, "Once more.")]])
        assert [r.mode.value for r in model.reports] == (["TEXT", "KV", "KV", "KV"] if handoff else ["TEXT"] * 4)
        host._engine = None
    assert said[0] == said[1]
