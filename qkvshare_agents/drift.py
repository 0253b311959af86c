"""Whether handed-over KV still says what its sender's said: canaries.

A canary is what the sender's model expected next behind its last few tokens, under the cache that it continued with.
The receiver reads these tokens again behind the KV that came, all in one forward, and compares. One position would not
do: where the text itself leaves no choice, a wrong cache gives the right answer, too.

A canary finds faults: another position, layer or model, damage, KV too coarse. It can't find a lie by someone who has
the model and computes the canary of the lie.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WATCHED = 8  # tokens whose distributions are compared
LIKELIEST = 16  # tokens of each distribution that travel
UNITS_PER_NAT = 1_000_000  # log-probabilities are whole numbers: the manifest holds no fractions
_LEAST = -100.0  # nats
_KEPT = 4096
# Mean KL in nats above which KV is refused, by the narrowest width in it: see EXPERIMENTS.md
LIMITS = {8: 0.05, 4: 0.25, 3: 0.5, 2: 0.5}


@dataclass(frozen=True)
class Canary:
    """What a model expected behind each of its last tokens; the last row stands behind the last of them.

    ids: per row the likeliest tokens, likeliest first. logs: their log-probabilities in millionths of a nat.
    """

    ids: tuple[tuple[int, ...], ...]
    logs: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        return len(self.ids)


def canary_of(logits: Tensor) -> Canary:
    """logits [N, V]: behind each of the last N tokens."""
    top = logits.float().log_softmax(-1).topk(min(LIKELIEST, logits.shape[-1]))
    units = (top.values.clamp(_LEAST, 0) * UNITS_PER_NAT).round().long()
    return Canary(tuple(map(tuple, top.indices.tolist())), tuple(map(tuple, units.tolist())))


def divergence(canary: Canary, logits: Tensor) -> float:
    """Mean KL(sender || receiver) in nats over the rows of logits [N, V]; all other tokens are one. NaN for NaN."""
    found = logits.double().log_softmax(-1).cpu()
    total = 0.0
    for ids, logs, row in zip(canary.ids, canary.logs, found, strict=True):
        p = torch.tensor(logs, dtype=torch.float64) / UNITS_PER_NAT
        q = row[torch.tensor(ids)]
        rest_p, rest_q = (float((1 - x.exp().sum()).clamp_min(1e-6)) for x in (p, q))
        total += float((p.exp() * (p - q)).sum()) + rest_p * float(torch.tensor(rest_p / rest_q).log())
    return total / canary.tokens


def default_limit(widths: Iterable[int | None]) -> float:
    """In nats, for KV whose pages have these widths (None: native)."""
    return LIMITS[min((width for width in widths if width), default=8)]


class Canaries:
    """Canaries by the ids that they stand behind; the oldest go. Thread-safe."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, Canary] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, ids: Sequence[int], canary: Canary) -> None:
        """`ids`: all tokens up to the canary's last row."""
        with self._lock:
            self._kept[_name(ids)] = canary
            self._kept.move_to_end(_name(ids))
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)

    def find(self, ids: Sequence[int]) -> Canary | None:
        with self._lock:
            return self._kept.get(_name(ids))

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()


def _name(ids: Sequence[int]) -> bytes:
    return hashlib.sha256(b"".join(i.to_bytes(8, "little") for i in ids)).digest()
