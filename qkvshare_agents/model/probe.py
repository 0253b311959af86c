"""What a model does after injected KV, found out by doing it when it is loaded."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import DynamicCache

from qkvshare_agents.errors import UnsupportedModel
from qkvshare_agents.kv.shape import KVShape
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model.cache_layers import has_state, kinds_of, longest_window, shape_of, snapshot_of
from qkvshare_agents.model.config import narrowed, picked_tokens
from qkvshare_agents.model.driver import Driver, Feeding
from qkvshare_agents.model.run import Run

WINDOW_TOKENS = 64  # wider ones are probed as if they were this wide, in seconds on a CPU
_TOKENS = 12
_TOLERANCE, _TOLERANCE_16_BIT = 1e-4, 3e-2  # relative, of logits
_MOST = 0.25  # beyond, nothing could be told from rounding
# What models raise when they are called in a way that they are not made for
_FAULTS = (RuntimeError, TypeError, ValueError, AttributeError, IndexError)


@dataclass(frozen=True)
class Verdict:
    """What a probe found.

    refusal: why KV can't be handed over (then every turn is text replay), or None. shape: of the KV, None where it
    can't be stored. has_state: some layers fold all tokens into a state that can't be cut. feeding: how prompts may be
    fed. tolerance: how far logits of one text may be off each other, relatively, when it is fed in other calls.
    """

    refusal: str | None
    shape: KVShape | None = None
    has_state: bool = False
    feeding: Feeding = "chunks"
    tolerance: float = _TOLERANCE


def tolerance_of(dtype: torch.dtype) -> float:
    """How far logits may be off for rounding, relatively."""
    return _TOLERANCE if dtype == torch.float32 else _TOLERANCE_16_BIT


def warm_up(driver: Driver) -> None:
    """Use quantized weights once, since some are packed, or unpacked, then.

    Not in inference mode: they can still be trained with. Raises UnsupportedModel if they can't be used.
    """
    try:
        with torch.no_grad():
            driver.read(Run(None, None, 0), driver.probe_ids(1), 1)
    except Exception as error:  # whatever a kernel raises that is not made for this machine
        raise UnsupportedModel(f"{driver.name}: its quantized weights can't be used here: {error}") from error


@torch.inference_mode()
def find(driver: Driver) -> Verdict:
    """Whether continuing from injected KV equals one forward over the same tokens, and how the model may be fed."""
    with narrowed(driver.model, WINDOW_TOKENS):
        found = _find(driver)
        if found.refusal:
            found = replace(found, feeding=_own_feeding(driver, found.tolerance))
    return replace(found, shape=driver.with_windows(found.shape)) if found.shape else found


def _find(driver: Driver) -> Verdict:
    cache = DynamicCache(config=driver.config)
    name, window = driver.config.model_type, longest_window(cache)
    found = Verdict(None, tolerance=tolerance_of(driver.model.dtype))
    if window > WINDOW_TOKENS:
        return replace(found, refusal=f"{name} has a window of {window} tokens, which can't be probed")
    # a window shows only beyond its length, and so does what an indexer leaves out
    ids = driver.probe_ids(max(window, picked_tokens(driver.config)) + _TOKENS)
    try:
        found = replace(found, has_state=has_state(kinds_of(cache)))
        found = replace(found, tolerance=_tolerance(driver, found))
        expected = driver.forward(Run(cache, None, 0), ids, "chunks")
        found = replace(found, shape=shape_of(cache))
        ways: list[Feeding] = ["chunks", "steps"] if found.has_state else ["chunks"]
        for way in ways:
            found = replace(found, feeding=way)
            if _continues(driver, found, shape_of(cache), ids, expected):
                return found
    except UnsupportedModel as error:
        return replace(found, refusal=f"{name} {error}")
    except _FAULTS as error:
        return replace(found, refusal=f"{name} can't continue from injected KV: {error}")
    return replace(found, refusal=f"{name} continues differently from injected KV than in one forward")


def _continues(driver: Driver, found: Verdict, shape: KVShape, ids: list[int], expected: Tensor) -> bool:
    """Whether the logits [V] after `ids` are as expected when the last of them are read after copies of the KV."""
    split = len(ids) - _TOKENS // 2
    continued = _continued(driver, found, shape, ids, split)
    if off(continued, expected) > found.tolerance:
        return False
    exact = tolerance_of(driver.model.dtype)
    if found.tolerance <= exact or found.has_state:
        return True
    # Where much is put down to rounding: whether transformers' own cache says the same after the same calls
    run = driver.begin(None)
    driver.forward(run, ids[:split], found.feeding)
    return off(continued, driver.forward(run, ids[split:], found.feeding)) <= exact


def _continued(driver: Driver, found: Verdict, shape: KVShape, ids: list[int], split: int) -> Tensor:
    """Logits after `ids` when those from `split` on are read in another run, after copies of what came before."""
    kv = KVCache(shape)
    first = driver.begin(kv)
    driver.forward(first, ids[:split], found.feeding)
    kv.state = snapshot_of(first.cache, first.tokens) if first.cache and found.has_state else None
    # Another conversation in between, as on a host: some models keep their state in their modules
    driver.forward(driver.begin(KVCache(shape)), ids[split:], found.feeding)
    logits = driver.feed(driver.begin(kv), ids[split:], found.feeding)
    if logits is None:
        raise UnsupportedModel("was cancelled while it was probed")
    return logits


def _tolerance(driver: Driver, found: Verdict) -> float:
    """Allows what reading a text in calls of other lengths moves, where no cache is involved.

    In float32 that is nothing. What is wrong with a recurrent state may be smaller than that.
    """
    if found.has_state or (driver.model.dtype == torch.float32 and not driver.noisy):
        return found.tolerance
    ids = driver.probe_ids(4 * _TOKENS)
    whole = driver.read(Run(None, None, 0), ids, len(ids))
    ends = (1, 2, _TOKENS, len(ids) // 2, len(ids) - 1)
    noise = max(off(driver.read(Run(None, None, 0), ids[:end], 1)[0], whole[end - 1]) for end in ends)
    return max(_TOLERANCE_16_BIT, min(2 * noise, _MOST))


def _own_feeding(driver: Driver, tolerance: float) -> Feeding:
    """How this model's own cache may be filled."""
    ids = driver.probe_ids(_TOKENS)
    expected = driver.read(Run(None, None, 0), ids, 1)[0]
    splits: list[tuple[Feeding, int]] = [("chunks", _TOKENS // 2), ("steps", _TOKENS - 1)]
    for way, at in splits:
        try:
            run = driver.begin(None)
            driver.forward(run, ids[:at], way)
            if off(driver.forward(run, ids[at:], way), expected) <= tolerance:
                return way
        except _FAULTS:
            continue
    return "whole"


def off(a: Tensor, b: Tensor) -> float:
    """Relative distance of logits."""
    return float((a - b).norm() / b.norm())
