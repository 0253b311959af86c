"""Older messages replaced by a summary, which the agent that spoke last writes."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from qkvshare_agents.context.room import Room, room_for
from qkvshare_agents.prompt.layout import Message, Prompt, is_human
from qkvshare_agents.prompt.sampling import Sampling
from qkvshare_agents.turns.request import Turn
from qkvshare_agents.turns.workspace import Workspace

ASKED = "Sum up the conversation so far for someone who has not read it: what was asked, what was found, what is open."
_OPENING = "Summary of the conversation so far:\n\n"
_MOST = 256  # summaries that are remembered
_SHARE = 8  # of the room for the prompt that a summary may take

Messages = tuple[Message, ...]


@dataclass(frozen=True)
class Summed:
    """A turn with fewer messages, which were `dropped_tokens` longer, and its prompt."""

    turn: Turn
    prompt: Prompt
    dropped_tokens: int = 0
    reasons: tuple[str, ...] = ()


class Summaries:
    """Of one workspace. What was summed up once is not summed up again; a summary may become part of the next one."""

    def __init__(self, space: Workspace) -> None:
        self._space = space
        self._known: OrderedDict[tuple[str, Messages], str] = OrderedDict()
        self._writing = False

    def shorten(self, turn: Turn, prompt: Prompt, write: Callable[[Turn], str]) -> Summed:
        """`turn`, if its prompt is too long with its older messages replaced by a summary. write: answers a turn.

        The newest message, the task and the newest user message stay, and results stay with their calls; if those
        alone are too long, the turn is still too long afterwards.
        """
        if self._space.settings.fit != "summarise" or self._writing or len(turn.messages) < 2:
            return Summed(turn, prompt)
        room, before = room_for(self._space.context_tokens, turn.sampling.max_tokens), len(prompt.ids)
        if not room.lacks(before):
            return Summed(turn, prompt)
        replaced, text = self._recall(turn)
        short = _replaced(turn, replaced, text)
        if room.lacks(self._tokens(short)):
            older = self._older(turn, replaced, room)
            if older > replaced:
                known = _replaced(replace(turn, messages=turn.messages[:older]), replaced, text)
                replaced, text = older, self._write(known, room, write)
                self._keep(turn.scope, turn.messages[:replaced], text)
                short = _replaced(turn, replaced, text)
        shorter = self._space.prompt(short)
        after = len(shorter.ids)
        if after >= before:
            return Summed(turn, prompt)
        why = f"fitted: the {replaced} oldest messages were replaced by a summary, {after} instead of {before} tokens"
        return Summed(short, shorter, before - after, (why,))

    def _recall(self, turn: Turn) -> tuple[int, str]:
        """How many of the oldest messages are known to be summed up, and the summary."""
        for count in range(len(turn.messages) - 1, 0, -1):
            if text := self._known.get((turn.scope, turn.messages[:count])):
                self._known.move_to_end((turn.scope, turn.messages[:count]))
                return count, text
        return 0, ""

    def _older(self, turn: Turn, replaced: int, room: Room) -> int:
        """How many messages to sum up, so that the rest leaves room for some turns to come; no call without its
        results, and more than are `replaced` already, or 0."""
        wanted = room.prompt - 2 * (room.prompt // _SHARE)
        counts = [n for n in range(replaced + 1, len(turn.messages)) if turn.messages[n].role != "tool"]
        return next((n for n in counts if self._tokens(_replaced(turn, n, "")) <= wanted), max(counts, default=0))

    def _write(self, turn: Turn, room: Room, write: Callable[[Turn], str]) -> str:
        """turn: the messages to sum up. Who said the last of them writes, if that is a member."""
        members = self._space.roster.members(turn.scope)
        said = next((m.source for m in reversed(turn.messages) if m.source in members), turn.speaker.name)
        asked = Message("user", ASKED, "user")
        self._writing = True
        try:
            speaker, messages = members.get(said, turn.speaker), (*turn.messages, asked)
            sampling = Sampling(max_tokens=room.prompt // _SHARE)
            return write(Turn(speaker, turn.scope, messages, sampling, view=turn.view, access=turn.access))
        finally:
            self._writing = False

    def _keep(self, scope: str, messages: Messages, text: str) -> None:
        self._known[scope, messages] = text
        while len(self._known) > _MOST:
            self._known.popitem(last=False)

    def _tokens(self, turn: Turn) -> int:
        return len(self._space.prompt(turn).ids)


def _summary(text: str) -> Message:
    return Message("user", _OPENING + text, "user")


def _replaced(turn: Turn, count: int, text: str) -> Turn:
    """The turn with its `count` oldest messages replaced by a summary; the task and the newest user message stay."""
    asked = [n for n, m in enumerate(turn.messages) if m.role == "user" and is_human(m)]
    task, newest = (asked[0], asked[-1]) if asked else (0, 0)
    kept = turn.messages[newest : newest + 1] if task < newest < count else ()
    first = turn.messages[task : task + 1] if task < count else ()
    messages = (*first, _summary(text), *kept, *turn.messages[count:])
    return replace(turn, messages=messages) if count else turn
