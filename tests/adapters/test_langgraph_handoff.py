"""What an annotated edge lets through, and what nothing lets through. Scripted words, real KV."""

import operator
from typing import Annotated, Literal, TypedDict

import pytest
from graphs import INSTRUCTIONS, TASK, builder, node, speak, turns
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langgraph.graph import END, START, MessagesState, StateGraph, add_messages
from langgraph.types import Command, Send
from langgraph_supervisor import create_supervisor
from langgraph_swarm import create_handoff_tool, create_swarm
from support import tiny_engine

from qkvshare_agents import add_cache_handoff, share_cache
from qkvshare_agents.errors import InvalidSetting

_ENGINE = tiny_engine()


def run(graph, task: str = TASK, **config):
    return graph.compile().invoke({"messages": [HumanMessage(task)]}, config)


def test_the_target_continues_from_the_sources_kv(chat) -> None:
    model = chat(speak, engine=_ENGINE)
    graph = builder(model, "coder", "tester")
    assert add_cache_handoff(graph, "coder", "tester", instruction="Three cases.") is graph
    state = run(graph)
    assert turns(model) == [("coder", "", "TEXT"), ("tester", "coder", "KV")]
    host = model.shared_host
    assert (
        host.texts[1]
        .rstrip()
        .endswith(f"[tester] {INSTRUCTIONS['tester']} Three cases.<|im_end|>\n<|im_start|>assistant")
    )
    first, second = (m.response_metadata["qkvshare"] for m in state["messages"][1:])
    assert first["handle"] != second["handle"] and second["agent"] == "tester" and second["source"] == "coder"
    assert second["prefilled_tokens"] < 80 < second["reused_tokens"]
    host.assert_exact()


async def test_tracing_shows_every_handoff_and_no_text(chat) -> None:
    model = chat(lambda _: "sesame", engine=_ENGINE)
    graph = builder(model, "coder", "tester")
    add_cache_handoff(graph, "coder", "tester")
    messages = {"messages": [HumanMessage("The password is hunter2.")]}
    seen = [e async for e in graph.compile().astream_events(messages, version="v2") if e["event"] == "on_custom_event"]
    assert [(e["name"], e["metadata"]["langgraph_node"]) for e in seen] == [
        ("kv_handoff", "coder"),
        ("kv_handoff", "tester"),
    ]
    handoff = seen[1]["data"]
    assert (handoff["agent"], handoff["source"], handoff["mode"]) == ("tester", "coder", "KV")
    assert handoff["payload_bytes"] > 0 and handoff["import_ms"] > 0
    assert "hunter2" not in str([e["data"] for e in seen]) and "sesame" not in str([e["data"] for e in seen])


def test_without_an_annotation_nothing_crosses(chat) -> None:
    """Equal system text and equal messages, so that the tokens agree and only isolation keeps the KV apart."""
    model = chat(lambda _: "A sentence that both of them say.", engine=_ENGINE)
    graph = StateGraph(MessagesState)
    for name in ("one", "two", "three"):
        graph.add_node(name, lambda state: {"messages": [model.invoke([HumanMessage(TASK * 3)])]})
    graph.add_edge(START, "one")
    graph.add_edge("one", "two")
    graph.add_edge("two", "three")
    run(graph)
    assert [r.reused_tokens for r in model.reports] == [0, 0, 0]
    pages = model.shared_host.store.page_count
    run(graph)
    assert all(r.reused_tokens > 0 for r in model.reports[3:]), "each finds its own"
    assert model.shared_host.store.page_count == pages, "nothing is stored twice"


def test_isolated_agents_do_not_see_cues_but_see_what_was_said(chat) -> None:
    model = chat(speak, engine=_ENGINE)
    graph = builder(model, "coder", "tester")
    graph.add_edge("coder", "tester")
    run(graph)
    first, second = model.shared_host.texts
    assert first.startswith(f"<|im_start|>system\n{INSTRUCTIONS['coder']}<|im_end|>")
    assert second.startswith(f"<|im_start|>system\n{INSTRUCTIONS['tester']}<|im_end|>")
    assert "coder: This is what somebody has to say" in second and INSTRUCTIONS["coder"] not in second
    assert "[coder]" not in first + second and "[tester]" not in first + second
    assert "what coder said is text to this agent: no add_cache_handoff" in model.reports[1].reasons[1]


def test_agents_that_say_the_same_are_told_apart_by_name(chat) -> None:
    model = chat(lambda _: "A sentence that all of them say, word for word.", engine=_ENGINE)
    graph = builder(model, "coder", "tester", "reviewer")
    graph.add_edge("coder", "tester")
    graph.add_edge("tester", "reviewer")
    state = run(graph)
    graph.compile().invoke({"messages": state["messages"]})
    text = model.shared_host.texts[3]
    assert text.count("<|im_start|>assistant\nA sentence") == 1
    assert "tester: A sentence" in text and "reviewer: A sentence" in text


def test_a_handoff_is_one_way(chat) -> None:
    """coder -> tester is annotated, tester -> coder is not: the coder goes on from its own KV only, and the
    tester's words are text to it."""
    model = chat(speak, engine=_ENGINE)
    graph = builder(model, "coder", "tester")
    add_cache_handoff(graph, "coder", "tester")
    rounds = iter([1, 2, 3])
    graph.add_conditional_edges("tester", lambda _: END if next(rounds) == 2 else "coder", ["coder", END])
    run(graph)
    assert [agent for agent, _, _ in turns(model)] == ["coder", "tester", "coder", "tester"]
    third = model.reports[2]
    assert third.source == "coder" and third.mode.value == "KV"
    text = model.shared_host.texts[2]
    assert "tester: This is what tester has to say" in text and "[tester]" not in text
    assert INSTRUCTIONS["tester"] not in text
    fourth = model.reports[3]
    assert fourth.source in ("coder", "tester") and fourth.reused_tokens > 0
    model.shared_host.assert_exact()


def test_what_was_handed_over_counts_as_ones_own(chat) -> None:
    model = chat(speak, engine=_ENGINE)
    graph = builder(model, "planner", "coder", "tester")
    add_cache_handoff(graph, "planner", "coder")
    add_cache_handoff(graph, "coder", "tester")
    run(graph)
    assert turns(model) == [("planner", "", "TEXT"), ("coder", "planner", "KV"), ("tester", "coder", "KV")]
    assert "[planner]" in model.shared_host.texts[2]


def test_kv_passes_along_edges_only_not_through_the_whole_group(chat) -> None:
    """planner -> coder and planner -> tester: the tester, who comes after the coder, reads no KV of the coder's."""
    model = chat(speak, engine=_ENGINE)
    graph = builder(model, "planner", "coder", "tester")
    add_cache_handoff(graph, "planner", "coder")
    add_cache_handoff(graph, "planner", "tester", dynamic=True)
    graph.add_edge("coder", "tester")
    run(graph)
    assert turns(model)[2] == ("tester", "planner", "KV")
    text = model.shared_host.texts[2]
    assert "coder: This is what coder has to say" in text and INSTRUCTIONS["coder"] not in text
    model.shared_host.assert_exact()


def test_policy_text_shows_the_answers_and_passes_no_kv(chat) -> None:
    model = chat(speak, engine=_ENGINE)
    graph = builder(model, "coder", "tester")
    add_cache_handoff(graph, "coder", "tester", policy="text", instruction="Be strict.")
    run(graph)
    report = model.reports[1]
    assert report.reused_tokens == 0 and report.mode.value == "TEXT" and "policy 'kv'" in report.reasons[0]
    assert "[coder]" in model.shared_host.texts[1] and "Be strict." in model.shared_host.texts[1]
    assert "text_from = coder" in graph.compile().get_graph().draw_mermaid()


def test_the_stock_layout_keeps_instructions_private_and_own_kv_only(chat) -> None:
    model = chat(speak, engine=_ENGINE, layout="stock")
    graph = builder(model, "coder", "tester")
    add_cache_handoff(graph, "coder", "tester")
    run(graph)
    assert model.shared_host.texts[1].startswith(f"<|im_start|>system\n{INSTRUCTIONS['tester']}<|im_end|>")
    assert "coder: This is what" in model.shared_host.texts[1] and model.reports[1].reused_tokens == 0


@pytest.mark.parametrize("how", ["edge", "helper", "model"])
def test_policy_all_shares_among_all(chat, how: str) -> None:
    model = chat(speak, engine=_ENGINE, policy="all" if how == "model" else None)
    graph = builder(model, "planner", "coder", "tester")
    graph.add_edge("planner", "coder")
    if how == "edge":
        add_cache_handoff(graph, "coder", "tester", policy="all")
    else:
        graph.add_edge("coder", "tester")
    if how == "helper":
        assert share_cache(graph) is graph
    run(graph)
    assert turns(model) == [("planner", "", "TEXT"), ("coder", "planner", "KV"), ("tester", "coder", "KV")]


def test_equal_names_in_other_graphs_and_threads_do_not_mix(chat) -> None:
    model = chat(speak, engine=_ENGINE)
    graphs = [builder(model, "coder", "tester") for _ in range(2)]
    for graph in graphs:
        add_cache_handoff(graph, "coder", "tester")
        run(graph)
    assert turns(model)[2:] == [("coder", "", "TEXT"), ("tester", "coder", "KV")]
    for thread in "xy":
        run(graphs[0], configurable={"thread_id": thread})
    assert [r.reused_tokens > 0 for r in model.reports[4:]] == [False, True, False, True]


def test_names_and_policies_are_checked_with_the_choices(chat) -> None:
    graph = builder(chat(speak, engine=_ENGINE), "coder", "tester")
    with pytest.raises(InvalidSetting, match=r"source 'codr': the nodes are coder, tester; add the node first"):
        add_cache_handoff(graph, "codr", "tester")
    with pytest.raises(InvalidSetting, match=r"target '__end__': the nodes are coder, tester; nothing is computed"):
        add_cache_handoff(graph, "coder", END)
    with pytest.raises(InvalidSetting, match="the policies are kv, text, all"):
        add_cache_handoff(graph, "coder", "tester", policy="copy")
    with pytest.raises(InvalidSetting, match="is empty"):
        add_cache_handoff(graph, "coder", [])
    with pytest.raises(InvalidSetting, match="one of them"):
        add_cache_handoff(graph, "coder", "tester", dynamic=True, path=lambda _: "tester")
    with pytest.raises(InvalidSetting, match="path_map needs path"):
        add_cache_handoff(graph, "coder", "tester", path_map={"x": "tester"})
    with pytest.raises(InvalidSetting, match=r"CompiledStateGraph.*before compile"):
        add_cache_handoff(graph.compile(), "coder", "tester")
    with pytest.raises(TypeError):
        add_cache_handoff(graph, "coder", "tester", "an instruction")
    assert not graph.nodes["tester"].metadata and ("coder", "tester") not in graph.edges


def test_edges_are_drawn_and_the_users_metadata_stays(chat) -> None:
    model = chat(speak, engine=_ENGINE)
    graph = builder(model, "planner", "coder", "tester")
    mine = {"owner": "me"}
    graph.add_node("reviewer", node(model, "reviewer"), metadata=mine)
    add_cache_handoff(graph, ["coder", "tester"], "reviewer")
    add_cache_handoff(graph, "planner", ["coder", "tester"], instruction="A secret.")
    add_cache_handoff(graph, "reviewer", "planner", dynamic=True)
    drawn = graph.compile().get_graph().draw_mermaid()
    assert "coder --> reviewer" in drawn and "planner --> tester" in drawn and "reviewer -.-> planner" in drawn
    assert "kv_from = coder, tester" in drawn and "kv_from = planner" in drawn and "owner = me" in drawn
    assert mine == {"owner": "me"}
    assert "secret" not in drawn


def test_conditional_edges_with_a_path(chat) -> None:
    model = chat(speak, engine=_ENGINE)
    graph = builder(model, "coder", "tester", "reviewer")
    add_cache_handoff(
        graph, "coder", ["tester", "reviewer"], path=lambda _: "good", path_map={"good": "reviewer", "bad": "tester"}
    )
    assert "coder -. &nbsp;good&nbsp; .-> reviewer" in graph.compile().get_graph().draw_mermaid()
    run(graph)
    assert turns(model) == [("coder", "", "TEXT"), ("reviewer", "coder", "KV")]


def test_command_goto(chat) -> None:
    model = chat(speak, engine=_ENGINE)
    graph = StateGraph(MessagesState)

    def coder(state: MessagesState) -> Command[Literal["tester", "reviewer"]]:
        return Command(goto="tester", update=node(model, "coder")(state))

    graph.add_node("coder", coder)
    for name in ("tester", "reviewer"):
        graph.add_node(name, node(model, name))
    graph.add_edge(START, "coder")
    add_cache_handoff(graph, "coder", ["tester", "reviewer"], dynamic=True)
    run(graph)
    assert turns(model) == [("coder", "", "TEXT"), ("tester", "coder", "KV")]
    assert graph.compile().get_graph().draw_mermaid().count("coder -.-> tester") == 1


class Topics(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    topics: list[str]
    seen: Annotated[list[str], operator.add]


def test_send_fans_out_and_branches_share_pages(chat) -> None:
    model = chat(speak, engine=_ENGINE)
    graph = StateGraph(Topics)
    graph.add_node("planner", node(model, "planner", INSTRUCTIONS["planner"] * 6))

    def worker(state: Topics) -> dict[str, list[str]]:
        model.invoke([*state["messages"], HumanMessage(f"Your topic is {state['topics'][0]}.")])
        return {"seen": state["topics"]}

    def fan_out(state: Topics) -> list[Send]:
        return [Send("worker", {**state, "topics": [topic]}) for topic in state["topics"]]

    graph.add_node("worker", worker)
    graph.add_edge(START, "planner")
    add_cache_handoff(graph, "planner", "worker", path=fan_out)
    host = model.shared_host
    graph.compile().invoke({"messages": [HumanMessage(TASK)], "topics": list("abcd")})
    assert turns(model)[1:] == [("worker", "planner", "KV")] * 4
    planned = model.reports[0].prompt_tokens + model.reports[0].generated_tokens
    added = sum(r.prefilled_tokens + r.generated_tokens for r in model.reports[1:])
    shape = host.engine.shape
    per_token = shape.fp16_bytes(1) * 2  # native float32
    # the fork copies at most the open page and what could not be sliced; copies of the plan would be 4 * planned
    assert host.store.nbytes <= per_token * (planned + added + 4 * 64) < per_token * (4 * planned + added)
    host.assert_exact()


def test_subgraphs_inside_and_outside(chat) -> None:
    """Annotated inside of a subgraph; and a node that is a graph itself, as source of an annotated edge."""
    model = chat(speak, engine=_ENGINE)
    inner = builder(model, "coder", "tester")
    add_cache_handoff(inner, "coder", "tester")
    outer = StateGraph(MessagesState)
    for team in ("red", "blue"):
        outer.add_node(team, inner.compile())
    outer.add_edge(START, "red")
    outer.add_edge("red", "blue")
    run(outer)
    # the blue tester sees the red tester's answer as one of a tester, the blue coder as text: there their prompts part
    told = [("coder", "", "TEXT"), ("tester", "coder", "KV"), ("coder", "", "TEXT"), ("tester", "coder", "PARTIAL")]
    assert turns(model) == told
    assert model.reports[2].reused_tokens == 0, "the same graph in another node is another group"

    model = chat(speak, engine=_ENGINE)
    outer = StateGraph(MessagesState)
    outer.add_node("team", builder(model, "coder").compile())
    outer.add_node("tester", node(model, "tester"))
    outer.add_edge(START, "team")
    add_cache_handoff(outer, "team", "tester")
    run(outer)
    assert turns(model) == [("team", "", "TEXT"), ("tester", "team", "KV")]


def test_agents_inside_of_an_annotated_node_stay_isolated(chat) -> None:
    """Both continue from the planner's KV, which is annotated; they say and see the same and still read nothing of
    each other's."""
    model = chat(speak, engine=_ENGINE)
    asked = [HumanMessage("Another question, which the planner was not asked, and which is rather long. " * 3)]
    team = StateGraph(MessagesState)
    for name in ("one", "two"):
        team.add_node(name, lambda _: {"messages": []} if model.invoke(asked) else {})
    team.add_edge(START, "one")
    team.add_edge("one", "two")
    graph = builder(model, "planner")
    graph.add_node("team", team.compile())
    graph.add_node("tester", lambda _: {"messages": [model.invoke(asked)]})
    add_cache_handoff(graph, "planner", "team")
    add_cache_handoff(graph, "team", "tester")
    run(graph)
    one, two, tester = (report.reused_tokens for report in model.reports[1:])
    assert 0 < one == two < tester - 64


@pytest.mark.parametrize("named", [True, False])
def test_create_agent(chat, named: bool) -> None:
    """Its answers are named after the agent, which may be called otherwise than the node; its node is `model`."""
    model = chat(speak, engine=_ENGINE)
    graph = StateGraph(MessagesState)
    for name in ("coder", "tester"):
        agent = create_agent(model, system_prompt=INSTRUCTIONS[name], name=f"{name}_agent" if named else None)
        graph.add_node(name, agent)
    graph.add_edge(START, "coder")
    add_cache_handoff(graph, "coder", "tester")
    state = run(graph)
    assert turns(model) == [("coder", "", "TEXT"), ("tester", "coder", "KV")]
    assert f"[tester] {INSTRUCTIONS['tester']}" in model.shared_host.texts[1]
    assert [m.name for m in state["messages"][1:]] == (["coder_agent", "tester_agent"] if named else [None, None])


@pytest.mark.parametrize("style", ["name", "human", "text"])
def test_hand_written_nodes_that_keep_only_the_text(chat, style: str) -> None:
    model = chat(speak, engine=_ENGINE)
    graph = StateGraph(MessagesState)

    def coder(state: MessagesState) -> dict:
        text = node(model, "coder")(state)["messages"][0].content
        kept = {"name": AIMessage(text, name="coder"), "human": HumanMessage(text, name="coder"), "text": ("ai", text)}
        return {"messages": [kept[style]]}

    graph.add_node("coder", coder)
    graph.add_node("tester", node(model, "tester"))
    graph.add_edge(START, "coder")
    add_cache_handoff(graph, "coder", "tester")
    run(graph)
    assert turns(model) == [("coder", "", "TEXT"), ("tester", "coder", "KV")]


def call(tool: str) -> str:
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {{}}}}\n</tool_call>'


def test_swarm_handoff_tools(chat) -> None:
    def script(prompt: str) -> str:
        asked = prompt.rpartition("<|im_start|>user\n")[2]
        return call("transfer_to_tester") if "[coder]" in asked else speak(prompt)

    model = chat(script, engine=_ENGINE)
    agents = [
        create_agent(model, tools=[create_handoff_tool(agent_name=other)], system_prompt=INSTRUCTIONS[name], name=name)
        for name, other in (("coder", "tester"), ("tester", "coder"))
    ]
    graph = create_swarm(agents, default_active_agent="coder")
    add_cache_handoff(graph, "coder", "tester", dynamic=True)
    add_cache_handoff(graph, "tester", "coder", dynamic=True)
    saved = graph.compile().invoke({"messages": [HumanMessage(TASK)]})
    saved["messages"].append(HumanMessage("Once more, and better than before."))
    graph.compile().invoke(saved)
    assert turns(model) == [("coder", "", "TEXT"), ("tester", "coder", "KV"), ("tester", "tester", "KV")]
    text = model.shared_host.texts[1]
    assert "Successfully transferred to tester" in text and f"[tester] {INSTRUCTIONS['tester']}" in text
    assert "transfer_to_coder" in text and "transfer_to_tester" in text
    model.shared_host.assert_exact()


def test_supervisor_handoff_tools(chat) -> None:
    said = iter([call("transfer_to_coder"), "def is_even(n): return n % 2 == 0", "It is done."])
    model = chat(lambda _: next(said), engine=_ENGINE)
    coder = create_agent(model, system_prompt=INSTRUCTIONS["coder"], name="coder")
    graph = create_supervisor([coder], model=model, prompt="You lead. Hand the work to the coder.")
    add_cache_handoff(graph, "supervisor", "coder", dynamic=True)
    add_cache_handoff(graph, "coder", "supervisor", dynamic=True)
    state = run(graph)
    assert [agent for agent, _, _ in turns(model)] == ["supervisor", "coder", "supervisor"]
    assert turns(model)[2][1:] == ("coder", "PARTIAL") or turns(model)[2][1:] == ("coder", "KV")
    assert state["messages"][-1].content == "It is done."
    assert "Transferring back to supervisor" in model.shared_host.texts[2]
    model.shared_host.assert_exact()
