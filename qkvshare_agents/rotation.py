"""Whether keys of a model are better rotated before they are quantized.

A Hadamard rotation of the head dimension spreads channels with outliers over all others. It halves the error on
some models and multiplies it on others, and neither the outliers nor the error of the keys tell which: what counts
is what attention makes of it. So a short text is continued behind keys that were sealed in both ways.
"""

from dataclasses import replace

from qkvshare_agents import verdicts
from qkvshare_agents.engine import Engine
from qkvshare_agents.kv_cache import KVCache
from qkvshare_agents.page import Precision, seal

_TOKENS, _POSITIONS = 384, 128
_BITS = 2  # at 3 and 4 bits a few tokens decide: of eight texts one said otherwise, at 2 bits none


def settle(precision: Precision, engine: Engine) -> Precision:
    """`precision` with what it leaves open (`rotate_keys` None) decided for this model, and its indexers in view."""
    if engine.shape and engine.shape.indexed:
        precision = replace(precision, wide_from=engine.shape.indexers_from)
    if precision.is_native or precision.rotate_keys is not None:
        return precision
    return replace(precision, rotate_keys=rotation_helps(engine))


def rotation_helps(engine: Engine) -> bool:
    """The verdict on this model: measured once (seconds), then kept in the cache directory by its fingerprint.

    Without keys that can be handed over there is nothing to measure; the answer is then True.
    """
    if engine.shape is None or engine.refusal or not engine.shape.layers:
        return True
    name = engine.fingerprint.digest.hex()
    if isinstance(known := verdicts.recall("rotation", name).get("rotate_keys"), bool):
        return known
    rotated, plain = (divergence(engine, rotate_keys=rotate) for rotate in (True, False))
    found = {"rotate_keys": rotated <= plain, "kl_rotated": rotated, "kl_plain": plain, "model": engine.name}
    verdicts.keep("rotation", name, found)
    return rotated <= plain


def divergence(engine: Engine, *, rotate_keys: bool) -> float:
    """Mean KL to native KV in nats of the next token, behind keys of a short text sealed at 2 bits (values at 8)."""
    assert engine.shape is not None
    limit = min(engine.context_tokens, engine.kv_limit_tokens or engine.context_tokens)
    ids = engine.template.head("", (), _text())[: min(limit, _TOKENS + _POSITIONS)]
    cached, rest = ids[: len(ids) - _POSITIONS], ids[len(ids) - _POSITIONS :]
    kv = KVCache(engine.shape)
    kv.clear(len(ids))
    run = engine.begin(kv)
    engine.feed(run, cached)
    kv.state = engine.snapshot(run)
    expected = engine.logits(kv, rest, len(rest)).double().log_softmax(-1)
    precision = Precision(_BITS, 8, rotate_keys=rotate_keys)
    for start in range(0, len(cached), precision.page_size):
        span = kv.span(start, min(start + precision.page_size, len(cached)))
        seal(span, precision, starts_sequence=start == 0).open_into(span)
    got = engine.logits(kv, rest, len(rest)).double().log_softmax(-1)
    return float((expected.exp() * (expected - got)).sum(-1).mean())


def _text() -> str:
    """A few pages about Python that every interpreter carries: prose with code in it."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in ("assignment", "class", "for", "with"))
