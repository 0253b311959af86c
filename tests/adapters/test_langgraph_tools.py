"""An agent that runs in another one's tool: LangGraph gives it the metadata of its caller."""

import re

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from support import tiny_engine

from qkvshare_agents import add_cache_handoff, share_cache

SAME = "You are a helpful assistant, and you help whoever asks you for help."
_ENGINE = tiny_engine()


@tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def tools_in(prompt: str) -> list[str]:
    return re.findall(r'"function": \{"name": "(\w+)"', prompt)


def speak(prompt: str) -> str:
    if "helper" in tools_in(prompt) and "<tool_response>" not in prompt.rsplit("<|im_start|>user", 1)[1]:
        return '<tool_call>\n{"name": "helper", "arguments": {"task": "Help me."}}\n</tool_call>'
    return f"Here is answer {len(prompt)}, and that is it."


@pytest.mark.parametrize("name", ["helper", None])
@pytest.mark.parametrize("how", ["no annotation", "edge", "share_cache", "all"])
def test_an_agent_in_a_tool_is_not_taken_for_its_caller(chat, how: str, name: str | None) -> None:
    model = chat(speak, engine=_ENGINE, **({"policy": "all"} if how == "all" else {}))
    inner = create_agent(model, tools=[add], system_prompt=SAME, **({"name": name} if name else {}))

    @tool
    def helper(task: str) -> str:
        """Helps."""
        return str(inner.invoke({"messages": [HumanMessage(task)]})["messages"][-1].content)

    graph = StateGraph(MessagesState)
    graph.add_node("outer", create_agent(model, tools=[helper], system_prompt=SAME, name="outer"))
    graph.add_node("last", create_agent(model, tools=[], system_prompt=SAME, name="last"))
    graph.add_edge(START, "outer")
    if how == "edge":
        add_cache_handoff(graph, "outer", "last")
    else:
        graph.add_edge("outer", "last")
    if how == "share_cache":
        share_cache(graph)
    graph.compile().invoke({"messages": [HumanMessage("Go.")]}, {"configurable": {"thread_id": "t"}})
    host = model.shared_host
    scopes, members = [turn.scope for turn in host.turns], host.roster.members(host.turns[0].scope)
    assert scopes[0] == scopes[2] != scopes[1]
    assert [tools_in(text) for text in host.texts[:3]] == [["helper"], ["add"], ["helper"]]
    assert all(schema["function"]["name"] == "helper" for member in members.values() for schema in member.tools)
    assert how == "no annotation" or "add" not in tools_in(host.texts[3]), "who is handed over to never met it"
    if name:
        assert host.turns[1].speaker.name == name
    host.assert_exact()
