"""Who is calling a chat model, and what it may see and continue from.

LangChain tells a model nothing about the agent behind a call but the run's metadata. Isolation is the default:
an agent without annotation sees no other agent's cues and reads no KV but its own.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from langchain_core.callbacks import BaseRunManager
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import ensure_config

from qkvshare_adapters.langgraph.annotation import Annotation
from qkvshare_agents.prompt.layout import Layout, Message, View
from qkvshare_agents.prompt.ledger import Ledger
from qkvshare_agents.prompt.members import hash_name
from qkvshare_agents.turns.access import Access

_AGENT_NODES = ("model", "agent")  # what create_agent and its predecessor call the node with the model
_TOOLS = "tools"  # what both call the node that runs tools
_ISOLATED = "this agent has no cache handoff from them, see add_cache_handoff"
_ELSEWHERE = "no edge with policy 'kv' leads from them to this agent"


@dataclass(frozen=True)
class Caller:
    """An agent in a conversation. thread: of the checkpointer, "" without one. scope: the group in it that the agent
    belongs to. shared: cues and tools of the group's members are laid out together. group: what equal groups have in
    common, "" outside of one."""

    name: str
    thread: str
    scope: str
    view: View
    access: Access
    shared: bool
    group: str = ""

    def sees(self, name: str) -> bool:
        """Whether answers of this agent are answers to it; else they are text."""
        return self.view.visible is None or name in self.view.visible

    def author(self, message: AIMessage, key: str, ledger: Ledger) -> str:
        """Who wrote an answer. Hand-written nodes set no name and may keep nothing but the text."""
        told = message.response_metadata.get("qkvshare")
        names = [message.name or "", str(told.get("agent", "")) if isinstance(told, Mapping) else ""]
        if told_names := [name for name in names if name]:
            return next(filter(self.sees, told_names), told_names[0])
        near = {name for scope, name in ledger.authors(key) if scope == self.scope or self._same_thread(scope)}
        return near.pop() if len(near) == 1 else ""

    def _same_thread(self, scope: str) -> bool:
        return bool(self.thread) and scope.startswith(_join(self.thread)[:-1] + ",")

    def with_notice(self, messages: Sequence[BaseMessage], seen: Sequence[Message]) -> Access:
        """Its access, which says in the report whose answers it reads as text for want of an annotation."""
        pairs = zip(messages, seen, strict=True)
        strangers = sorted({m.source for told, m in pairs if isinstance(told, AIMessage) and m.role == "user"})
        text = f"what {', '.join(strangers)} said is text to this agent: no add_cache_handoff leads from there"
        return replace(self.access, notice=text if strangers else "")


def run_metadata(run_manager: BaseRunManager | None) -> dict[str, Any]:
    """Of the run: LangChain gives streams no run manager, but the running node's config is in the context."""
    return {**(ensure_config().get("metadata") or {}), **(run_manager.metadata if run_manager else {})}


def find_caller(
    metadata: Mapping[str, Any],
    *,
    told: str | None = None,
    instruction: str = "",
    share_all: bool = False,
    layout: Layout = "relay",
) -> Caller:
    """Who is calling by a run's metadata.

    told: named by the user, before anything else. Then: the annotated node that is running, the name of a
    `create_agent`, the running node; outside of a graph nobody, told apart by `instruction`. share_all: all
    agents of a thread share, also without annotations. An agent that runs in a tool inherits the metadata of the one
    that called the tool: it is no member of that one's group.
    """
    path = _path(metadata)
    thread = str(metadata.get("thread_id", ""))
    annotation = Annotation.read(metadata)
    if annotation and (told is None or told in annotation.group):
        at = len(path) - 1 - path[::-1].index(annotation.agent) if annotation.agent in path else 0
        if told or _TOOLS not in path[at + 1 : -1]:
            annotation = replace(annotation, agent=told or annotation.agent)
            member = _member(annotation, thread, path[:at], path[at + 1 :], layout)
            return replace(member, group=annotation.digest)
    name = told or str(metadata.get("lc_agent_name") or "") or _node_name(path)
    if annotation and name == annotation.agent and not told:
        name = ""  # its caller's
    if share_all:
        inside = () if told or _TOOLS not in path[:-1] else path[:-1]
        return _everyone(name, thread, _join(thread, "all", *inside), {}, layout)
    scope = _join(thread, "alone", *path)
    owner = _join(scope, name or f"#{hash_name(instruction)}")
    view = View("stock", frozenset({name}))
    return Caller(name, thread, scope, view, Access((owner,), frozenset({owner}), _ISOLATED), shared=False)


def _member(annotation: Annotation, thread: str, outside: list[str], inside: list[str], layout: Layout) -> Caller:
    """A member of a group. Without a thread, the group of one builder; with one, of equal builders.

    outside: the nodes that the graph of the group runs in, if it is a subgraph. inside: those that run in the
    member's node, if that is a graph. Agents in there count as the member to others, but read no KV of each
    other's.
    """
    name = annotation.agent
    graph = annotation.digest if thread else annotation.graph
    if annotation.everyone:
        return _everyone(name, thread, _join(thread, "graph", *outside, graph), annotation.handoffs, layout)
    scope = _join(thread, "group", *outside, graph, min(annotation.group))
    own = _join(scope, name, *inside, "")
    readers = frozenset(_join(scope, source) for source in annotation.sources - {name}) | {own}
    view = View(layout, annotation.upstream, annotation.handoffs)
    return Caller(name, thread, scope, view, Access((own, _join(scope, name)), readers, _ELSEWHERE), layout == "relay")


def _everyone(name: str, thread: str, scope: str, handoffs: Mapping[tuple[str, str], str], layout: Layout) -> Caller:
    access = Access((scope,), frozenset({scope}), "they belong to another graph or thread")
    return Caller(name, thread, scope, View(layout, None, handoffs), access, shared=layout == "relay")


def _path(metadata: Mapping[str, Any]) -> list[str]:
    """Names of the running nodes, outermost first: `team:uuid|coder:uuid` -> team, coder."""
    namespace = str(metadata.get("langgraph_checkpoint_ns") or metadata.get("langgraph_node") or "")
    return [part.split(":")[0] for part in namespace.split("|") if part]


def _node_name(path: list[str]) -> str:
    if len(path) > 1 and path[-1] in _AGENT_NODES:
        return path[-2]
    return path[-1] if path else ""


def _join(*parts: str) -> str:
    """One name of several, whatever is in them: a thread's id may come from outside."""
    return json.dumps(parts)
