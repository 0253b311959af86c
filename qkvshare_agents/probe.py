"""What a model does behind injected KV, found out by doing it when it is loaded."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import DynamicCache

from qkvshare_agents.configuration import picked_tokens
from qkvshare_agents.errors import UnsupportedModel
from qkvshare_agents.kv_cache import KVCache
from qkvshare_agents.layers import has_state, kinds_of, longest_window, shape_of
from qkvshare_agents.probed import Replay
from qkvshare_agents.run import Run

if TYPE_CHECKING:
    from qkvshare_agents.engine import Engine

WINDOW_TOKENS = 64  # wider ones are probed as if they were this wide, in seconds on a CPU
_TOKENS = 12
_TOLERANCE, _TOLERANCE_16_BIT = 1e-4, 3e-2  # relative, of logits
_MOST = 0.25  # beyond, nothing could be told from rounding
# What models raise when they are called in a way that they are not made for
_FAULTS = (RuntimeError, TypeError, ValueError, AttributeError, IndexError)


def tolerance_of(dtype: torch.dtype) -> float:
    """How far logits may be off for rounding, relatively."""
    return _TOLERANCE if dtype == torch.float32 else _TOLERANCE_16_BIT


def settle(engine: "Engine") -> None:
    """Use quantized weights once, since some are packed, or unpacked, then.

    Not in inference mode: they can still be trained with. Raises UnsupportedModel if they can't be used.
    """
    try:
        with torch.no_grad():
            engine.read(Run(None, None, 0), engine.probe_ids(1), 1)
    except Exception as error:  # whatever a kernel raises that is not made for this machine
        raise UnsupportedModel(f"{engine.name}: its quantized weights can't be used here: {error}") from error


@torch.inference_mode()
def find(engine: "Engine") -> str | None:
    """Set the engine's shape, has_state, replay and tolerance; returns why KV can't be handed over, or None."""
    with engine.narrowed():
        refusal = _find(engine)
    engine.shape = engine.shape and engine.with_windows(engine.shape)
    if refusal:
        engine.replay = _replay(engine)
    return refusal


def _find(engine: "Engine") -> str | None:
    cache = DynamicCache(config=engine.config)
    name, window = engine.config.model_type, longest_window(cache)
    if window > WINDOW_TOKENS:
        return f"{name} has a window of {window} tokens, which can't be probed"
    # a window shows only beyond its length, and so does what an indexer leaves out
    ids = engine.probe_ids(max(window, picked_tokens(engine.config)) + _TOKENS)
    split = len(ids) - _TOKENS // 2
    try:
        engine.has_state = has_state(kinds_of(cache))
        _tolerate(engine)
        expected = engine.forward(Run(cache, None, 0), ids)
        engine.shape = shape_of(cache)
        ways: list[Replay] = ["chunks", "steps"] if engine.has_state else ["chunks"]
        for engine.replay in ways:
            continued = _continued(engine, ids, split)
            if off(continued, expected) <= engine.tolerance and _is_own(engine, continued, ids, split):
                return None
    except UnsupportedModel as error:
        return f"{name} {error}"
    except _FAULTS as error:
        return f"{name} can't continue from injected KV: {error}"
    return f"{name} continues differently from injected KV than in one forward"


def _continued(engine: "Engine", ids: list[int], split: int) -> Tensor:
    """Logits behind `ids` when those from `split` on are read in another run, behind copies of what came before."""
    assert engine.shape is not None
    kv = KVCache(engine.shape)
    first = engine.begin(kv)
    engine.forward(first, ids[:split])
    kv.state = engine.snapshot(first)
    # Another conversation in between, as on a host: some models keep their state in their modules
    engine.forward(engine.begin(KVCache(engine.shape)), ids[split:])
    logits = engine.feed(engine.begin(kv), ids[split:])
    assert logits is not None
    return logits


def _is_own(engine: "Engine", continued: Tensor, ids: list[int], split: int) -> bool:
    """Where much is put down to rounding: whether transformers' own cache says the same after the same calls."""
    exact = tolerance_of(engine.model.dtype)
    if engine.tolerance <= exact or engine.has_state:
        return True
    run = engine.begin(None)
    engine.forward(run, ids[:split])
    return off(continued, engine.forward(run, ids[split:])) <= exact


def _tolerate(engine: "Engine") -> None:
    """Allow what reading a text in calls of other lengths moves, where no cache is involved.

    In float32 that is nothing. What is wrong with a recurrent state may be smaller than that.
    """
    if engine.has_state or (engine.model.dtype == torch.float32 and not engine.noisy):
        return
    ids = engine.probe_ids(4 * _TOKENS)
    whole = engine.read(Run(None, None, 0), ids, len(ids))
    ends = (1, 2, _TOKENS, len(ids) // 2, len(ids) - 1)
    noise = max(off(engine.read(Run(None, None, 0), ids[:end], 1)[0], whole[end - 1]) for end in ends)
    engine.tolerance = max(_TOLERANCE_16_BIT, min(2 * noise, _MOST))


def _replay(engine: "Engine") -> Replay:
    """How this model's own cache may be filled."""
    ids = engine.probe_ids(_TOKENS)
    expected = engine.read(Run(None, None, 0), ids, 1)[0]
    splits: list[tuple[Replay, int]] = [("chunks", _TOKENS // 2), ("steps", _TOKENS - 1)]
    for way, at in splits:
        try:
            run = engine.begin(None)
            engine.forward(run, ids[:at])
            if off(engine.forward(run, ids[at:]), expected) <= engine.tolerance:
                return way
        except _FAULTS:
            continue
    return "whole"


def off(a: Tensor, b: Tensor) -> float:
    """Relative distance of logits."""
    return float((a - b).norm() / b.norm())
