"""The agents of a host: what they hold, what their layers are sensitive to, and how wide their next pages become.

One budget is shared by all of them. Widths are chosen anew when an agent joins or leaves, the budget changes, the free
bytes have changed by a tenth, or attention shows something else than before; small gains change nothing. They hold
for pages that are sealed later: what is sealed stays as it is.

The agents that spoke last are known, and of those no more than a set number: a server that meets a new team with every
request pays for it once.
"""

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from qkvshare_agents.budget.knapsack import WIDTHS, Allocation, Curve, Item, allocate
from qkvshare_agents.budget.sensitivity import Unit
from qkvshare_agents.kv import codec
from qkvshare_agents.kv.page import Precision
from qkvshare_agents.kv.shape import KVShape

Key = tuple[str, str]  # (scope, name) of an agent
_LEAST_TOKENS = 1024  # that an agent is expected to add
_NEWCOMERS = 2  # as many agents again are expected to come
_WORTHWHILE = 0.9  # new widths are taken when their error is less than this share of the old ones'
_NOTABLE_CHANGE = 0.1  # of the free bytes
_SLOWEST = 0.2  # share of a new observation in the running mean
_MOST = 64  # agents that are known, those that spoke last
# Where nothing was observed: the same for all layers, keys no narrower than values
_UNIFORM = ((8, 8), (8, 4), (4, 4), (4, 3), (4, 2), (3, 2), (2, 2))


@dataclass
class Resident:
    """One agent. ids: its last prompt and answer, as far as KV was computed, in 8 bytes a token; header: how many of
    them are the system text, which others have as well. sealed_tokens: in pages that it made.

    units: what its attention showed, a running mean (None: nothing yet). precision: of its next pages.
    """

    key: Key
    precision: Precision
    ids: Sequence[int] = ()
    header: int = 0
    sealed_tokens: int = 0
    turns: int = 0
    last_turn: float = 0.0
    priority: float = 1.0
    observations: int = 0
    units: list[Unit] | None = None
    curves: list[Curve] = field(default_factory=list)


class Residents:
    """Agents by key, and the widths of their pages. Used on the host's thread; may be iterated over on others.

    forgotten: how often an agent had to make way for one that spoke later; if it comes back, it joins anew.
    base: what all pages have in common. shape: of the model's KV; None for a model without. average_bits: at most so
    many bits per value (scales and minima come on top), and what the budget holds if that is less.
    """

    def __init__(self, base: Precision, shape: KVShape | None, *, average_bits: float | None = None) -> None:
        self._base, self._shape, self._average_bits = base, shape, average_bits
        self._sizes = page_sizes(shape, base) if shape else []
        self._agents: dict[Key, Resident] = {}  # who spoke last comes last
        self._priorities: dict[Key, float] = {}
        self.forgotten = 0
        self._stale = True
        self._free = 0
        self.allocation: Allocation | None = None
        self.uniform_because = "attention was not observed yet"

    def __iter__(self) -> Iterator[Resident]:
        """Who spoke last comes last."""
        return iter(list(self._agents.values()))

    def __len__(self) -> int:
        return len(self._agents)

    def agent(self, key: Key) -> Resident:
        """The agent, which joins if it is new; the one that spoke longest ago may have to make way."""
        known = self._agents.get(key)
        if known is None:
            if len(self._agents) >= _MOST:
                self._forget_oldest()
            known = self._agents[key] = Resident(key, self._base, priority=self._priorities.get(key, 1.0))
            self._stale = True
        return known

    def forget_gone(self, stored_tokens: Callable[[Sequence[int]], int]) -> None:
        """Forget agents most of whose KV is gone, from the one that spoke longest ago to the first that has its own."""
        while self._agents:
            oldest = next(iter(self._agents.values()))
            if 2 * stored_tokens(oldest.ids) >= oldest.header + len(oldest.ids):
                return
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        del self._agents[next(iter(self._agents))]
        self.forgotten += 1
        self._stale = True

    def leave(self, key: Key) -> None:
        """The agent will not come back: nothing is kept free for it."""
        self._priorities.pop(key, None)
        self._stale |= self._agents.pop(key, None) is not None

    def prioritise(self, key: Key, weight: float) -> None:
        """Errors of this agent count `weight` times (default 1), also when it was forgotten and comes back."""
        self._priorities[key] = self.agent(key).priority = weight
        self._stale = True

    def refresh(self) -> None:
        """Choose again before the next page: the budget has changed."""
        self._stale = True

    def observe(self, key: Key, units: Sequence[Unit]) -> None:
        """What attention showed while the agent's prompt was read: one unit per layer with KV."""
        agent = self.agent(key)
        agent.observations += 1
        share = max(1 / agent.observations, _SLOWEST)
        agent.units = [old.moved(new, share) for old, new in zip(agent.units or units, units, strict=True)]
        agent.curves = []
        self._stale = True

    def note_turn(self, key: Key, ids: Sequence[int], sealed_tokens: int, header: int = 0) -> None:
        """The agent's turn has ended with KV of `ids`; `sealed_tokens` of them went into new pages. header: how many of
        the first ones are the system text."""
        agent = self.agent(key)
        self._agents[key] = self._agents.pop(key)
        agent.ids, agent.header, agent.last_turn = array("q", ids), header, time.time()
        agent.turns += 1
        agent.sealed_tokens += sealed_tokens

    def precision(self, key: Key, free_bytes: int) -> Precision:
        """For pages that this agent seals now. free_bytes: of the budget, beside what is stored."""
        agent = self.agent(key)
        changed = abs(free_bytes - self._free) > _NOTABLE_CHANGE * max(self._free, 1)
        if self._sizes and (self._stale or changed):
            self._choose(free_bytes)
            self._stale, self._free = False, free_bytes
        return agent.precision

    def widths(self, agent: Resident) -> list[int]:
        """Of the agent's next pages: keys, then values, of each layer in turn; none where they are native."""
        return _flat(agent.precision, len(self._sizes))

    def _choose(self, free_bytes: int) -> None:
        agents = list(self._agents.values())
        counts = [max(agent.sealed_tokens, _LEAST_TOKENS) // self._base.page_size + 1 for agent in agents]
        available = free_bytes // _NEWCOMERS
        if self._average_bits is not None:
            pages = sum(counts) * sum(size_at(sizes, self._average_bits) for sizes in self._sizes)
            available = min(available, int(pages))
        seen = [agent.units for agent in agents if agent.units]
        if not seen:
            return self._choose_uniform(agents, sum(counts), available)
        self.uniform_because = ""
        typical = mean_units(seen)  # for agents of which nothing was seen yet
        items: list[Item] = []
        turns = sum(agent.turns + 1 for agent in agents) / len(agents)
        for agent, count in zip(agents, counts, strict=True):
            agent.curves = agent.curves or list(curves_of(agent.units or typical, self._sizes))
            weight = agent.priority * (agent.turns + 1) / turns
            items += [Item(curve, weight, count) for curve in agent.curves]
        best = allocate(items, available)
        per_agent = len(self._sizes)
        held = [bits for agent in agents for bits in _flat(agent.precision, per_agent)]
        old = _outcome(items, held)
        if old and self.allocation and old[0] <= available and old[1] * _WORTHWHILE <= best.error:
            return
        self.allocation = best
        for index, agent in enumerate(agents):
            chosen = best.widths[index * per_agent : (index + 1) * per_agent]
            agent.precision = replace(self._base, widths=tuple(zip(chosen[::2], chosen[1::2], strict=True)))

    def _choose_uniform(self, agents: Iterable[Resident], pages: int, available: int) -> None:
        for pair in _UNIFORM:
            size = sum(sizes[WIDTHS.index(pair[i % 2])] for i, sizes in enumerate(self._sizes))
            if size * pages <= available:
                break
        for agent in agents:
            agent.precision = replace(self._base, key_bits=pair[0], value_bits=pair[1], widths=None)


def page_sizes(shape: KVShape, precision: Precision) -> list[tuple[int, ...]]:
    """Bytes of a full sealed page at each of WIDTHS: keys, then values, of each layer in turn."""
    found: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    tokens = precision.page_size
    for group in shape.groups:
        keys = tuple(
            codec.encoded_bytes(group.heads, tokens, group.key_dim, b, "channel", group_size=precision.key_group_size)
            for b in WIDTHS
        )
        values = tuple(
            codec.encoded_bytes(
                group.heads, tokens, group.value_dim, b, "token", group_size=precision.value_group_size, symmetric=True
            )
            for b in WIDTHS
        )
        found.update(dict.fromkeys(group.layers, (keys, values)))
    return [sizes for layer in sorted(found) for sizes in found[layer]]


def curves_of(units: Sequence[Unit], sizes: Sequence[tuple[int, ...]]) -> Iterator[Curve]:
    for index, nbytes in enumerate(sizes):
        costs = units[index // 2].costs("values" if index % 2 else "keys")
        # Small heads may take as much at 3 bits as at 4
        kept = [i for i, size in enumerate(nbytes) if size not in nbytes[i + 1 :]]
        yield Curve(tuple(nbytes[i] for i in kept), tuple(costs[i] for i in kept), tuple(WIDTHS[i] for i in kept))


def mean_units(seen: Sequence[Sequence[Unit]]) -> list[Unit]:
    mean = list(seen[0])
    for count, units in enumerate(seen[1:], 2):
        mean = [old.moved(new, 1 / count) for old, new in zip(mean, units, strict=True)]
    return mean


def size_at(nbytes: Sequence[int], bits: float) -> float:
    """Bytes at a width between those there are."""
    for (low, high), (a, b) in zip(pairwise(WIDTHS), pairwise(nbytes), strict=True):
        if bits <= high:
            return a + (b - a) * (bits - low) / (high - low)
    return nbytes[-1]


def _flat(precision: Precision, count: int) -> list[int]:
    """Widths of keys, then values, of each layer in turn; none for native pages."""
    pairs = [precision.bits(layer) for layer in range(count // 2)]
    return [bits for pair in pairs for bits in pair if bits is not None]


def _outcome(items: Sequence[Item], widths: Sequence[int]) -> tuple[int, float] | None:
    """Bytes and error of the items at other widths."""
    if len(widths) != len(items) or any(b not in i.curve.widths for i, b in zip(items, widths, strict=True)):
        return None
    places = [item.curve.widths.index(bits) for item, bits in zip(items, widths, strict=True)]
    return (
        sum(item.count * item.curve.nbytes[p] for item, p in zip(items, places, strict=True)),
        sum(item.weight * item.curve.errors[p] for item, p in zip(items, places, strict=True)),
    )
