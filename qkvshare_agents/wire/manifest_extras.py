"""What a manifest says beside its pages: recurrent state, balances, and the canary (FORMAT.md)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qkvshare_agents.errors import PackageError
from qkvshare_agents.kv.balance import Balance, balance_of
from qkvshare_agents.kv.shape import LayerGroup
from qkvshare_agents.model.canary import UNITS_PER_NAT, Canary
from qkvshare_agents.wire import checks, container
from qkvshare_agents.wire.container import Shape

NATIVE_DTYPES = ("F32", "F16", "BF16")
MAX_LAYERS = 2**12
MAX_STATE_TENSORS, LONGEST_NAME = 2**14, 64
MAX_BALANCES = 2**8
MAX_CANARY_ROWS, MAX_CANARY_TOKENS, MAX_VOCABULARY = 64, 256, 2**31


@dataclass(frozen=True)
class StateTensor:
    """A tensor of recurrent state; the fields of `snapshot.StatePart`, without its bytes."""

    layer: int
    name: str
    dtype: str
    shape: Shape


@dataclass(frozen=True)
class StateHead:
    """Recurrent state behind `tokens` tokens, which are all that the runs cover. digest: of its bytes, in hex."""

    tokens: int
    digest: str
    tensors: tuple[StateTensor, ...]

    def table(self) -> list[tuple[str, str, Shape]]:
        """(name, dtype, shape) of its tensors in the container."""
        return [(f"s{number}", tensor.dtype, tensor.shape) for number, tensor in enumerate(self.tensors)]


def state(entry: Any, covered: int) -> StateHead:
    """covered: tokens of the runs. Raises PackageError."""
    s = checks.table(entry, StateHead, "state")
    checks.whole(s["tokens"], covered, covered, "state.tokens (of the runs)")
    checks.hexadecimal(s["digest"], 64, "state.digest")
    tensors = tuple(_tensor(part) for part in checks.entries(s["tensors"], MAX_STATE_TENSORS, "state.tensors"))
    if not tensors or len({(t.layer, t.name) for t in tensors}) != len(tensors):
        raise PackageError("a state needs at least one tensor, and no two of one name in a layer")
    return StateHead(s["tokens"], s["digest"], tensors)


def _tensor(entry: Any) -> StateTensor:
    t = checks.table(entry, StateTensor, "a tensor of the state")
    checks.whole(t["layer"], 0, MAX_LAYERS - 1, "state layer")
    if not checks.string(t["name"], "state name").isascii() or not 1 <= len(t["name"]) <= LONGEST_NAME:
        raise PackageError(f"a tensor of the state needs an ASCII name of 1 to {LONGEST_NAME} characters")
    checks.choice(t["dtype"], NATIVE_DTYPES, "state dtype")
    sizes = checks.entries(t["shape"], container.MAX_DIMENSIONS, "state shape")
    shape = tuple(checks.whole(size, 1, 2**40, "an axis of the state") for size in sizes)
    if not shape:
        raise PackageError("a tensor of the state has no axis")
    return StateTensor(t["layer"], t["name"], t["dtype"], shape)


def balances(entry: Any, groups: Sequence[LayerGroup]) -> tuple[Balance, ...]:
    """groups: of the manifest, whose layers are 0, 1, 2, ... Raises PackageError."""
    widths = [width for _, width in sorted((i, g.heads * g.key_dim) for g in groups for i in g.layers)]
    found = []
    for text in checks.entries(entry, MAX_BALANCES, "balances"):
        checks.hexadecimal(text, 2 * sum(widths), "a balance")
        try:
            found.append(balance_of(bytes.fromhex(text), widths))
        except ValueError as error:
            raise PackageError(str(error)) from None
    if not found or len(set(found)) != len(found):
        raise PackageError("balances are left out where there are none, and no two are equal")
    return tuple(found)


def canary(entry: Any, covered: int) -> Canary | None:
    """covered: tokens of the runs. Raises PackageError."""
    if entry is None:
        return None
    c = checks.table(entry, Canary, "canary")
    rows: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    both = zip(*(checks.entries(c[name], MAX_CANARY_ROWS, f"canary.{name}") for name in ("ids", "logs")), strict=False)
    for row in both:
        ids, logs = (checks.entries(part, MAX_CANARY_TOKENS, "canary row") for part in row)
        rows.append(
            (
                tuple(checks.whole(i, 0, MAX_VOCABULARY - 1, "canary id") for i in ids),
                tuple(checks.whole(log, -100 * UNITS_PER_NAT, 0, "canary log-probability") for log in logs),
            )
        )
        total = sum(math.exp(log / UNITS_PER_NAT) for log in rows[-1][1])
        if not len(set(ids)) == len(ids) == len(logs) > 0 or sorted(logs, reverse=True) != logs or total > 1.001:
            raise PackageError("a canary row needs different ids, with log-probabilities of a distribution, descending")
    if not 1 <= len(rows) == len(c["ids"]) == len(c["logs"]) <= covered:
        raise PackageError(f"a canary needs at least one row and at most one for each of the {covered} tokens")
    return Canary(tuple(ids for ids, _ in rows), tuple(logs for _, logs in rows))
