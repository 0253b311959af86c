"""The exact tokens all agents agree on.

Frameworks give every agent its own system message first and turn roles around per viewer, so two agents'
prompts part after a few tokens. The `relay` layout is the same for every viewer: a system text for all, then
for each answer a user turn that ends with a *cue*, which names the next member and, the first time, carries
its instruction. All that an agent adds to what the previous one computed is its own cue. The `stock` layout
keeps the framework's order; there only an agent's own earlier prompt is a prefix of its next one.

A prompt is a pure function of (messages, speaker, members, system, template, ledger).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qkvshare_agents.errors import InvalidMessage
from qkvshare_agents.ledger import Ledger, Member, Members
from qkvshare_agents.template import Ids, Template
from qkvshare_agents.toolcall import ToolCall, calls_text, result_text, tools_text

Role = Literal["system", "user", "assistant", "tool"]
Layout = Literal["relay", "stock"]
LAYOUTS: tuple[Layout, ...] = ("relay", "stock")
SHARED_SYSTEM = (
    "Several agents work on this conversation in turn. A line that starts with a name in brackets, such as "
    "[editor], says which agent answers next and what its task is. Answer only as that agent."
)
_HUMAN = ("", "user")


@dataclass(frozen=True)
class Message:
    """One message of a conversation, free of any framework.

    source: who wrote it ("" or "user": a human). calls: tools that an assistant message calls.
    call_id, tool: what a tool message answers.
    """

    role: Role
    text: str = ""
    source: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    tool: str = ""

    def __post_init__(self) -> None:
        if self.role not in ("system", "user", "assistant", "tool"):
            raise InvalidMessage(f"unknown role {self.role!r}; the roles are system, user, assistant and tool")
        if not isinstance(self.text, str):
            raise InvalidMessage(f"the content of a {self.role} message must be text, not {type(self.text).__name__}")

    @property
    def ledger_key(self) -> str:
        return ledger_key(self.text, self.calls)


def ledger_key(text: str, calls: Sequence[ToolCall]) -> str:
    """What an answer is filed under: its text, or the ids of the calls in it (which are unique)."""
    return "\0".join(["", *(call.id for call in calls)]) if calls else text


@dataclass(frozen=True)
class Prompt:
    """ids: the whole prompt. settled: how many of them stand before the newest user turn, so that an earlier
    turn may have computed them."""

    ids: Ids
    settled: int


@dataclass(frozen=True)
class _Turn:
    """What leads to an answer: user text, or tool results that the same speaker asked for."""

    text: str
    results: tuple[Message, ...] = ()
    answer: Message | None = None


def lay_out(
    messages: Sequence[Message],
    speaker: Member,
    members: Members,
    *,
    template: Template,
    ledger: Ledger,
    layout: Layout = "relay",
    system: str = SHARED_SYSTEM,
) -> Prompt:
    """The prompt for `speaker`'s next answer. `messages` come without the speaker's own leading system message."""
    if layout == "relay":
        turns = _relay_turns(messages, speaker, members)
        tools = _union(member.tools for member in {**members, speaker.name: speaker}.values())
    else:
        turns, system = _stock_turns(messages, speaker), speaker.instruction
        tools = _union([speaker.tools])
    if tools and not template.supports_tools:
        system, tools = "\n\n".join(filter(None, (system, tools_text(tools)))), []
    return _assemble(turns, system, tools, template, ledger)


def _relay_turns(messages: Sequence[Message], speaker: Member, members: Members) -> list[_Turn]:
    turns: list[_Turn] = []
    pending: list[Message] = []
    introduced: set[str] = set()

    def turn(name: str, answer: Message | None) -> _Turn:
        member = speaker if name == speaker.name else members.get(name) or Member(name, name)
        asked = turns[-1].answer if turns else None
        if asked and asked.calls and asked.source == name and pending and _only_results(pending):
            return _Turn("", tuple(pending), answer)
        cue = _cue(member, first=name not in introduced, alone=not turns)
        introduced.add(name)
        return _Turn("\n\n".join(filter(None, (*map(_plain, pending), cue))), (), answer)

    for message in messages:
        is_member = message.source in members or message.source == speaker.name
        if message.role == "assistant" or (message.role == "user" and is_member):
            turns.append(turn(message.source, message))
            pending = []
        else:
            pending.append(message)
    turns.append(turn(speaker.name, None))
    return turns


def _stock_turns(messages: Sequence[Message], speaker: Member) -> list[_Turn]:
    turns: list[_Turn] = []
    pending: list[Message] = []

    def turn(answer: Message | None) -> _Turn:
        asked = turns[-1].answer if turns else None
        if asked and asked.calls and pending and _only_results(pending):
            return _Turn("", tuple(pending), answer)
        return _Turn("\n\n".join(filter(None, map(_plain, pending))), (), answer)

    for message in messages:
        if message.role == "assistant" and message.source in ("", speaker.name):
            turns.append(turn(message))
            pending = []
        else:
            pending.append(message)
    turns.append(turn(None))
    return turns


def _assemble(
    turns: Sequence[_Turn], system: str, tools: Sequence[Mapping[str, Any]], template: Template, ledger: Ledger
) -> Prompt:
    folded = system if template.folds_system else ""
    ids = list(template.head("" if template.folds_system else system, [dict(tool) for tool in tools]))
    settled = 0
    for index, turn in enumerate(turns):
        text = "\n\n".join(filter(None, (folded if index == 0 else "", turn.text)))
        results = template.tool_results([(m.call_id, m.tool, m.text) for m in turn.results]) if turn.results else None
        if index:
            settled = len(ids)
        if results is None:
            text = "\n\n".join(filter(None, (text, *map(_plain, turn.results))))
            ids += template.close if index else ()
            ids += template.encoder.text(text) + template.turn
        else:
            ids += results
        if turn.answer is not None:
            ids += ledger.find(turn.answer.ledger_key) or template.encoder.text(_answer(turn.answer))
    return Prompt(tuple(ids), settled)


def _cue(member: Member, *, first: bool, alone: bool) -> str:
    """`[name] instruction` the first time, `[name]` later; nothing for a lone caller without an instruction."""
    instruction = member.instruction if first else ""
    if alone and not instruction:
        return ""
    name = f"[{member.label}]" if member.label else ""
    return " ".join(filter(None, (name, instruction)))


def _plain(message: Message) -> str:
    """A message as text inside a user turn; whoever is not human is named."""
    if message.role == "tool":
        return result_text(message.tool, message.text)
    text = _answer(message)
    return text if message.role == "system" or message.source in _HUMAN else f"{message.source}: {text}"


def _answer(message: Message) -> str:
    return "\n".join(filter(None, (message.text, calls_text(message.calls)))) if message.calls else message.text


def _only_results(messages: Iterable[Message]) -> bool:
    return all(message.role == "tool" for message in messages)


def _union(groups: Iterable[Sequence[Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    """Each different tool once, sorted by name: the same header for every member."""
    unique = {json.dumps(tool, sort_keys=True): tool for group in groups for tool in group}
    return [unique[key] for key in sorted(unique, key=lambda key: (unique[key]["function"]["name"], key))]
