"""A request for one answer, and the answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qkvshare_agents.ledger import Member
from qkvshare_agents.report import Arrival, HandoffReport
from qkvshare_agents.sampling import Sampling
from qkvshare_agents.toolcall import ToolCall
from qkvshare_agents.transcript import Message


@dataclass(frozen=True)
class Turn:
    """A request for one answer of `speaker`, a member of `scope` (one team).

    messages: the conversation as this member sees it, without its own leading system message.
    tools: schemas of what it may call now; must_call: it has to. schema: JSON that the answer must follow
    unless it calls a tool.

    arrival: what came for this turn from another process, for its report.
    """

    speaker: Member
    scope: str
    messages: tuple[Message, ...]
    sampling: Sampling = field(default_factory=Sampling)
    tools: tuple[Mapping[str, Any], ...] = ()
    must_call: bool = False
    arrival: Arrival = field(default_factory=Arrival)
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Answer:
    """finish_reason: `stop`, `length` or `tool_calls`. thought: reasoning that stays with the member."""

    text: str
    thought: str | None
    calls: tuple[ToolCall, ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    report: HandoffReport
