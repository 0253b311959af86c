"""Runs of token ids in order, so that those which a prompt begins with are found without a look at the others.

What lies between two runs in the order has in common with both at least what they have in common with each other. So
the neighbours of a prompt's own place are most like it, and less alike ones follow outwards.
"""

from bisect import bisect_left, bisect_right, insort_right
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Generic, TypeVar

from qkvshare_agents.ids import Ids

T = TypeVar("T")
_ids_of = attrgetter("ids")


class Prefixes(Generic[T]):
    """Items by their ids, which are not empty and differ from each other. ids_of: an item's (default: `item.ids`)."""

    __slots__ = ("_ids_of", "_items", "_longest")

    def __init__(self, ids_of: Callable[[T], Ids] = _ids_of) -> None:
        self._ids_of = ids_of
        self._items: list[T] = []  # ascending by ids
        self._longest = 0  # tokens that any item ever had

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def add(self, item: T) -> None:
        ids = self._ids_of(item)
        self._longest = max(self._longest, len(ids))
        insort_right(self._items, item, key=self._ids_of)

    def remove(self, ids: Ids) -> None:
        """Raises KeyError if no item has exactly these ids."""
        if self.get(ids) is None:
            raise KeyError(ids)
        del self._items[bisect_left(self._items, ids, key=self._ids_of)]

    def clear(self) -> None:
        self._items.clear()

    def get(self, ids: Ids) -> T | None:
        """The item with exactly these ids."""
        at = bisect_left(self._items, ids, key=self._ids_of)
        return self._items[at] if at < len(self._items) and self._ids_of(self._items[at]) == ids else None

    def begun_with(self, ids: Ids) -> Iterator[T]:
        """Items whose ids begin with `ids`, or are just these."""
        for at in range(bisect_left(self._items, ids, key=self._ids_of), len(self._items)):
            if self._ids_of(self._items[at])[: len(ids)] != ids:
                return
            yield self._items[at]

    def beginning(self, ids: Ids, start: int = 0) -> Iterator[T]:
        """Items that `ids` go on with from `start` on, used up, the longest first."""
        rest = ids[start : start + self._longest]
        while rest and (at := bisect_right(self._items, rest, key=self._ids_of)):
            item = self._items[at - 1]
            common = common_tokens(self._ids_of(item), rest)
            if common == len(self._ids_of(item)):
                yield item
                common -= 1  # and now shorter ones
            rest = rest[:common]

    def parting(self, ids: Ids, start: int, least: int) -> Iterator[tuple[T, int]]:
        """Items that `ids` begin to go on with from `start` on, for at least `least` tokens, and do not use up: (item,
        tokens in common), most first."""
        rest = ids[start : start + self._longest]
        right = bisect_right(self._items, rest, key=self._ids_of)
        left = right - 1
        after, before = self._common(right, rest), self._common(left, rest)
        while max(after, before) >= least:
            if after >= before:
                item, common, right = self._items[right], after, right + 1
                after = self._common(right, rest)
            else:
                item, common, left = self._items[left], before, left - 1
                before = self._common(left, rest)
            if common < len(self._ids_of(item)):
                yield item, common

    def _common(self, at: int, rest: Ids) -> int:
        """-1 where there is no item."""
        return common_tokens(self._ids_of(self._items[at]), rest) if 0 <= at < len(self._items) else -1


def common_tokens(a: Ids, b: Ids) -> int:
    """How many leading ids are the same."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # the first that differs is in [low, high)
        middle = (low + high) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle)
    return low
