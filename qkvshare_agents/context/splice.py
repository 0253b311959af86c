"""Where a text that was read behind one prompt stands in another prompt."""

from collections import OrderedDict
from dataclasses import dataclass

from qkvshare_agents.ids import Ids
from qkvshare_agents.store.runs import Readers

SHORTEST = 32  # tokens worth splicing
_GRAM = 16
_MOST = 32  # stored sequences that are searched, the newest


@dataclass(frozen=True)
class Sequence:
    """ids whose KV the store has under `path`, which is as long; number x was computed at position x + shift."""

    ids: Ids
    path: Ids
    shift: int = 0
    owners: tuple[str, ...] = ()


@dataclass(frozen=True)
class Segment:
    """`tokens` ids that a sequence has from number `source` on, and a prompt from number `start` on."""

    sequence: Sequence
    source: int
    start: int
    tokens: int


class Sequences:
    """What can be spliced: the newest sequences of a store."""

    def __init__(self) -> None:
        self._known: OrderedDict[Ids, Sequence] = OrderedDict()

    def add(self, sequence: Sequence) -> None:
        """Beginnings of it that are known are forgotten."""
        for path in [p for p in self._known if p == sequence.path[: len(p)]]:
            del self._known[path]
        self._known[sequence.path] = sequence
        while len(self._known) > _MOST:
            self._known.popitem(last=False)

    def longest(self, ids: Ids, start: int, readers: Readers | None) -> Segment | None:
        """The longest run of `ids` from number `start` on that a sequence of the readers has, compared id by id.

        Runs of 31 tokens and more are found; shorter ones perhaps.
        """
        here: dict[Ids, list[int]] = {}
        for at in range(start, len(ids) - _GRAM + 1):
            here.setdefault(ids[at : at + _GRAM], []).append(at)
        best: Segment | None = None
        for known in reversed(self._known.values()):
            if readers is not None and not readers & set(known.owners):
                continue
            for source in range(0, len(known.ids) - _GRAM + 1, _GRAM):
                for at in here.get(known.ids[source : source + _GRAM], ()):
                    found = _grown(known, source, ids, at, start)
                    if best is None or found.tokens > best.tokens:
                        best = found
        return best


def _grown(known: Sequence, source: int, ids: Ids, at: int, start: int) -> Segment:
    before = 0
    while source - before > 0 and at - before > start and known.ids[source - before - 1] == ids[at - before - 1]:
        before += 1
    after = _GRAM
    limit = min(len(known.ids) - source, len(ids) - at)
    while after < limit and known.ids[source + after] == ids[at + after]:
        after += 1
    return Segment(known, source - before, at - before, before + after)
