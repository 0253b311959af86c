"""Spend a byte budget where it hurts least (pure: numbers in, widths out).

Every *item* is what can have a width of its own: the keys or the values of one layer of one agent. Its *curve* says
what it takes and what error stays at each width. The sum of the weighted errors is minimised under a number of bytes
(multiple-choice knapsack). Only points on the lower convex hull of a curve are used, and steps along the hulls are
taken in the order of error drop per byte, from a heap. That is optimal but for the one step that did not fit any
more (Sinha and Zoltners, The multiple-choice knapsack problem, 1979).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

WIDTHS = (2, 3, 4, 8)


@dataclass(frozen=True)
class Curve:
    """Bytes and error at each of `widths`, which go up as bytes do. Errors may be of any unit and need not fall."""

    nbytes: tuple[int, ...]
    errors: tuple[float, ...]
    widths: tuple[int, ...] = WIDTHS

    def __post_init__(self) -> None:
        if not len(self.nbytes) == len(self.errors) == len(self.widths) > 0:
            raise ValueError(f"a curve needs bytes and an error for each width: {self}")
        if any(a >= b for a, b in zip(self.nbytes, self.nbytes[1:], strict=False)) or self.nbytes[0] < 0:
            raise ValueError(f"bytes must go up with the width: {self.nbytes}")

    @cached_property
    def steps(self) -> tuple[tuple[float, int, int], ...]:
        """Along the lower convex hull, from the narrowest width to the smallest error: (error drop per byte, further
        bytes, index that is reached). The drops per byte fall."""
        nbytes, errors = self.nbytes, self.errors
        found: list[tuple[float, int, int]] = []
        start = 0
        for i in range(1, len(nbytes)):
            if errors[i] >= errors[start]:
                continue
            drop = (errors[start] - errors[i]) / (nbytes[i] - nbytes[start])
            while found and drop >= found[-1][0]:
                found.pop()
                start = found[-1][2] if found else 0
                drop = (errors[start] - errors[i]) / (nbytes[i] - nbytes[start])
            found.append((drop, nbytes[i] - nbytes[start], i))
            start = i
        return tuple(found)


@dataclass(frozen=True)
class Item:
    """`count` equal pieces (pages) that share one width. Their error, of all together, counts `weight` times."""

    curve: Curve
    weight: float = 1.0
    count: int = 1


@dataclass(frozen=True)
class Allocation:
    """widths of the items, in order; what they take and which weighted error stays. fits: within the budget.

    If even the narrowest widths do not fit, all are narrowest: whoever asked has to drop something.
    """

    widths: tuple[int, ...]
    nbytes: int
    error: float
    fits: bool


def allocate(items: Sequence[Item], budget_bytes: int) -> Allocation:
    """Widths with the smallest summed error that take at most `budget_bytes`, but for one step.

    No other widths within the budget have an error that is smaller by more than the drop of one step. A larger
    budget never has a larger error. O(n log n); 64 agents x 80 layers of keys and values take tens of milliseconds.
    Raises ValueError for negative weights or counts.
    """
    if any(item.weight < 0 or item.count < 0 for item in items):
        raise ValueError("weights and counts must not be negative")
    chosen = [0] * len(items)
    left = budget_bytes - sum(item.count * item.curve.nbytes[0] for item in items)
    fits = left >= 0
    heap, waiting = [], [iter(item.curve.steps) for item in items]
    for index, item in enumerate(items if fits else ()):
        if item.count and item.weight and (step := next(waiting[index], None)):
            heap.append((-step[0] * item.weight / item.count, index, step[1] * item.count, step[2]))
    heapq.heapify(heap)
    while heap:
        _, index, further, reached = heap[0]
        if further > left:
            heapq.heappop(heap)  # this item stays where it is; smaller steps of others may still fit
            continue
        left -= further
        chosen[index] = reached
        if step := next(waiting[index], None):
            item = items[index]
            heapq.heapreplace(heap, (-step[0] * item.weight / item.count, index, step[1] * item.count, step[2]))
        else:
            heapq.heappop(heap)
    return Allocation(
        tuple(item.curve.widths[c] for item, c in zip(items, chosen, strict=True)),
        sum(item.count * item.curve.nbytes[c] for item, c in zip(items, chosen, strict=True)),
        sum(item.weight * item.curve.errors[c] for item, c in zip(items, chosen, strict=True)),
        fits,
    )
