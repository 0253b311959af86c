"""What is lost when a text that was read behind one system text is placed behind another."""

import time
from typing import Any

import torch

from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.eval import corpus
from qkvshare_agents.eval.fitting import Scores, header, rows
from qkvshare_agents.ids import Ids
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model import rope
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.model.rope import Rotary

_THEIRS = (
    "You are the reader of a team. You are given a text, and read all of it with care, for whoever comes after you "
    "will ask for details. Don't judge it, and leave nothing out; where it is code, say what each function is for."
)
_OURS = "You check what others found. Be strict, answer in short sentences, and quote the line that you speak of."


@torch.inference_mode()
def run(
    *,
    model: str = "smollm2-135m",
    tokens: int = 512,
    samples: int = 6,
    positions: int = 128,
    engine: Engine | None = None,
) -> dict[str, Any]:
    """A text of `tokens` tokens (prose, code, chat) that one agent has read, behind another agent's system text.

    Rows as in `fitting.run`, against reading all of it behind the second system text: spliced with 0, 16 and 64 tokens
    computed anew; not turned; computed behind nothing; and without the text. Raises InvalidSetting as that does.
    """
    engine = engine or Engine.load(model)
    turns = rope.measure(engine)
    if turns.refusal:
        raise InvalidSetting(f"{engine.name}: {turns.refusal}")
    template = engine.template
    theirs, ours = (template.head(text) if not template.folds_system else template.head("", (), text)
                    for text in (_THEIRS, _OURS))  # fmt: skip
    if min(tokens - 64, samples, positions) < 1 or tokens + positions + len(theirs) > engine.context_tokens:
        raise InvalidSetting(f"need tokens > 64, and with {positions} positions at most {engine.context_tokens}")
    seen: dict[str, Scores] = {}
    for sample in corpus.samples(template, tokens + positions + 64, samples):
        text = sample.ids[sample.opening_tokens :]
        segment, rest = text[:tokens], text[tokens : tokens + positions]
        exact = _read(engine, ours + segment)
        expected = engine.logits(exact, rest, len(rest))
        source, alone = _read(engine, theirs + segment), _read(engine, segment)

        def score(name: str, kv: KVCache, read: int, started: float, rest: Ids = rest, expected=expected) -> None:  # type: ignore[no-untyped-def]
            ms = (time.perf_counter() - started) * 1000
            seen.setdefault(name, Scores()).add(expected, engine.logits(kv, rest, len(rest)), read, ms)

        for again in (0, 16, 64):
            started = time.perf_counter()
            kv = _spliced(engine, turns, source, len(theirs), ours, segment, again)
            score(f"spliced, {again} computed anew", kv, len(ours) + again, started)
        started = time.perf_counter()
        score("spliced, not turned", _spliced(engine, None, source, len(theirs), ours, segment, 0), len(ours), started)
        for again in (0, 16):
            started = time.perf_counter()
            kv = _spliced(engine, turns, alone, 0, ours, segment, again)
            score(f"computed behind nothing, {again} anew", kv, len(ours) + again, started)
        started = time.perf_counter()
        score("read anew", _read(engine, ours + segment), len(ours) + tokens, started)
        started = time.perf_counter()
        score("without the text", _read(engine, ours), len(ours), started)
    sizes = {"tokens": tokens, "samples": samples, "theirs": len(theirs), "ours": len(ours)}
    return {"header": header(engine, **sizes), "rows": rows(seen)}


def _read(engine: Engine, ids: Ids) -> KVCache:
    assert engine.shape is not None
    kv = KVCache(engine.shape)
    kv.clear(len(ids))
    engine.feed(engine.begin(kv), ids)
    return kv


def _spliced(
    engine: Engine, turns: Rotary | None, source: KVCache, before: int, ours: Ids, segment: Ids, again: int
) -> KVCache:
    """`segment`, which `source` has behind `before` tokens, behind `ours`, its first `again` ids read there."""
    kv = _read(engine, ours + segment[:again])
    first = kv.tokens
    for layer in range(kv.shape.layers):
        keys, values = source.layer(layer)
        kv.append(
            layer, keys[:, before + again : before + len(segment)], values[:, before + again : before + len(segment)]
        )
    if turns:
        rope.move(turns, kv, [*range(first), *range(before + again, before + len(segment))])
    return kv
