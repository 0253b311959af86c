"""Spans of positions: [start, stop), in order, apart."""

from collections.abc import Iterable
from typing import TypeVar

Spans = tuple[tuple[int, int], ...]  # [start, stop), in order, apart


T = TypeVar("T")


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
