"""Pages outside of a host, for measurements."""

import torch
from torch import Tensor

from qkvshare_agents.errors import QKVShareError
from qkvshare_agents.ids import Ids
from qkvshare_agents.kv import page
from qkvshare_agents.kv.page import Page, Precision
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.store.page_store import PageStore

ROOM_TOKENS = 256  # in the working cache, for what follows
_ROWS = 32


def bring(store: PageStore, ids: Ids, kv: KVCache, *, room_tokens: int = ROOM_TOKENS) -> int:
    """Put the stored KV of all `ids` into `kv`. Raises QKVShareError if some are missing."""
    kv.clear(len(ids) + room_tokens)
    kv.load(store.match(ids).runs)
    if kv.tokens != len(ids):
        raise QKVShareError(f"only {kv.tokens} of {len(ids)} tokens were handed over")
    return kv.tokens


def seal_all(kv: KVCache, ids: Ids, precision: Precision, *, whole: bool = False) -> PageStore:
    """A store of its own with the KV of `ids`, which `kv` holds. whole: also what no window will look back at."""
    window = None if whole else kv.shape.window
    store = PageStore(b"", 2**62, window)

    def make_page(start: int, stop: int, sealed: bool) -> Page:
        span = kv.span(start, stop)
        if window and not window.sees(start, stop, (len(ids),)):
            span = span.without(window.layers)
        return page.seal(span, precision, starts_sequence=start == 0) if sealed else page.keep_native(span)

    store.extend(ids, precision.page_size, len(ids) - precision.residual_length, make_page)
    return store


def kl_divergence(a: Tensor, b: Tensor) -> float:
    """KL(a || b) of the distributions that logits [V] stand for, in nats."""
    p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum())


def kl_divergences(a: Tensor, b: Tensor) -> Tensor:
    """KL(a || b) in nats [N] of each row of logits [N, V]; in float64, since 8 bits come to 1e-6."""
    rows = []
    for p, q in zip(a.split(_ROWS), b.split(_ROWS), strict=True):  # few at a time: V is large
        p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
        rows.append((p.exp() * (p - q)).sum(-1))
    return torch.cat(rows)
