"""Small LangGraph graphs whose agents speak by script."""

from collections.abc import Callable
from typing import Any

from langchain_core.messages import AnyMessage, SystemMessage
from langgraph.graph import START, MessagesState, StateGraph

from qkvshare_agents import ChatQKVShare

INSTRUCTIONS = {
    "planner": "Plan in one sentence what is to be done, and who does it.",
    "coder": "Write the function and nothing else, with a short docstring.",
    "tester": "Now write a test for the function that the coder wrote.",
    "reviewer": "Say what could be better about the function and its test.",
}
TASK = "Write is_even(n) in Python, and make it fast as well as easy to read, please."


def speak(prompt: str) -> str:
    """Every agent says something of its own, long enough for a page."""
    asked = prompt.rpartition("<|im_start|>user\n")[2]
    name = next((n for n in INSTRUCTIONS if f"[{n}]" in asked), "somebody")
    return f"This is what {name} has to say about it, in {len(prompt)} letters, and it is not short at all."


def node(model: ChatQKVShare, name: str, instruction: str | None = None) -> Callable[[Any], dict[str, Any]]:
    """A hand-written node: its answer has no name."""

    def run(state: Any) -> dict[str, Any]:
        text = INSTRUCTIONS.get(name, f"You are {name}.") if instruction is None else instruction
        messages: list[AnyMessage] = [SystemMessage(text), *state["messages"]]
        return {"messages": [model.invoke(messages)]}

    return run


def builder(model: ChatQKVShare, *names: str, state: type = MessagesState) -> StateGraph:
    """Nodes without edges, except from START to the first."""
    made = StateGraph(state)
    for name in names:
        made.add_node(name, node(model, name))
    made.add_edge(START, names[0])
    return made


def turns(model: ChatQKVShare) -> list[tuple[str, str, str]]:
    """(agent, whose answer is the last in the KV it started from, mode) of every turn."""
    return [(r.agent, r.source, r.mode.value) for r in model.reports]
