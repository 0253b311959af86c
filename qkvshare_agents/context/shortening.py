"""Messages that are too large for the context, shortened in their middle, which says so."""

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from qkvshare_agents.context.cuts import STRICTNESS, Cuts
from qkvshare_agents.context.room import Room
from qkvshare_agents.errors import ContextOverflow
from qkvshare_agents.prompt.encoder import Encoder
from qkvshare_agents.prompt.layout import Message, Prompt
from qkvshare_agents.prompt.tool_calls import ToolCall
from qkvshare_agents.turns.request import Turn

SHORTEST = 24  # tokens that are left of a message, beside the note
_GENTLE = 8  # a share of the room: a message is not made shorter than that as long as something else can go
_MOST = 256  # messages whose limits are remembered
Messages = tuple[Message, ...]
Limits = Mapping[Message, int]


@dataclass(frozen=True)
class Shortened:
    """prompt: with `messages` of the turn shortened; it fits into `room` without what `cuts` may drop."""

    prompt: Prompt
    cuts: Cuts
    room: Room
    messages: int


class Shortener:
    """Of one host. A message that was shortened stays as short, so that later turns have the same prompt again."""

    def __init__(self) -> None:
        self._limits: OrderedDict[tuple[str, Message], int] = OrderedDict()

    def shorten(
        self, turn: Turn, prompt: Prompt, room: Room, lay_out: Callable[[Turn], Prompt], encoder: Encoder
    ) -> Shortened:
        """`prompt`, of `turn`, with messages shortened until what must stay fits: as few as will do, by as little.

        Where that is not enough the answer gets less room. Raises ContextOverflow, with the sizes.
        """
        least = Room(room.context, min(room.answer, room.context // _GENTLE))
        known = {m: limit for m in turn.messages if (limit := self._limits.get((turn.scope, m)))}
        needed_tokens = len(prompt.ids)
        for allowed in dict.fromkeys((room, least)):
            tried: Limits | None = None
            for strictness, chosen in _choices(prompt, allowed, known, encoder):
                if chosen != tried:
                    tried = chosen
                    messages = shortened(turn.messages, chosen, encoder)
                    laid = lay_out(replace(turn, messages=messages)) if chosen else prompt
                cuts = Cuts(laid, strictness)
                needed_tokens = min(needed_tokens, cuts.needed_tokens)
                if cuts.needed_tokens <= allowed.prompt:
                    self._remember(turn.scope, chosen)
                    return Shortened(laid, cuts, allowed, len(chosen))
        raise ContextOverflow(
            f"context length exceeded: {needed_tokens} tokens must stay (of {len(prompt.ids)}; {prompt.header} of them "
            f"are system text and tools), and {least.answer} are left to the answer > {room.context} "
            f"({turn.speaker.label or 'an agent'}); use fewer tools, a shorter instruction, or a larger context"
        )

    def _remember(self, scope: str, limits: Limits) -> None:
        for message, limit in limits.items():
            self._limits[scope, message] = limit
            self._limits.move_to_end((scope, message))
        while len(self._limits) > _MOST:
            self._limits.popitem(last=False)


def _choices(prompt: Prompt, room: Room, known: Limits, encoder: Encoder) -> Iterator[tuple[int, Limits]]:
    """Strictness of cuts and limits of messages, the best first."""
    for strictness in STRICTNESS:
        needed = Cuts(prompt, strictness).needed_messages
        shortest = SHORTEST if strictness == STRICTNESS[-1] else max(SHORTEST, room.prompt // _GENTLE)
        yield strictness, known
        limit = (room.prompt - prompt.header) * 0.875
        while limit >= shortest:
            long = too_long(needed, int(limit), encoder)
            yield strictness, {**known, **{m: min(int(limit), known.get(m, int(limit))) for m in long}}
            limit *= 0.75


def shortened(messages: Messages, limit_of: Limits, encoder: Encoder) -> Messages:
    """The messages, those of `limit_of` with at most about so many tokens of text and in each of a call's arguments."""
    return tuple(_shorter(m, limit_of[m], encoder) if m in limit_of else m for m in messages)


def too_long(messages: Collection[Message], limit: int, encoder: Encoder) -> list[Message]:
    """Those with more than `limit` tokens."""
    return [m for m in messages if any(_tokens(text, encoder) > limit for text in (m.text, *_arguments(m)))]


def shorter_text(text: str, limit: int, encoder: Encoder) -> str:
    """`text` without its middle, if it has more than `limit` tokens."""
    if len(text.encode(errors="replace")) <= limit:  # no token without a byte
        return text
    ids = encoder.text(text)
    if len(ids) <= limit:
        return text
    head, tail = encoder.decode(ids[: limit - limit // 2]), encoder.decode(ids[len(ids) - limit // 2 :])
    return f"{head.rstrip(chr(0xFFFD))}\n[... {len(ids) - limit} tokens left out ...]\n{tail.lstrip(chr(0xFFFD))}"


def _shorter(message: Message, limit: int, encoder: Encoder) -> Message:
    calls = tuple(_shorter_call(call, limit, encoder) for call in message.calls)
    return replace(message, text=shorter_text(message.text, limit, encoder), calls=calls)


def _shorter_call(call: ToolCall, limit: int, encoder: Encoder) -> ToolCall:
    """Strings in its arguments are shortened, so that they stay arguments; others as they are."""
    if _tokens(call.arguments, encoder) <= limit:
        return call
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return replace(call, arguments=shorter_text(call.arguments, limit, encoder))
    if not isinstance(arguments, dict):
        return call
    short = {k: shorter_text(v, limit, encoder) if isinstance(v, str) else v for k, v in arguments.items()}
    return replace(call, arguments=json.dumps(short, ensure_ascii=False))


def _tokens(text: str, encoder: Encoder) -> int:
    return len(encoder.text(text))


def _arguments(message: Message) -> tuple[str, ...]:
    return tuple(call.arguments for call in message.calls)
