"""What of a model's KV can be handed over, found out by doing it."""

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from qkvshare_agents.errors import UnsupportedModel
from qkvshare_agents.eval.packing import kl_divergence, seal_all
from qkvshare_agents.ids import Ids
from qkvshare_agents.kv.page import PRESETS, Precision
from qkvshare_agents.kv.shape import in_words
from qkvshare_agents.kv.state import Snapshot
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model import rope
from qkvshare_agents.model.cache_layers import kinds_of, longest_window
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.model.rope import Rotary
from qkvshare_agents.model.weights import input_device
from qkvshare_agents.store.page_store import PageStore

_SHARED_TOKENS, _OWN_TOKENS, _GAP = 100, 12, 50
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}  # relative, of logits


@torch.inference_mode()
def examine(engine: Engine, *, packed: bool = True) -> dict[str, Any]:
    """Hand KV over in every way and compare with one forward of all tokens.

    refusal: why nothing can be handed over, and then nothing else is told. layers: how many of each kind. window: of
    the widest sliding layer, or 0. reading: "blocks", or "steps" where only token by token is exact. one_token, several
    _tokens: exact behind injected KV. fork: two continuations of one stored cache are both exact. cut: a cache can be
    continued from any token, not only where a turn ended. immovable: why KV can't be moved to other positions (so that
    what does not fit is cut as text), or None. kl: mean KL in nats of the next token behind pages of every preset,
    behind KV that was spliced, and "no context".
    """
    found: dict[str, Any] = {"model": engine.name, "refusal": engine.refusal, **_layers(engine)}
    if engine.refusal or engine.shape is None:
        return found
    with engine.narrowed():
        return {**found, **_tried(engine, packed)}


def _tried(engine: Engine, packed: bool) -> dict[str, Any]:
    shared, tails = _ids(engine)
    stored = _Stored(engine, shared, PRESETS["native"])
    return {
        "reading": "steps" if engine.feeding == "steps" else "blocks",
        "one_token": _exact(engine, stored, shared, tails[0][:1]),
        "several_tokens": _exact(engine, stored, shared, tails[0]),
        "fork": all(_exact(engine, stored, shared, tail) for tail in tails),
        "cut": not engine.has_state
        and all(_exact(engine, stored, cut, tails[1]) for cut in (shared[:-17], shared[: len(shared) // 3])),
        "immovable": (turns := rope.of_stored(engine)).refusal or _moves(engine, turns, stored, shared, tails[0]),
        **({"kl": _divergences(engine, shared, tails[0], turns)} if packed else {}),
    }


def is_exact(found: dict[str, Any]) -> bool:
    """Whether a handoff equals text replay."""
    return bool(not found["refusal"] and found["one_token"] and found["several_tokens"] and found["fork"])


class _Stored:
    """A cache as a host keeps it: pages, and the state behind the last token."""

    def __init__(self, engine: Engine, ids: Ids, precision: Precision) -> None:
        assert engine.shape is not None
        kv = KVCache(engine.shape)
        kv.clear(len(ids))
        run = engine.begin(kv)
        engine.feed(run, ids)
        self.state: Snapshot | None = engine.snapshot(run)
        self.pages: PageStore = seal_all(kv, ids, replace(precision, wide_from=engine.shape.indexers_from))

    def open(self, engine: Engine, ids: Ids) -> KVCache:
        assert engine.shape is not None
        kv = KVCache(engine.shape)
        kv.clear(len(ids) + _OWN_TOKENS)
        kv.load(self.pages.match(ids).runs)
        kv.state = self.state
        return kv


def _ids(engine: Engine) -> tuple[Ids, list[Ids]]:
    """Ids to share, longer than any window, and two continuations."""
    count = _SHARED_TOKENS + longest_window(DynamicCache(config=engine.config))
    size = min(1000, engine.config.vocab_size)
    draw = torch.randint(3, size, (count + 2 * _OWN_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    return tuple(draw[:count]), [tuple(draw[count:][:_OWN_TOKENS]), tuple(draw[count:][_OWN_TOKENS:])]


def _exact(engine: Engine, stored: _Stored, shared: Ids, tail: Ids) -> bool:
    if stored.pages.match(shared).tokens != len(shared):
        return False
    got, expected = _behind(engine, stored.open(engine, shared), tail), _replayed(engine, shared + tail)[0]
    return float((got - expected).norm() / expected.norm()) <= _tolerance(engine)


def _tolerance(engine: Engine) -> float:
    return max(engine.tolerance, _TOLERANCE.get(engine.model.dtype, 5e-2))


def _behind(engine: Engine, kv: KVCache, tail: Ids) -> Tensor:
    logits = engine.feed(engine.begin(kv), tail)
    assert logits is not None
    return logits


def _replayed(engine: Engine, ids: Ids, count: int = 1) -> Tensor:
    """Logits [count, V] behind the last ids of one forward without any cache, which no fault of a cache can spoil."""
    place = input_device(engine.model)
    output = engine.model(input_ids=torch.tensor([ids], device=place), use_cache=False)
    return output.logits[0, -count:].float()


def _moves(engine: Engine, turns: Rotary, stored: "_Stored", shared: Ids, tail: Ids) -> str | None:
    """What is wrong when everything stands _GAP positions later; positions are relative, so nothing may be."""
    if not engine.driver.takes_positions:
        return None
    kv = stored.open(engine, shared)
    expected = engine.logits(kv, tail, len(tail))
    turns.move(kv.span(0, len(shared)), range(len(shared)), range(_GAP, _GAP + len(shared)))
    got = engine.logits(kv, tail, len(tail), _GAP)
    if float((got - expected).norm() / expected.norm()) <= _tolerance(engine):
        return None
    return "attention depends on absolute positions"


def _spliced(engine: Engine, turns: Rotary, shared: Ids) -> KVCache:
    """KV of `shared`, most of it computed behind another beginning of another length."""
    begin, again = len(shared) // 5, len(shared) // 10
    other = (*reversed(shared[: begin // 2]), *shared[begin:])
    first = begin + again
    kv, source = (
        _Stored(engine, shared[:first], PRESETS["native"]).open(engine, shared[:first]),
        len(other) - len(shared),
    )
    kv.load(_Stored(engine, other, PRESETS["native"]).pages.match(other).runs)
    kv.keep(first, range(first + source, len(other)))
    rope.move(turns, kv, [*range(first), *range(first + source, len(other))])
    return kv


def _divergences(engine: Engine, shared: Ids, tail: Ids, turns: Rotary) -> dict[str, float]:
    count = len(tail)

    def mean_kl(got: Tensor) -> float:
        return sum(map(kl_divergence, expected, got)) / count

    expected = _replayed(engine, shared + tail, count)
    found = {}
    for name, precision in PRESETS.items():
        kv = _Stored(engine, shared, precision).open(engine, shared)
        found[name] = mean_kl(engine.logits(kv, tail, count))
    if turns.refusal is None:
        found["spliced"] = mean_kl(engine.logits(_spliced(engine, turns, shared), tail, count))
    return {**found, "no context": mean_kl(_replayed(engine, tail, count))}


def _layers(engine: Engine) -> dict[str, Any]:
    cache = DynamicCache(config=engine.config)
    try:
        kinds = Counter(kind.value for kind in kinds_of(cache))
    except UnsupportedModel:
        kinds = Counter(type(layer).__name__ for layer in cache.layers)
    return {"layers": dict(kinds), "window": longest_window(cache)}


def show(model: str, engine: Engine, seconds: float) -> None:
    """Print what `examine` finds, and what the model's template and rotary embedding allow."""
    from rich.console import Console

    started = time.perf_counter()
    found = examine(engine)
    console, shape = Console(width=100, highlight=False), engine.shape
    kinds = ", ".join(f"{count} {kind}" for kind, count in found["layers"].items())
    lines = {
        "layers": kinds + (f", windows of {found['window']} tokens" if found["window"] else ""),
        "context": f"{engine.context_tokens} tokens"
        + (f"; KV can be handed over up to {engine.kv_limit_tokens}" if engine.kv_limit_tokens else ""),
        "template": ("system text of its own" if not engine.template.folds_system else "system text folded in")
        + (", tools" if engine.template.supports_tools else ", no tools"),
        "handoff": "exact" if is_exact(found) else f"text replay: {found['refusal'] or 'not exact'}",
    }
    if shape and not found["refusal"]:
        lines |= {
            "KV": f"{in_words(shape.groups)}, {shape.fp16_bytes(1):,} bytes a token in fp16",
            "reading": "in blocks" if found["reading"] == "blocks" else "token by token behind KV",
            "continue from": "any token" if found["cut"] else "where a turn ended or a cue began",
            "when full": f"text is cut: {found['immovable']}" if found["immovable"] else "KV is cut and moved",
            "rounding": f"logits of one text may be {engine.tolerance:.1e} off in other calls",
            "forks": "exact" if found["fork"] else "not exact",
            "KL": ", ".join(f"{name} {kl:.1e}" for name, kl in found["kl"].items() if name != "native"),
        }
    console.print(f"{model} ({engine.model.dtype}), loaded in {seconds:.1f} s", markup=False)
    for name, text in lines.items():
        console.print(f"  {name:14}{text}", markup=False)
    console.print(f"  examined in {time.perf_counter() - started:.1f} s; KL: random tokens, in nats", markup=False)
