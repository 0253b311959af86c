"""How much of a context a prompt may take, and spans of its tokens.

Cuts grow in coarse steps of the room, so that one serves several turns.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

Fit = Literal["drop_head", "drop_least_attended", "summarise", "error"]
FITS: tuple[Fit, ...] = ("drop_head", "drop_least_attended", "summarise", "error")
SHORTEST_CONTEXT = 64  # tokens; less can't hold the delimiters of a turn and an answer
_STEPS = 8  # in which a cut grows, to the context's room for the prompt
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
