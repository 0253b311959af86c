"""How fast a model decodes behind caches of several kinds."""

import statistics
import time
from collections.abc import Sequence
from contextlib import suppress

from qkvshare_agents.engine import Engine, Run
from qkvshare_agents.errors import UnsupportedModel
from qkvshare_agents.kv_cache import KVCache
from qkvshare_agents.lean_cache import LeanCache
from qkvshare_agents.packed_attention import begin as begin_packed

DECODED = 16  # tokens; the first is not timed


def tokens_per_s(engine: Engine, caches: Sequence[KVCache]) -> list[float]:
    """Of greedy decoding behind each of `caches`, which hold the tokens afterwards.

    They take turns token by token, so that whatever else the machine does slows all of them; medians count.
    """
    runs = [_begin(engine, kv) for kv in caches]
    last, took = [0] * len(runs), [list[float]() for _ in runs]
    for _ in range(DECODED):
        for index, run in enumerate(runs):
            started = time.perf_counter()
            logits = engine.feed(run, last[index : index + 1])
            assert logits is not None
            last[index] = int(logits.argmax())
            took[index].append(time.perf_counter() - started)
    return [1 / statistics.median(times[1:]) for times in took]


def _begin(engine: Engine, kv: KVCache) -> Run:
    if isinstance(kv, LeanCache):
        with suppress(UnsupportedModel):
            return begin_packed(engine, kv.packed)
    return engine.begin(kv)
