"""Whether keys of a model are better rotated before they are quantized, and how they are balanced before that.

A Hadamard rotation of the head dimension spreads channels with outliers over all others. Where channels are balanced
against what queries make of them (`balance`) it helped both real models that were tried, else one of them; and neither
the outliers nor the error of the keys tell: what counts is what attention makes of it. So a short text is read once, to
see how large queries and keys are, and continued behind keys that were sealed in both ways.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from qkvshare_agents.ids import Ids
from qkvshare_agents.kv import balance
from qkvshare_agents.kv.balance import Balance
from qkvshare_agents.kv.page import Precision, seal
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model import verdicts
from qkvshare_agents.model.attention_hook import KNOWN, configs_of, looking, original
from qkvshare_agents.model.engine import Engine

_TOKENS, _POSITIONS = 384, 128
_BITS = 2  # at 3 and 4 bits a few tokens decide: of eight texts one said otherwise, at 2 bits none
_PAGE = 64
_LOOK = "qkvshare_sizes"


def settle(precision: Precision, engine: Engine) -> Precision:
    """`precision` with what it leaves open (`rotate_keys` None) decided for this model, keys balanced, and its indexers
    in view."""
    if engine.shape and engine.shape.indexed:
        precision = replace(precision, wide_from=engine.shape.indexers_from)
    if precision.is_native or precision.rotate_keys is not None:
        return precision
    rotate, found = probed(engine)
    return replace(precision, rotate_keys=rotate, balance=found if rotate else None)


def probed(engine: Engine) -> tuple[bool, Balance | None]:
    """Whether to rotate this model's keys, and how to balance them then (None: attention can't be looked at).

    Measured once (seconds), then kept in the cache directory by the model's fingerprint. Without keys that can be
    handed over there is nothing to measure; the answer is then to rotate.
    """
    if engine.shape is None or engine.refusal or not engine.shape.layers:
        return True, None
    name = engine.fingerprint.digest.hex()
    known = verdicts.recall("keys", name)
    if isinstance(known.get("rotate_keys"), bool) and "balance" in known:
        try:
            return known["rotate_keys"], _from_text(known["balance"], engine)
        except (TypeError, ValueError):
            pass
    found = balance_of(engine)
    rotated, plain = (divergence(engine, rotate_keys=rotate, balance=found) for rotate in (True, False))
    steps = None if found is None else b"".join(found.steps).hex()
    verdict = {"rotate_keys": rotated <= plain, "balance": steps, "kl_rotated": rotated, "kl_plain": plain}
    verdicts.keep("keys", name, verdict | {"model": engine.name})
    return rotated <= plain, found


def divergence(engine: Engine, *, rotate_keys: bool, balance: Balance | None = None) -> float:
    """Mean KL to native KV in nats of the next token, behind keys of a short text sealed at 2 bits (values at 8)."""
    assert engine.shape is not None
    ids = _text_ids(engine)
    cached, rest = ids[: len(ids) - _POSITIONS], ids[len(ids) - _POSITIONS :]
    kv = KVCache(engine.shape)
    kv.clear(len(ids))
    run = engine.begin(kv)
    engine.feed(run, cached)
    kv.state = engine.snapshot(run)
    expected = engine.logits(kv, rest, len(rest)).double().log_softmax(-1)
    precision = Precision(_BITS, 8, page_size=_PAGE, rotate_keys=rotate_keys, balance=balance)
    for start in range(0, len(cached), precision.page_size):
        span = kv.span(start, min(start + precision.page_size, len(cached)))
        seal(span, precision, starts_sequence=start == 0).open_into(span)
    got = engine.logits(kv, rest, len(rest)).double().log_softmax(-1)
    return float((expected.exp() * (expected - got)).sum(-1).mean())


def balance_of(engine: Engine) -> Balance | None:
    """What balances this model's keys, by the queries and keys of a short text.

    None where attention can't be looked at, or multiplies queries by other keys than those that are stored.
    """
    assert engine.shape is not None
    ids = _text_ids(engine)[:_TOKENS]
    kv = KVCache(engine.shape)
    kv.clear(len(ids))
    with _sizes(engine) as sizes:
        engine.feed(engine.begin(kv), ids)
    found = [sizes[layer] for layer in sorted(sizes)]
    if [keys.shape for _, keys in found] != [g[1] for g in _key_shapes(engine)]:
        return None
    if not all(bool(size.isfinite().all()) for pair in found for size in pair):
        return None
    return balance.of_sizes(*zip(*found, strict=True))


@contextmanager
def _sizes(engine: Engine) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """By layer, after the forward inside: root mean squares [H, Dk] of queries, and of keys around a page's mean."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    implementation = str(engine.model.config._attn_implementation)

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        heads, size = key.shape[1], min(_PAGE, key.shape[2])
        pages = list(key[0].float().split(size, 1))[1:] or [key[0].float()]  # the first tokens are none like others
        keys = torch.stack([page.var(1, correction=0) for page in pages]).mean(0).sqrt()
        queries = query[0].float().square().unflatten(0, (heads, -1)).mean((1, 2)).sqrt()
        if query.shape[2] > 1:
            found[int(getattr(module, "layer_idx", len(found)))] = queries, keys
        return original(module, implementation)(module, query, key, value, mask, **options)

    if implementation not in KNOWN:
        yield found
        return
    with looking(configs_of(engine.model), implementation, _LOOK, attend):
        yield found


def _key_shapes(engine: Engine) -> list[tuple[int, tuple[int, int]]]:
    """(layer, [H, Dk]) of all layers with KV, in order."""
    assert engine.shape is not None
    return sorted((layer, (g.heads, g.key_dim)) for g in engine.shape.groups for layer in g.layers)


def _from_text(steps: str | None, engine: Engine) -> Balance | None:
    """Raises TypeError or ValueError for what is no balance of this model."""
    if steps is None:
        return None
    return balance.balance_of(bytes.fromhex(steps), [heads * dim for _, (heads, dim) in _key_shapes(engine)])


def _text_ids(engine: Engine) -> Ids:
    limit = min(engine.context_tokens, engine.kv_limit_tokens or engine.context_tokens)
    return engine.template.head("", (), _text())[: min(limit, _TOKENS + _POSITIONS)]


def _text() -> str:
    """A few pages about Python that every interpreter carries: prose with code in it."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in ("assignment", "class", "for", "with"))
