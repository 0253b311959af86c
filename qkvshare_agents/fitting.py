"""Which tokens of a prompt go when it does not fit into the context: pure functions of numbers.

What stays at the front is the header (the system text, which is the same for every agent), or, where that is long, the
first tokens only, since most attention goes there (StreamingLLM, arXiv 2309.17453). Cuts grow in coarse steps, so that
one serves several turns, and end where a turn begins if there is one near.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from qkvshare_agents.errors import ContextOverflow

Fit = Literal["drop_head", "drop_least_attended", "summarise", "error"]
FITS: tuple[Fit, ...] = ("drop_head", "drop_least_attended", "summarise", "error")
SHORTEST_CONTEXT = 64  # tokens; less can't hold the delimiters of a turn and an answer
_STEPS = 8  # in which a cut grows, to the context's room for the prompt
_NEWEST = 2  # a share of the room: tokens at the end that are never dropped for their little attention
Spans = tuple[tuple[int, int], ...]  # [start, stop), in order, apart
T = TypeVar("T")


@dataclass(frozen=True)
class Room:
    """context: tokens in all. answer: those of them that are left to the answer."""

    context: int
    answer: int

    @property
    def prompt(self) -> int:
        return self.context - self.answer

    @property
    def step(self) -> int:
        return max(1, self.prompt // _STEPS)

    def lacks(self, prompt_tokens: int) -> int:
        """How many tokens of a prompt are too many; 0 if it fits."""
        return max(0, prompt_tokens - self.prompt)


def room_for(context: int, max_tokens: int | None) -> Room:
    """An answer gets what it asked for, up to half of the context."""
    return Room(context, min(max_tokens or context // _STEPS, context // 2))


def cut_head(total: int, header: int, sinks: int, starts: Iterable[int], room: Room, already: Spans = ()) -> Spans:
    """Drop what follows the header, or the sinks; at least `already`, which was dropped before.

    total: tokens of the prompt, header: of its system text. starts: where later turns begin. Raises ContextOverflow if
    the context is too small for anything.
    """
    first, lacking = _front(header, sinks, room), room.lacks(total)
    if not lacking:
        return already
    stop = first + -(-lacking // room.step) * room.step
    stop = next((start for start in sorted(starts) if stop <= start < min(stop + room.step, total)), stop)
    if total - stop < 1 or total - (stop - first) > room.prompt:
        raise ContextOverflow(f"a context of {room.context} tokens holds no part of a prompt of {total}")
    return joined([*already, (first, stop)])


def cut_least(total: int, header: int, sinks: int, mass: Sequence[float], room: Room, already: Spans = ()) -> Spans:
    """Drop the tokens that received least attention; header and newest tokens stay (H2O, arXiv 2306.14048).

    mass: attention that the prompt's leading tokens received; tokens beyond it stay.
    """
    first, last = _front(header, sinks, room), min(len(mass), total - room.prompt // _NEWEST)
    lacking = -(-room.lacks(total) // room.step) * room.step
    gone = {i for start, stop in already for i in range(start, stop)}
    rest = sorted((i for i in range(first, last) if i not in gone), key=lambda i: mass[i])
    gone.update(rest[: max(0, lacking - len(gone))])
    return joined((i, i + 1) for i in gone)


def _front(header: int, sinks: int, room: Room) -> int:
    return header if sinks <= header <= room.prompt // 4 else min(sinks, room.prompt // 4)


def joined(spans: Iterable[tuple[int, int]]) -> Spans:
    """The same tokens as spans that are in order and apart."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        elif start < stop:
            found.append((start, stop))
    return tuple(found)


def count(spans: Spans) -> int:
    return sum(stop - start for start, stop in spans)


def without(spans: Spans, dropped: Spans) -> Spans:
    """The tokens of `spans` that are not `dropped`."""
    left: list[tuple[int, int]] = []
    for start, stop in spans:
        for from_, to in dropped:
            if from_ < stop and start < to:
                left += [(start, from_)] if start < from_ else []
                start = max(start, min(to, stop))
        left += [(start, stop)] if start < stop else []
    return tuple(left)


def moved(spans: Spans, by: int) -> Spans:
    return tuple((start + by, stop + by) for start, stop in spans)


def cut(ids: tuple[T, ...], dropped: Spans) -> tuple[T, ...]:
    """`ids` without those that are dropped."""
    return tuple(i for start, stop in without(((0, len(ids)),), dropped) for i in ids[start:stop])


def show(spans: Spans) -> str:
    """`4-644`, or how many places if there are many."""
    if len(spans) > 3:
        return f"in {len(spans)} places between {spans[0][0]} and {spans[-1][1]}"
    return ", ".join(f"{start}-{stop}" for start, stop in spans)
