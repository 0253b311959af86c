"""Which of AutoGen's agents is calling a model.

A client is not told. The runtime knows the agent whose handler runs, but not the agent that this one runs inside of
itself or as a tool, and texts can't tell either: many agents have one and the same system message. The objects on the
call stack do.
"""

import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from autogen_agentchat.base import ChatAgent
from autogen_core import AgentId, BaseAgent, MessageHandlerContext
from autogen_core.tools import BaseTool


@dataclass(frozen=True)
class Caller:
    """scope: the team's id, "" outside of a team; of an agent in an agent or in a tool, a scope of its own. name: of
    the agent, None if nobody can tell. running: whose handler runs, if that may or may not be the caller."""

    scope: str
    name: str | None
    running: str | None = None


def find_caller() -> Caller:
    """Whoever called the function that calls this one."""
    handler = _handler()
    stack = [*_stack(handler)][::-1]
    team, running = (handler.key, handler.type.removesuffix(f"_{handler.key}")) if handler else ("", None)
    if not stack:  # a task of the handler's agent, or of one that it runs
        return Caller(team, None, running)
    outer = [(ChatAgent, running)] if running else []
    path = [kind_and_name for kind_and_name, _ in groupby([*outer, *(s for s in stack if s[1])])]
    kind, name = path[-1]
    outside = [n for _, n in (path[:-1] if kind is ChatAgent else path)]
    return Caller(json.dumps([team, *outside]) if outside else team, name if kind is ChatAgent else None)


def _stack(handler: AgentId | None) -> Iterator[tuple[type, str]]:
    """Agents and tools that are being called, innermost first, up to the agent whose handler runs ("": that one)."""
    frame = inspect.currentframe()
    while frame := frame.f_back if frame else None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, BaseAgent) and handler is not None and owner.id == handler:
            yield ChatAgent, ""
            return
        if isinstance(owner, ChatAgent):
            yield ChatAgent, owner.name
        elif isinstance(owner, BaseTool):
            yield BaseTool, owner.name


def _handler() -> AgentId | None:
    """The agent whose handler AutoGen's runtime runs now, if any."""
    try:
        return MessageHandlerContext.agent_id()
    except RuntimeError:
        return None
