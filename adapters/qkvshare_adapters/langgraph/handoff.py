"""LangGraph edges as cache handoffs.

    add_cache_handoff(builder, "coder", "tester", instruction="Test what the coder wrote.")

adds the edge and lets the tester continue from the coder's KV. Agents without such an edge share nothing.
"""

import uuid
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from langgraph.graph import END, START, StateGraph
from langgraph.pregel import Pregel

from qkvshare_adapters.langgraph.annotation import KEY, POLICIES, Annotation, Edge, Policy
from qkvshare_adapters.langgraph.tools import declare_tools
from qkvshare_agents.errors import InvalidSetting

Builder = StateGraph[Any, Any, Any, Any]
_LABELS = {"kv": "kv_from", "text": "text_from"}  # scalars in a node's metadata, which draw_mermaid shows


def add_cache_handoff(
    builder: Builder,
    source: str | Sequence[str],
    target: str | Sequence[str],
    *,
    instruction: str | None = None,
    policy: Policy | None = None,
    path: Callable[..., Any] | None = None,
    path_map: Mapping[Hashable, str] | Sequence[str] | None = None,
    dynamic: bool = False,
) -> Builder:
    """Add an edge whose target continues from the source's KV and sees its answers. Returns the builder.

    source, target: names of nodes that were added before. Several sources are joined like `add_edge` joins
    them; several targets branch. The handoff is one way: the source never reads the target's KV unless an edge
    of its own says so. What the source was handed counts as its own.
    instruction: what the target is told besides when its turn follows an answer of the source.
    policy: "kv" (None); "text": the target sees the answers but reads their text again; "all": all nodes of the
    graph that were added before share with each other.
    path, path_map: adds `add_conditional_edges(source, path, path_map)` instead of an edge. By default the map is
    the targets; where `path` may also lead elsewhere, to END for instance, the map has to say so.
    dynamic: adds no edge, for a source that routes by itself, with `Command(goto=...)`, `Send` or conditional
    edges that exist already. The handoff is drawn as a possible destination.

    Annotate before `compile`. Raises InvalidSetting for an unknown node or policy, with the valid ones.
    """
    sources, targets = _names(builder, "source", source), _names(builder, "target", target)
    if policy is not None and policy not in POLICIES:
        raise InvalidSetting(f"no policy {policy!r}; the policies are {', '.join(POLICIES)}")
    if dynamic and path:
        raise InvalidSetting("dynamic=True adds no edge, path=... adds conditional ones; use one of them")
    if path_map is not None and not path:
        raise InvalidSetting("path_map needs path, the function whose results it maps to nodes")
    if dynamic:
        _draw(builder, sources, targets)
    elif path:
        routes = dict(path_map) if isinstance(path_map, Mapping) else list(path_map or targets)
        for name in sources:
            builder.add_conditional_edges(name, path, routes)
    else:
        for name in targets:
            builder.add_edge(source if isinstance(source, str) else sources, name)
    kind = "kv" if policy in (None, "all") else policy
    edges = [Edge(s, t, str(kind), instruction or "") for s in sources for t in targets]
    _annotate(builder, edges, everyone=policy == "all")
    return builder


def share_cache(builder: Builder) -> Builder:
    """Let all nodes that were added so far continue from each other's KV and see each other's answers, with the
    edges as they are. Returns the builder."""
    _annotate(builder, [], everyone=True)
    return builder


def _names(builder: Builder, which: str, names: str | Sequence[str]) -> list[str]:
    if not isinstance(builder, StateGraph):
        raise InvalidSetting(f"{type(builder).__name__} is no StateGraph; annotate the builder, before compile()")
    listed = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in listed if name not in builder.nodes]
    if unknown or not listed:
        valid = ", ".join(sorted(builder.nodes)) or "none so far"
        hint = "; nothing is computed there" if {START, END} & set(unknown) else "; add the node first"
        raise InvalidSetting(f"{which} {', '.join(map(repr, unknown)) or 'is empty'}: the nodes are {valid}{hint}")
    return listed


def _draw(builder: Builder, sources: Sequence[str], targets: Sequence[str]) -> None:
    """Make `targets` destinations of `sources`, which only drawing uses, unless there is an edge to draw."""
    for source in sources:
        drawn = {end for start, end in builder.edges if start == source}
        for branch in builder.branches.get(source, {}).values():
            drawn |= set((branch.ends or {}).values())
        spec = builder.nodes[source]
        missing = [target for target in targets if target not in {*drawn, *(spec.ends or ())}]
        if isinstance(spec.ends, dict):
            spec.ends = {**spec.ends, **dict.fromkeys(missing, "kv")}
        elif missing:
            spec.ends = (*(spec.ends or ()), *missing)


def _annotate(builder: Builder, edges: Sequence[Edge], *, everyone: bool) -> None:
    """Write all edges known so far, and the new ones, into the metadata of the nodes they concern."""
    known = {name: Annotation.read(spec.metadata or {}) for name, spec in builder.nodes.items()}
    before = [annotation for annotation in known.values() if annotation]
    graph = before[0].graph if before else uuid.uuid4().hex
    newest = {(e.source, e.target): e for a in before for e in a.edges} | {(e.source, e.target): e for e in edges}
    shared = everyone or any(annotation.everyone for annotation in before)
    nodes = tuple(sorted(builder.nodes)) if shared else ()
    for name, spec in builder.nodes.items():
        whole = Annotation(name, graph, tuple(newest.values()), nodes)
        group = tuple(edge for edge in newest.values() if edge.source in whole.group)
        if group or nodes:
            annotation = Annotation(name, graph, group, nodes)
            declare_tools(annotation, _tools(spec.runnable))
            spec.metadata = {
                **{k: v for k, v in (spec.metadata or {}).items() if k not in _LABELS.values()},
                KEY: annotation.write(),
                **_labels(name, group, shared),
            }


def _tools(runnable: Any) -> list[Any]:
    """Tools of an agent that is a graph itself, as `create_agent` makes them."""
    nodes = runnable.get_graph().nodes.values() if isinstance(runnable, Pregel) else ()
    return [tool for node in nodes for tool in getattr(node.data, "tools_by_name", {}).values()]


def _labels(name: str, edges: Sequence[Edge], everyone: bool) -> dict[str, str]:
    if everyone:
        return {"kv_from": "all"}
    found = {label: [e.source for e in edges if e.target == name and e.policy == p] for p, label in _LABELS.items()}
    return {label: ", ".join(sources) for label, sources in found.items() if sources}
