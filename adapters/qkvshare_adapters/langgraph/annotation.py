"""What the edges of a graph say about KV caches: pure data, carried in the metadata of the graph's nodes.

LangGraph hands a node's metadata to every model call inside of the node, through subgraphs, too. So an
annotation reaches the model without a registry and without a change to the graph's state.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

Policy = Literal["kv", "text", "all"]
POLICIES: tuple[Policy, ...] = ("kv", "text", "all")
KEY = "qkvshare"  # of a node's metadata


@dataclass(frozen=True)
class Edge:
    """`target` sees `source`'s answers with their cues; with policy `kv` it continues from its KV.

    instruction: what the target's cue says besides when its turn follows an answer of the source.
    """

    source: str
    target: str
    policy: str = "kv"
    instruction: str = ""


@dataclass(frozen=True)
class Annotation:
    """What one node knows: `agent`, its name; `graph`, an id of the builder; the edges of its group.

    everyone: nodes that all share with each other, whatever the edges say; usually none.
    """

    agent: str
    graph: str
    edges: tuple[Edge, ...] = ()
    everyone: tuple[str, ...] = ()

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> "Annotation | None":
        """The annotation in a run's metadata. Nested graphs: that of the innermost annotated node."""
        value = metadata.get(KEY)
        if not isinstance(value, Mapping) or not {"agent", "graph", "edges"} <= value.keys():
            return None
        edges = tuple(Edge(*edge) for edge in value["edges"])
        return cls(str(value["agent"]), str(value["graph"]), edges, tuple(value.get("everyone", ())))

    def write(self) -> dict[str, Any]:
        """Plain lists and strings: metadata ends up in traces."""
        edges = [[e.source, e.target, e.policy, e.instruction] for e in self.edges]
        return {"agent": self.agent, "graph": self.graph, "edges": edges, "everyone": list(self.everyone)}

    @cached_property
    def group(self) -> frozenset[str]:
        """The agent and all that edges connect it with, in either direction."""
        if self.everyone:
            return frozenset(self.everyone)
        return _reach(
            self.agent, [(e.source, e.target) for e in self.edges] + [(e.target, e.source) for e in self.edges]
        )

    @cached_property
    def upstream(self) -> frozenset[str]:
        """The agent and all whose answers may have led to its turn."""
        return _reach(self.agent, [(e.target, e.source) for e in self.edges])

    @cached_property
    def sources(self) -> frozenset[str]:
        """Agents whose KV the agent may continue from, besides its own."""
        return frozenset(e.source for e in self.edges if e.target == self.agent and e.policy != "text")

    @cached_property
    def handoffs(self) -> dict[tuple[str, str], str]:
        return {(e.source, e.target): e.instruction for e in self.edges if e.instruction}

    @property
    def digest(self) -> str:
        """Equal for equal groups, in any process."""
        parts = sorted(repr(e) for e in self.edges if e.source in self.group)
        return hashlib.sha256(repr((sorted(self.everyone), parts)).encode()).hexdigest()[:16]


def _reach(start: str, steps: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Everything that `steps` lead to from `start`, itself included."""
    steps, found, newest = list(steps), {start}, {start}
    while newest:
        newest = {b for a, b in steps if a in newest} - found
        found |= newest
    return frozenset(found)
