"""Whether handed-over KV says what its sender's said: canaries.

A canary is what the sender's model expects next behind each of a few last tokens, read behind the very pages that it
sends. The receiver reads these tokens again behind the pages that came, all in one forward, and compares. Both
decode the same bytes, so that right KV agrees up to rounding, however few bits it has, and everything else shows:
another position, layer, text or model, or damage. One token would not do: where the text leaves no choice, a wrong
cache gives the right answer, too.

At the sender the same forward shows whether the pages are too coarse: it is compared with what the turn that computed
the KV expected, behind its native cache.

A canary finds faults. It can't find a lie by someone who has the model and computes the canary of the lie. Whoever
has not can't weaken it either: how many rows and tokens a canary must have is the receiver's to say.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkvshare_agents.kv.shape import WATCHED

LIKELIEST = 16  # tokens of each distribution that travel
UNITS_PER_NAT = 1_000_000  # log-probabilities are whole numbers: the manifest holds no fractions
# How far KV may be off its canary, in nats per token: rounding differs from machine to machine, in 16 bits by more
LIMIT, LIMIT_16_BIT = 1e-6, 5e-3
COARSE = 0.5  # nats per token by which packed KV may be off native KV before it leaves
# Where some of the pages are the receiver's own: by the narrowest width
LIMITS_MIXED = {8: 5e-3, 4: 0.1, 3: COARSE, 2: COARSE}
_LEAST = -100.0  # nats
_LEAST_REST = 1e-6  # probability of all tokens together that are not named: below that it is rounding


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

    def last(self, tokens: int) -> "Canary":
        return Canary(self.ids[-tokens:], self.logs[-tokens:])


def canary_of(logits: Tensor) -> Canary:
    """logits [N, V]: behind each of the last N tokens."""
    top = logits.float().log_softmax(-1).topk(min(LIKELIEST, logits.shape[-1]))
    units = (top.values.clamp(_LEAST, 0) * UNITS_PER_NAT).round().long()
    return Canary(tuple(map(tuple, top.indices.tolist())), tuple(map(tuple, units.tolist())))


def rows_of(tokens: int, room: int | None = None) -> int:
    """Rows that the canary of `tokens` tokens must have. room: what is left of the context, where the last tokens are
    read once more behind state, which can't be cut."""
    return min(WATCHED, tokens, WATCHED if room is None else room)


def weakness(canary: Canary, rows: int, vocabulary: int) -> str | None:
    """Why a canary says too little to tell KV by, or nothing that this model can compare."""
    least = min(LIKELIEST, vocabulary)
    if canary.tokens != rows:
        return f"the package's canary has {canary.tokens} rows, and {rows} are compared"
    if any(len(set(ids)) < max(least, len(ids)) for ids in canary.ids):
        return f"a row of the package's canary does not name the {least} likeliest tokens, each once"
    if max(map(max, canary.ids)) >= vocabulary:
        return "the package's canary has token ids that the model has not"
    return None


def divergence(canary: Canary, logits: Tensor) -> float:
    """Mean KL(sender || receiver) in nats over the rows of logits [N, V], the least that the canary leaves open.

    It is taken over the tokens that the canary names and the receiver's own likeliest ones; all others are one. What
    the canary does not name had at most the probability of the least likely token that it names. NaN for NaN.
    """
    found = logits.double().log_softmax(-1).cpu()
    if max(map(max, canary.ids)) >= found.shape[-1]:
        return math.inf
    own = found.topk(min(LIKELIEST, found.shape[-1]), dim=-1).indices.tolist()
    total = 0.0
    for ids, logs, row, likeliest in zip(canary.ids, canary.logs, found, own, strict=True):
        p = torch.tensor(logs, dtype=torch.float64) / UNITS_PER_NAT
        q = row[torch.tensor(ids)]
        rest_p, rest_q = (float((1 - x.exp().sum()).clamp_min(_LEAST_REST)) for x in (p, q))
        unnamed = [float(row[token].exp()) for token in likeliest if token not in ids]
        total += float((p.exp() * (p - q)).sum()) + _rest(rest_p, rest_q, unnamed, float(p.min().exp()))
    return total / canary.tokens


def _rest(p: float, q: float, unnamed: Sequence[float], most: float) -> float:
    """The part of the divergence that tokens without a name have: together `p` at the sender, `q` at the receiver.

    unnamed: the receiver's probabilities of some of them, descending. most: what each had at the sender at most. The
    divergence is least if each has its share of `p`, or `most` where its share is more.
    """
    nats = 0.0
    for one in unnamed:
        if p * one <= most * q:
            break
        nats += most * math.log(most / one)
        p, q = max(p - most, _LEAST_REST), max(q - one, _LEAST_REST)
    return nats + p * math.log(p / q)


def default_limit(dtype: torch.dtype, widths: Collection[int] = (), *, noisy: bool = False) -> float:
    """In nats per token, for a model of this dtype.

    widths: of the receiver's own pages, if it has some of them: these have other rounding errors than those that the
    sender left out. noisy: of quantized weights, which compute in 16 bits or make as much of rounding.
    """
    exact = LIMIT if dtype == torch.float32 and not noisy else LIMIT_16_BIT
    return max(exact, LIMITS_MIXED[min(widths)]) if widths else exact
