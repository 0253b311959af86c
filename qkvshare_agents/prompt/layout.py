"""The exact tokens all agents agree on.

Frameworks give every agent its own system message first and turn roles around per viewer, so two agents'
prompts part after a few tokens. The `relay` layout is the same for every viewer: a system text for all, then
for each answer a user turn that ends with a *cue*. A cue names the next member and carries its instruction: whole in
the member's first cue of the prompt, in later ones as far as `repeat_instruction_tokens` reach. All that an agent
adds to what the previous one computed is its own cue. The `stock` layout keeps the framework's order; there only an
agent's own earlier prompt is a prefix of its next one.

A prompt is a pure function of (messages, speaker, members, system, template, ledger).
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, zip_longest
from typing import Any, Literal

from qkvshare_agents.errors import InvalidMessage
from qkvshare_agents.ids import Ids
from qkvshare_agents.prompt.chat_template import Template
from qkvshare_agents.prompt.cue import REPEATED_TOKENS, Cues
from qkvshare_agents.prompt.ledger import Words
from qkvshare_agents.prompt.members import Member, Members
from qkvshare_agents.prompt.tool_calls import ToolCall, calls_text, result_text, tools_text

Role = Literal["system", "user", "assistant", "tool"]
Layout = Literal["relay", "stock"]
LAYOUTS: tuple[Layout, ...] = ("relay", "stock")
SHARED_SYSTEM = (
    "Several agents work on this conversation in turn. A line that starts with a name in brackets, such as "
    "[editor], says which agent answers next and what its task is. Answer only as that agent."
)
_HUMAN = ("", "user")
_BETWEEN = "\n\n"  # messages in one user turn
NO_RESULT = "(no result)"


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
    """What an answer is filed under: its text and its calls, so that one whose calls were edited is another."""
    return "\0".join([text, *(part for call in calls for part in (call.id, call.name, _sorted(call.arguments)))])


def _sorted(arguments: str) -> str:
    """Arguments in one spelling: frameworks parse the JSON and write it again."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


@dataclass(frozen=True)
class View:
    """What one turn sees of the other members.

    layout: None for the host's. visible: members whose answers it sees as answers, with their cues; what others
    wrote is text to it. None: all members of its scope. handoffs: by (source, target), what the target's cue
    says besides when its turn follows an answer of the source.
    """

    layout: Layout | None = None
    visible: frozenset[str] | None = None
    handoffs: Mapping[tuple[str, str], str] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """The ids [first, stop) of a prompt that say one message, with the space behind it, or (None) a cue."""

    first: int
    stop: int
    message: Message | None = None


@dataclass(frozen=True)
class Exchange:
    """Where an answer stands in a prompt, and what leads to it.

    first: where the delimiter before it begins (the header's end for the first). parts: the user turn's messages and
    its cue, or the results of tools that the answer before it called (results). opening: where the delimiter before the
    answer begins; answer, stop: the answer, empty if it is the one to come. said: its message, None if it is to come.
    name: who answers. instructs: the cue says more of the member's instruction than its later ones do.
    """

    first: int
    parts: tuple[Part, ...]
    opening: int
    answer: int
    stop: int
    said: Message | None
    name: str = ""
    results: bool = False
    instructs: bool = False


@dataclass(frozen=True)
class Prompt:
    """ids: the whole prompt. settled: how many of them stand before the newest user turn, so that an earlier
    turn may have computed them. answers: where each earlier answer ends, and whose it is. header: how many ids stand
    before the first user text. exchanges: the boundaries of what follows it; the last one is the answer to come.
    alternates: the template can't have two user turns one after the other."""

    ids: Ids
    settled: int
    answers: tuple[tuple[int, str], ...] = ()
    header: int = 0
    exchanges: tuple[Exchange, ...] = ()
    alternates: bool = False

    def last_answerer(self, tokens: int) -> str:
        """Whose answer is the last one within the first `tokens` ids ("" if none is)."""
        # the last token of an answer that hit its length limit was never fed
        return next((source for end, source in reversed(self.answers) if end <= tokens + 1), "")


@dataclass(frozen=True)
class _Turn:
    """What leads to an answer: user text, or tool results that the same speaker asked for.

    texts: of the messages, and of the cue (None). results: texts and messages, too. name, instructs: as in `Exchange`.
    """

    texts: tuple[tuple[str, Message | None], ...]
    results: tuple[tuple[str, Message], ...] = ()
    answer: Message | None = None
    name: str = ""
    instructs: bool = False


def lay_out(
    messages: Sequence[Message],
    speaker: Member,
    members: Members,
    *,
    template: Template,
    ledger: Words,
    layout: Layout = "relay",
    system: str = SHARED_SYSTEM,
    repeat_instruction_tokens: int = REPEATED_TOKENS,
    view: View | None = None,
) -> Prompt:
    """The prompt for `speaker`'s next answer. `messages` come without the speaker's own leading system message.

    repeat_instruction_tokens: how much of a member's instruction its later cues say (relay layout); 0: nothing.
    """
    view, messages = view or View(), _in_call_order(messages)
    if (view.layout or layout) == "relay":
        tools = _union(member.tools for member in {**members, speaker.name: speaker}.values())
        cues = Cues(template.encoder, _labels(messages, speaker, members), view.handoffs, repeat_instruction_tokens)
        if view.visible is not None:
            members = {name: member for name, member in members.items() if name in view.visible}
        turns = _relay_turns(messages, speaker, members, cues)
    else:
        turns, system = _stock_turns(messages, speaker), speaker.instruction
        tools = _union([speaker.tools])
    if tools and not template.supports_tools:
        system, tools = _join(system, tools_text(tools)), []
    return _assemble(turns, system, tools, template, ledger)


def answered(prompt: Prompt, said: Message, template: Template, ledger: Words) -> Prompt:
    """What every later prompt begins with: `prompt` and `said`, the answer to it. As `lay_out` of the longer
    conversation, without laying it out again."""
    ids = prompt.ids[: len(prompt.ids) - len(template.thought)]
    ids += tuple(ledger.find(said.ledger_key) or template.answer(_answer(said)))
    return Prompt(ids, len(ids), (*prompt.answers, (len(ids), said.source)), prompt.header)


def _relay_turns(messages: Sequence[Message], speaker: Member, members: Members, cues: Cues) -> list[_Turn]:
    turns: list[_Turn] = []
    pending: list[Message] = []
    unnamed = "" if speaker.label else speaker.name  # a caller without a name: so are its earlier answers

    def turn(name: str, answer: Message | None) -> _Turn:
        asked = turns[-1].answer if turns else None
        if asked and (asked.source or unnamed) == name and _answers(asked, pending):
            results = tuple((cues.quoted(message.text), message) for message in pending)
            return _Turn((), results, answer, name)
        member = speaker if name == speaker.name else members.get(name) or Member(name, name)
        texts = [(cues.quoted(_plain(message, speaker.name)), message) for message in pending]
        instructs = cues.instructs(member)
        cue = cues.next(member, asked.source if asked else None, beside_text=any(text for text, _ in texts))
        return _Turn((*texts, (cue, None)), (), answer, name, instructs)

    for message, following in zip_longest(messages, messages[1:]):
        if _is_answer(message, following, speaker, members):
            turns.append(turn(message.source or unnamed, message))
            pending = []
        else:
            pending.append(message)
    turns.append(turn(speaker.name, None))
    return turns


def _labels(messages: Sequence[Message], speaker: Member, members: Members) -> frozenset[str]:
    """Whom cues may name. Of all members, whatever the speaker's view, so that all viewers get the same prompt."""
    answerers = (message.source for message in messages if message.role == "assistant")
    return frozenset((*answerers, *(member.label for member in (*members.values(), speaker))))


def is_human(message: Message) -> bool:
    """Whether no agent wrote this, as far as its source says."""
    return message.source in _HUMAN


def _is_answer(message: Message, following: Message | None, speaker: Member, members: Members) -> bool:
    """Whether a member said this. Frameworks show other members' answers as the user's, and an orchestrator's prompts
    to itself, which it answers next."""
    if message.role != "user" or message.source in _HUMAN:
        return message.role == "assistant"
    if message.source == speaker.name:
        return following is not None and (following.role, following.source) != ("assistant", speaker.name)
    return message.source in members


def _stock_turns(messages: Sequence[Message], speaker: Member) -> list[_Turn]:
    turns: list[_Turn] = []
    pending: list[Message] = []

    def turn(answer: Message | None) -> _Turn:
        if turns and turns[-1].answer and _answers(turns[-1].answer, pending):
            results = tuple((message.text, message) for message in pending)
            return _Turn((), results, answer, speaker.name)
        return _Turn(tuple((_plain(message, speaker.name), message) for message in pending), (), answer, speaker.name)

    for message in messages:
        if message.role == "assistant" and message.source in ("", speaker.name):
            turns.append(turn(message))
            pending = []
        else:
            pending.append(message)
    turns.append(turn(None))
    return turns


def _assemble(
    turns: Sequence[_Turn], system: str, tools: Sequence[Mapping[str, Any]], template: Template, ledger: Words
) -> Prompt:
    ids: list[int] = []
    exchanges: list[Exchange] = []
    first = 0
    for index, turn in enumerate(turns):
        settled = len(ids)
        results = (
            template.tool_results([(m.call_id, m.tool, text) for text, m in turn.results]) if turn.results else None
        )
        if results is None:
            said = [(text, message) for text, message in (*turn.texts, *_texts(turn.results)) if text]
            begin = template.user if index else _beginning(template, system, tools, alone=not said)
            opened, spoken = _user_turn([text for text, _ in said], begin, template)
            ids += opened
            first = first or len(ids)
            parts = []
            for (_, message), part in zip(said, spoken, strict=True):
                parts.append(Part(len(ids), len(ids) + len(part), message))
                ids += part
            opening = len(ids)
            ids += template.past_turn
        else:
            ids += results
            opening = len(ids)
            parts = [Part(settled, opening, message) for _, message in turn.results]
        answer = len(ids)
        if turn.answer is not None:
            ids += ledger.find(turn.answer.ledger_key) or template.answer(_answer(turn.answer))
        exchanges.append(
            Exchange(
                settled if index else first, tuple(parts), opening, answer, len(ids), turn.answer, turn.name,
                bool(turn.results), turn.instructs,
            )
        )  # fmt: skip
    answers = tuple((e.stop, e.said.source) for e in exchanges if e.said is not None)
    alternates = not template.end or template.past_turn[: len(template.end)] != template.end
    return Prompt((*ids, *template.thought), settled, answers, first, tuple(exchanges), alternates)


def _beginning(
    template: Template, system: str, tools: Sequence[Mapping[str, Any]], *, alone: bool
) -> Callable[[str], Ids]:
    """What makes ids of the header and a first user text. alone: there is no such text."""
    if not template.folds_system:
        return partial(template.head, system, tools)
    if not system:
        return partial(template.head, "", tools)
    folded = template.head("", tools, system if alone else system + _BETWEEN)
    return lambda text: folded + template.encoder.text(text)


def _user_turn(texts: Sequence[str], begin: Callable[[str], Ids], template: Template) -> tuple[Ids, list[Ids]]:
    """Ids that open a user turn, and those of each of its texts: encoded apart, so that each may go on its own."""
    opened = begin("")
    spaced = [text + _BETWEEN for text in texts[:-1]] + list(texts[-1:])
    first = [begin(text)[len(opened) :] for text in spaced[:1]]
    return opened, [*first, *map(template.encoder.text, spaced[1:])]


def _texts(results: Sequence[tuple[str, Message]]) -> Iterable[tuple[str, Message]]:
    return ((result_text(message.tool, text), message) for text, message in results)


def _plain(message: Message, reader: str = "") -> str:
    """A message as text inside a user turn; whoever is neither human nor the reader is named."""
    if message.role == "tool":
        return result_text(message.tool, message.text)
    text = _answer(message)
    named = message.role != "system" and message.source not in (*_HUMAN, reader)
    return f"{message.source}: {text}" if named else text


def _answer(message: Message) -> str:
    return "\n".join(filter(None, (message.text, calls_text(message.calls)))) if message.calls else message.text


def _in_call_order(messages: Sequence[Message]) -> list[Message]:
    """Results that stand together, in the order of their calls: few templates show ids, so that order alone tells
    several calls of one tool apart.

    A call without a result gets one that says so, where others of its answer have theirs. A result without a call
    comes last, as text. Nothing moves across another message: a prompt still grows at its end.
    """
    ordered: list[Message] = []
    waiting: dict[str, list[tuple[int, ToolCall]]] = {}  # calls by id, with their place among all calls
    newest: list[tuple[int, ToolCall]] = []
    asked = 0
    for are_results, group in groupby(messages, lambda message: message.role == "tool"):
        if not are_results:
            for message in group:
                ordered.append(message)
                if message.role == "assistant" or message.calls:
                    newest, asked = list(enumerate(message.calls, asked)), asked + len(message.calls)
                    waiting |= {call.id: [(i, c) for i, c in newest if c.id == call.id] for call in message.calls}
            continue
        results = [(_take(waiting, message, asked), message) for message in group]
        found = {place for place, _ in results}
        if found.intersection(place for place, _ in newest):
            missing = [(place, call) for place, call in newest if place not in found]
            results += [(p, Message("tool", NO_RESULT, call_id=c.id, tool=c.name)) for p, c in missing]
            newest = []
        ordered += [message for _, message in sorted(results, key=lambda result: result[0])]
    return ordered


def _take(waiting: dict[str, list[tuple[int, ToolCall]]], result: Message, otherwise: int) -> int:
    """The place of the call that a result answers, which then waits no more."""
    calls = waiting.get(result.call_id, [])
    found = next((entry for entry in calls if entry[1].name == result.tool), calls[0] if calls else None)
    if found is None:
        return otherwise
    calls.remove(found)
    return found[0]


def _answers(asked: Message, messages: Sequence[Message]) -> bool:
    """Whether the messages are the results of the calls in `asked` and nothing else."""
    ids = {call.id for call in asked.calls}
    return bool(messages) and all(message.role == "tool" and message.call_id in ids for message in messages)


def _join(*texts: str) -> str:
    return _BETWEEN.join(filter(None, texts))


def _union(groups: Iterable[Sequence[Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    """Each different tool once, in an order that does not depend on who asks: the same header for every member."""
    unique: dict[str, Mapping[str, Any]] = {}
    for _, tool in sorted(((json.dumps(tool), tool) for group in groups for tool in group), key=lambda t: t[0]):
        unique.setdefault(json.dumps(tool, sort_keys=True), tool)
    return [unique[key] for key in sorted(unique, key=lambda key: (unique[key]["function"]["name"], key))]
