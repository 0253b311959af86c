"""How fast a model decodes behind caches of several kinds."""

import statistics
import time
from collections.abc import Sequence
from contextlib import suppress

from qkvshare_agents.errors import UnsupportedModel
from qkvshare_agents.ids import Ids
from qkvshare_agents.kv.lean_cache import LeanCache
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.model.packed_attention import begin as begin_packed
from qkvshare_agents.model.run import Run

DECODED = 16  # tokens


def tokens_per_s(engine: Engine, caches: Sequence[KVCache], cue: Ids) -> list[float]:
    """Of greedy decoding behind each of `caches` and `cue`. The caches hold all of it afterwards.

    They take turns token by token, so that whatever else the machine does slows all of them; medians count.
    """
    runs = [_begin(engine, kv) for kv in caches]
    fed, took = [cue] * len(runs), [list[float]() for _ in runs]
    for _ in range(1 + DECODED):
        for index, run in enumerate(runs):
            started = time.perf_counter()
            logits = engine.feed(run, fed[index])
            assert logits is not None
            fed[index] = (int(logits.argmax()),)
            took[index].append(time.perf_counter() - started)
    return [1 / statistics.median(times[1:]) for times in took]


def _begin(engine: Engine, kv: KVCache) -> Run:
    if isinstance(kv, LeanCache):
        with suppress(UnsupportedModel):
            return begin_packed(engine, kv.packed)
    return engine.begin(kv)
