"""A request for one answer, and the answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qkvshare_agents.prompt.layout import Message, View
from qkvshare_agents.prompt.members import Member
from qkvshare_agents.prompt.sampling import Sampling
from qkvshare_agents.prompt.tool_calls import ToolCall
from qkvshare_agents.turns.access import Access
from qkvshare_agents.turns.report import Arrival, HandoffReport


@dataclass(frozen=True)
class Turn:
    """A request for one answer of `speaker`, a member of `scope` (one team).

    messages: the conversation as this member sees it, without its own leading system message.
    tools: schemas of what it may call now; must_call: it has to; parallel_calls: several in one answer.
    schema: JSON that the answer must follow unless it calls a tool. view: what it sees of the other members;
    access: whose KV it may continue from.
    arrival: what came for this turn from another process, for its report.
    """

    speaker: Member
    scope: str
    messages: tuple[Message, ...]
    sampling: Sampling = field(default_factory=Sampling)
    tools: tuple[Mapping[str, Any], ...] = ()
    must_call: bool = False
    parallel_calls: bool = True
    arrival: Arrival = field(default_factory=Arrival)
    schema: Mapping[str, Any] | None = None
    view: View = field(default_factory=View)
    access: Access = field(default_factory=Access)


@dataclass(frozen=True)
class Answer:
    """finish_reason: `stop`, `length` (cut, whatever it holds) or `tool_calls`.
    thought: reasoning that stays with the member.

    handle: content address of the last page with the turn's KV, a plain string; "" if none was kept. It names
    pages and carries no rights: who may read them is decided per turn.
    """

    text: str
    thought: str | None
    calls: tuple[ToolCall, ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    report: HandoffReport
    handle: str = ""
