"""Which messages of a prompt go when it does not fit: whole ones, and never what a turn can't do without.

What stays: the header (system text and tools), the task (the first user message), the newest user message, the newest
message, the speaker's cue, and cues that say more of an instruction than later ones do. A call and its results go
together, and so do an answer and its cue. What is left are whole turns of the template, in their order.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from qkvshare_agents import spans
from qkvshare_agents.context.room import Room
from qkvshare_agents.prompt.layout import Exchange, Message, Prompt, is_human
from qkvshare_agents.spans import Spans, joined, without

ANSWER = -1
_NEWEST = 2  # a share of the room: what reaches into that many tokens at the end goes last, however little is attended
Item = tuple[int, int]  # number of the exchange, and of its part, or ANSWER
Items = frozenset[Item]
STRICTNESS = (0, 1, 2)  # 1: the newest message may go, if it is no user's; 2: so may cues of members but the speaker


class Cuts:
    """What may go from one prompt. strictness: how much must stay, see `STRICTNESS`."""

    def __init__(self, prompt: Prompt, strictness: int = 0) -> None:
        self._prompt = prompt
        self._exchanges = prompt.exchanges
        self._chains = list(_chains(prompt.exchanges))
        self._protected = frozenset(_protected(prompt.exchanges, strictness))
        groups = _grouped(self._items(), self._links())
        self._groups = [self._closed(g) for g in groups if not g & self._protected]
        self._droppable: Items = frozenset().union(*self._groups)

    @property
    def needed_tokens(self) -> int:
        """Of what must stay."""
        return len(self._prompt.ids) - spans.count(self.spans(self._droppable))

    @property
    def needed_messages(self) -> list[Message]:
        """Messages that must stay, with the calls whose results must."""
        kept = [self._message(item) for item in self._items() if item not in self._droppable]
        return [message for message in kept if message is not None]

    def plan(self, lacking: int, room: Room, already: Spans = (), mass: Sequence[float] | None = None) -> Spans | None:
        """What goes so that the prompt is at least `lacking` tokens shorter, in steps of the room; `already` does.

        mass: attention that leading tokens received: what received least goes first, instead of what is oldest. None if
        that is not possible.
        """
        gone = frozenset(item for item in self._items() if _within(self._span(item), already))
        if gone & self._protected:
            return None
        order = sorted((g for g in self._groups if not g <= gone), key=lambda group: self._rank(group, room, mass))
        wanted = -(-lacking // room.step) * room.step
        if spans.count(already) >= lacking and already == self.spans(gone):
            return already
        number = bisect_left(range(len(order)), wanted, key=lambda n: self._count(gone, order[:n]))
        found = self.spans(gone.union(*order[:number]))
        return found if spans.count(found) >= lacking and not without(already, found) else None

    def spans(self, dropped: Items) -> Spans:
        """The tokens that go when these messages and answers do, delimiters included."""
        kept, total = list(self._kept(dropped)), len(self._prompt.ids)
        return without(((0, total),), joined(kept))

    def _kept(self, dropped: Items) -> Iterator[tuple[int, int]]:
        yield 0, self._prompt.header
        opened = True  # by the header
        for chain in self._chains:
            lead, last = self._exchanges[chain[0]], self._exchanges[chain[-1]]
            parts = [part for n, part in enumerate(lead.parts) if (chain[0], n) not in dropped]
            answered = last.said is None or any((i, ANSWER) not in dropped for i in chain)
            if not parts and not answered:
                continue
            if not opened:
                yield lead.first, lead.parts[0].first if lead.parts else lead.opening
            opened = False
            yield from ((part.first, part.stop) for part in parts)
            if answered or self._prompt.alternates:  # then the answer is empty
                yield lead.opening, lead.answer
            for i, after in pairwise(chain):
                if (i, ANSWER) not in dropped:
                    yield self._exchanges[i].answer, self._exchanges[after].answer
            if (chain[-1], ANSWER) not in dropped:
                yield last.answer, last.stop
        yield self._exchanges[-1].stop, len(self._prompt.ids)

    def _items(self) -> Iterator[Item]:
        for i, exchange in enumerate(self._exchanges):
            yield from ((i, n) for n in range(len(exchange.parts)))
            if exchange.said is not None:
                yield i, ANSWER

    def _links(self) -> Iterator[tuple[Item, Item]]:
        """Pairs that go together."""
        calls: dict[str, Item] = {}
        for chain in self._chains:
            lead = self._exchanges[chain[0]]
            cue = (chain[0], len(lead.parts) - 1)
            if lead.parts and self._exchanges[chain[-1]].said is not None and cue not in self._protected:
                yield cue, (chain[-1], ANSWER)
            for i, after in pairwise(chain):
                yield from (((i, ANSWER), (after, n)) for n in range(len(self._exchanges[after].parts)))
        for item in self._items():
            message = self._message(item)
            if message and message.role == "tool" and message.call_id in calls:
                yield calls[message.call_id], item
            calls |= {call.id: item for call in (message.calls if message else ()) if call.id}

    def _closed(self, group: Items) -> Items:
        """With the calls and results that can't stay without the user turn before them."""
        chains = [c for c in self._chains if (c[0], len(self._exchanges[c[0]].parts) - 1) in group]
        inner = {(i, ANSWER) for c in chains for i in c}
        inner |= {(i, n) for c in chains for i in c[1:] for n in range(len(self._exchanges[i].parts))}
        return (group | inner) - self._protected

    def _count(self, gone: Items, groups: Iterable[Items]) -> int:
        return spans.count(self.spans(gone.union(*groups)))

    def _rank(self, group: Items, room: Room, mass: Sequence[float] | None) -> tuple[float, float]:
        spans = [self._span(item) for item in group]
        first = min(start for start, _ in spans)
        if not mass or max(stop for _, stop in spans) > min(len(mass), len(self._prompt.ids) - room.prompt // _NEWEST):
            return float(bool(mass)), first
        found = [mass[i] for start, stop in joined(spans) for i in range(start, stop)]
        return 0.0, sum(found) / max(1, len(found))

    def _span(self, item: Item) -> tuple[int, int]:
        exchange, part = self._exchanges[item[0]], item[1]
        if part == ANSWER:
            return exchange.answer if exchange.answer < exchange.stop else exchange.opening, exchange.stop
        return exchange.parts[part].first, exchange.parts[part].stop

    def _message(self, item: Item) -> Message | None:
        exchange, part = self._exchanges[item[0]], item[1]
        return exchange.said if part == ANSWER else exchange.parts[part].message


def _chains(exchanges: Sequence[Exchange]) -> Iterator[range]:
    """Numbers of an exchange that begins with a user turn, and of those that go on with results."""
    starts = [i for i, exchange in enumerate(exchanges) if not exchange.results or not i]
    return (range(a, b) for a, b in pairwise([*starts, len(exchanges)]))


def _protected(exchanges: Sequence[Exchange], strictness: int) -> Iterator[Item]:
    lead = max(i for i, exchange in enumerate(exchanges) if not exchange.results or not i)
    if exchanges[lead].parts:
        yield lead, len(exchanges[lead].parts) - 1
    said = [((i, n), m) for i, e in enumerate(exchanges) for n, p in enumerate(e.parts) if (m := p.message)]
    for wanted in (
        [item for item, message in said if message.role == "user" and is_human(message)],
        [item for item, message in said if message.role == "user"],
        [item for item, _ in said],
    ):
        if wanted:
            yield from (wanted[0], wanted[-1])
            break
    if exchanges[-1].results:
        yield from ((len(exchanges) - 1, n) for n in range(len(exchanges[-1].parts)))
    if not strictness:
        newest = [item for item, _ in said if item[0] == len(exchanges) - 1][-1:]
        yield from newest or [(i, ANSWER) for i in range(len(exchanges) - 1)][-1:]
    for i, exchange in enumerate(exchanges):
        if exchange.instructs and (strictness < 2 or exchange.name == exchanges[-1].name):
            yield i, len(exchange.parts) - 1


def _grouped(items: Iterable[Item], links: Iterable[tuple[Item, Item]]) -> list[Items]:
    """The items, those together that are linked."""
    group = {item: {item} for item in items}
    for a, b in links:
        if group[a] is not group[b]:
            small, large = sorted((group[a], group[b]), key=len)
            large |= small
            group |= dict.fromkeys(small, large)
    return [frozenset(found) for found in {id(found): found for found in group.values()}.values()]


def _within(span: tuple[int, int], spans: Spans) -> bool:
    return span[0] < span[1] and not without((span,), spans)
