"""What reading the text instead would have taken, and said."""

import time
from collections.abc import Sequence

from torch import Tensor

from qkvshare_agents.model.adapters import active_from
from qkvshare_agents.model.engine import Engine


def replay(engine: Engine, ids: Sequence[int], first: Tensor) -> tuple[float, float]:
    """Milliseconds that reading `ids` takes, and how far `first` [V], logits behind them, is off (KL in nats)."""
    started = time.perf_counter()
    run = engine.begin(None)
    run.active_from = active_from(engine.model, ids)
    logits = engine.feed(run, ids)
    assert logits is not None
    int(logits.argmax())
    replay_ms = (time.perf_counter() - started) * 1000
    expected, got = logits.double().log_softmax(-1), first.double().log_softmax(-1)
    return replay_ms, float((expected.exp() * (expected - got)).sum())
