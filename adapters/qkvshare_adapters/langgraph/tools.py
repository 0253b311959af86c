"""Tools that the agents of a group will call with, as far as the graph shows them.

The header that all members of a group share lists all their tools. An agent made by `create_agent` keeps its tools
where its graph shows them; so they are known before its first call, and the header is the same from the first
turn on. Other agents' tools are learnt when their calls come through.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from qkvshare_adapters.langchain.messages import Schemas, to_schemas
from qkvshare_adapters.langgraph.annotation import Annotation

_MOST_GROUPS = 1000  # then the oldest are forgotten, and learnt from calls

_tools: OrderedDict[str, dict[str, Schemas]] = OrderedDict()  # by group, by agent
_lock = threading.Lock()


def declare_tools(annotation: Annotation, tools: Sequence[Any]) -> None:
    """Note the tools of an annotated node."""
    with _lock:
        _tools.setdefault(annotation.digest, {})[annotation.agent] = to_schemas(tools)
        _tools.move_to_end(annotation.digest)
        while len(_tools) > _MOST_GROUPS:
            _tools.popitem(last=False)


def find_tools(group: str) -> dict[str, Schemas]:
    """Tools by agent of the group with this digest; agents without known tools are left out."""
    with _lock:
        return {name: tools for name, tools in _tools.get(group, {}).items() if tools}
