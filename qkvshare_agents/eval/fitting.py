"""What is lost when a context is full: ways to drop half of it, each compared with keeping everything."""

import datetime
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

from qkvshare_agents.context.attention_mass import AttentionMeter
from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.eval import corpus
from qkvshare_agents.eval.packing import kl_divergences, seal_all
from qkvshare_agents.ids import Ids
from qkvshare_agents.kv.page import preset
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model import rope
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.model.rope import Rotary
from qkvshare_agents.spans import Spans, count, cut, joined, without

_SINKS = 4


@dataclass
class Scores:
    """Of one method: per position KL in nats and equal argmax, per text mean KL, milliseconds and tokens read."""

    kl: list[float] = field(default_factory=list)
    texts: list[float] = field(default_factory=list)
    agrees: list[float] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    read: list[int] = field(default_factory=list)

    def add(self, expected: Tensor, got: Tensor, read: int, ms: float) -> None:
        """Logits [N, V] of one text."""
        divergences = kl_divergences(expected, got).tolist()
        self.kl += divergences
        self.texts.append(statistics.fmean(divergences))
        self.agrees += (expected.argmax(-1) == got.argmax(-1)).tolist()
        self.ms.append(ms)
        self.read.append(read)


@dataclass(frozen=True)
class _Text:
    """One sample, `full`: the KV of its first ids; rest: what follows; header: of its opening; mass: attention."""

    ids: Ids
    rest: Ids
    header: int
    full: KVCache
    mass: Tensor


@torch.inference_mode()
def run(
    *,
    model: str = "smollm2-135m",
    tokens: int = 2048,
    keep: int = 1024,
    samples: int = 6,
    positions: int = 128,
    engine: Engine | None = None,
) -> dict[str, Any]:
    """Of each sample (prose, code, chat) `tokens` tokens are cached, `keep` of them stay: {"header", "rows"}.

    Rows: `method`; over `positions` forced tokens behind each text, mean_kl in nats and top1 against the whole cache,
    text_kl of each text and their median; positions in all; read_tokens that have to be read anew and ms to have the
    cache (medians). Raises InvalidSetting for a model whose KV can't be moved or sizes that make no sense.
    """
    engine = engine or Engine.load(model)
    turns = rope.measure(engine)
    if turns.refusal:
        raise InvalidSetting(f"{engine.name}: {turns.refusal}")
    if not 64 <= keep < tokens or min(samples, positions) < 1 or tokens + positions > engine.context_tokens:
        raise InvalidSetting(f"need 64 <= keep < tokens, and tokens + positions <= {engine.context_tokens}")
    seen: dict[str, Scores] = {}
    meter = AttentionMeter(engine.model)
    for sample in corpus.samples(engine.template, tokens + positions, samples):
        ids, rest = sample.ids[:tokens], sample.ids[tokens:]
        assert engine.shape is not None
        full = KVCache(engine.shape)
        full.clear(len(sample.ids))
        with meter.watching():
            engine.feed(engine.begin(full), ids)
        text = _Text(ids, rest, sample.opening_tokens, full, meter.mass[0] / meter.mass[1])
        expected = engine.logits(full, rest, len(rest))
        for name, method in _methods(engine, turns, keep).items():
            started = time.perf_counter()
            kv, read, gap = method(text)
            ms = (time.perf_counter() - started) * 1000
            seen.setdefault(name, Scores()).add(expected, engine.logits(kv, rest, len(rest), gap), read, ms)
    return {"header": header(engine, tokens=tokens, keep=keep, samples=samples), "rows": rows(seen)}


def rows(seen: Mapping[str, Scores]) -> list[dict[str, Any]]:
    return [
        {
            "method": name,
            "mean_kl": statistics.fmean(found.kl),
            "median_text_kl": statistics.median(found.texts),
            "text_kl": found.texts,
            "top1": statistics.fmean(found.agrees),
            "positions": len(found.kl),
            "read_tokens": round(statistics.median(found.read)),
            "ms": statistics.median(found.ms),
        }
        for name, found in seen.items()
    ]


# What is kept, how many tokens were read for it, and by how many positions it stands too early
Method = Callable[[_Text], tuple[KVCache, int, int]]


def _methods(engine: Engine, turns: Rotary, keep: int) -> dict[str, Method]:
    def head(first: Callable[[_Text], int]) -> Callable[[_Text], Spans]:
        return lambda text: ((first(text), first(text) + len(text.ids) - keep),)

    def least(text: _Text) -> Spans:
        return _least_attended(text, keep)

    opening, sinks, nothing = head(lambda text: text.header), head(lambda _: _SINKS), head(lambda _: 0)
    return {
        "drop_head": lambda text: (_cut(engine, turns, text, opening(text)), 0, 0),
        "drop_head, 4 sinks": lambda text: (_cut(engine, turns, text, sinks(text)), 0, 0),
        "drop_head, 4 sinks, positions kept": lambda text: (
            _cut(engine, None, text, sinks(text)), 0, count(sinks(text))
        ),
        "drop_head, 4 sinks, not turned": lambda text: (_cut(engine, None, text, sinks(text)), 0, 0),
        "drop_head, no sinks": lambda text: (_cut(engine, turns, text, nothing(text)), 0, 0),
        "drop_least_attended": lambda text: (_cut(engine, turns, text, least(text)), 0, 0),
        "drop_head, 8 bits": lambda text: (_cut(engine, turns, text, opening(text), "safe"), 0, 0),
        "drop_head, 4 bits": lambda text: (_cut(engine, turns, text, opening(text), "compact"), 0, 0),
        "cut_text": lambda text: (_read(engine, cut(text.ids, opening(text))), keep, 0),
        "cut_text, no header": lambda text: (_read(engine, cut(text.ids, nothing(text))), keep, 0),
        "header only": lambda text: (_read(engine, text.ids[: text.header]), text.header, 0),
    }  # fmt: skip


def _least_attended(text: _Text, keep: int) -> Spans:
    """The tokens that received least attention; the opening and the newest half stay (H2O, arXiv 2306.14048)."""
    mass, total = text.mass.tolist(), len(text.ids)
    order = sorted(range(max(text.header, _SINKS), total - keep // 2), key=lambda i: mass[i])
    return joined((i, i + 1) for i in order[: total - keep])


def _cut(engine: Engine, turns: Rotary | None, text: _Text, dropped: Spans, precision: str = "native") -> KVCache:
    """The whole cache as pages, without what is dropped, moved by `turns`."""
    kv, kept = KVCache(text.full.shape), [i for a, b in without(((0, len(text.ids)),), dropped) for i in range(a, b)]
    kv.clear(len(text.ids))
    kv.load(seal_all(text.full, text.ids, preset(precision)).match(text.ids).runs)
    kv.keep(0, kept)
    if turns:
        rope.move(turns, kv, kept)
    return kv


def _read(engine: Engine, ids: Ids) -> KVCache:
    assert engine.shape is not None
    kv = KVCache(engine.shape)
    kv.clear(len(ids))
    engine.feed(engine.begin(kv), ids)
    return kv


def header(engine: Engine, **numbers: int) -> dict[str, Any]:
    return {
        "model": engine.name,
        **numbers,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__
        },
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def show(result: dict[str, Any], title: str, columns: Sequence[str]) -> None:
    """Print rows as a table; the first column is a name."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name.replace("_", "\n"), justify="right" if index else "left")
    for row in result["rows"]:
        cells = (row[name] for name in columns)
        table.add_row(*(c if isinstance(c, str) else f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells))
    Console(width=100).print(table)
