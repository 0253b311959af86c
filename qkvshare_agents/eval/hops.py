"""How far a conversation's KV drifts from its text over many handoffs.

Pages are encoded once, so that forwarding them adds nothing; but later tokens are computed behind quantized KV, and
so on. Each row reads the same new tokens behind the same cached ones. Only in how many hops the cached ones came
about differs: the first part is read at once, then with every hop an agent opens the pages, reads `segment` tokens
behind them and hands on. One hop: all of it is read at once and handed over.

Rows that are named `reencode_each_hop` are a strawman: at every hop it encodes all that it has opened anew.
"""

import datetime
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.eval import corpus, plot
from qkvshare_agents.eval.packing import kl_divergences
from qkvshare_agents.ids import Ids
from qkvshare_agents.kv.page import PRESETS, Page, Precision, keep_native, seal
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.model.key_calibration import settle

HOPS = (1, 2, 4, 8, 16)
STRAWMAN = "reencode_each_hop"
_COLOURS = ("tab:blue", "tab:green", "tab:olive", "tab:cyan", "tab:red", "tab:orange")


@dataclass(frozen=True)
class _Scheme:
    name: str
    precision: Precision
    reencodes: bool = False
    refresh_every: int = 0


@torch.inference_mode()
def run(
    *,
    model: str = "smollm2-135m",
    engine: Engine | None = None,
    texts: int = 4,
    hops: Sequence[int] = HOPS,
    segment: int = 150,
    refresh_every: int = 0,
) -> dict[str, Any]:
    """{"header", "rows"}: of each scheme and number of hops mean_kl in nats and top1 (the share of equal likeliest
    tokens), both against text replay, over `segment` new tokens behind `segment * max(hops)` of each of `texts`.

    refresh_every: also every preset that computes its cache anew whenever so many hops lie behind it. Raises
    InvalidSetting for a model that can't hand KV over or a context that is too short.
    """
    engine = engine or Engine.load(model)
    hops, cached = sorted(set(hops)), segment * max(hops, default=0)
    if engine.refusal or engine.shape is None or engine.has_state:
        raise InvalidSetting(f"{engine.name} can't hand plain KV over: {engine.refusal or 'it has recurrent state'}")
    if min((segment, texts, *hops)) < 1 or not hops or cached + segment > engine.context_tokens:
        raise InvalidSetting(
            f"need texts, segment and hops of at least 1 and a context of {cached + segment} tokens; "
            f"the model has {engine.context_tokens}"
        )
    started, schemes = time.perf_counter(), _schemes(engine, refresh_every)
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    native, working = KVCache(engine.shape), KVCache(engine.shape)
    for sample in corpus.samples(engine.template, cached + segment, texts):
        ids, new = sample.ids[:cached], sample.ids[cached:]
        native.clear(cached + segment)
        engine.feed(engine.begin(native), ids)
        reference = engine.logits(native, new, segment)
        for scheme in schemes:
            for count in hops:
                _hand_on(engine, scheme, ids, count, segment, native, working)
                logits = engine.logits(working, new, segment)
                kl = float(kl_divergences(reference, logits).mean())
                agrees = float((logits.argmax(-1) == reference.argmax(-1)).float().mean())
                found.setdefault((scheme.name, count), []).append((kl, agrees))
    rows = [
        {
            "scheme": name,
            "hops": count,
            "mean_kl": sum(kl for kl, _ in each) / texts,
            "top1": sum(agrees for _, agrees in each) / texts,
        }
        for (name, count), each in found.items()
    ]
    header = {
        "model": engine.name, "dtype": str(engine.model.dtype).removeprefix("torch."), "texts": texts,
        "cached_tokens": cached, "new_tokens": segment, "positions": texts * segment, "torch": torch.__version__,
        "threads": torch.get_num_threads(), "machine": platform.processor() or platform.machine(),
        "date": datetime.date.today().isoformat(), "seconds": round(time.perf_counter() - started),
    }  # fmt: skip
    return {"header": header, "rows": rows}


def _schemes(engine: Engine, refresh_every: int) -> list[_Scheme]:
    settled = {name: settle(precision, engine) for name, precision in PRESETS.items() if name != "native"}
    plain = [_Scheme(name, precision) for name, precision in settled.items()]
    refreshed = [
        _Scheme(f"{name}, refresh_every={refresh_every}", precision, refresh_every=refresh_every)
        for name, precision in settled.items()
    ]
    strawmen = [
        _Scheme(STRAWMAN, settled["compact"], reencodes=True),
        _Scheme(f"{STRAWMAN}, safe", settled["safe"], reencodes=True),
    ]
    return [*plain, *(refreshed if refresh_every else ()), *strawmen]


def _hand_on(
    engine: Engine, scheme: _Scheme, ids: Ids, hops: int, segment: int, native: KVCache, working: KVCache
) -> None:
    """Fill `working` with the KV of `ids` as it is after so many hops; `native` has what reading the text gives."""
    at, age, pages, room = len(ids) - (hops - 1) * segment, 0, list[Page](), len(ids) + segment
    working.clear(room)
    working.load([(keep_native(native.span(0, at)), at)])
    for hop in range(hops):
        if hop:
            engine.feed(engine.begin(working), ids[at : at + segment])
            at += segment
        if scheme.refresh_every and age == scheme.refresh_every:
            working.clear(room)
            working.load([(keep_native(native.span(0, at)), at)])
            pages, age = [], 0
        kept = [] if scheme.reencodes else pages
        pages = [*kept, *_sealed(working, sum(page.tokens for page in kept), at, scheme.precision)]
        age += 1
        done = sum(page.tokens for page in pages)
        tail = [keep_native(working.span(done, at))] if done < at else []
        working.clear(room)
        working.load((page, page.tokens) for page in [*pages, *tail])


def _sealed(kv: KVCache, start: int, stop: int, precision: Precision) -> list[Page]:
    """Full pages of the tokens from `start` on; what does not fill one stays native."""
    size = precision.page_size
    return [
        seal(kv.span(first, first + size), precision, starts_sequence=first == 0)
        for first in range(start, stop - size + 1, size)
    ]


def show(result: dict[str, Any]) -> None:
    """Print a result of `run`: KL in nats and top-1 in percent for each number of hops."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    h, rows = result["header"], result["rows"]
    counts = sorted({row["hops"] for row in rows})
    table = Table(title=f"{h['model']}: {h['positions']} positions behind {h['cached_tokens']} tokens", box=SIMPLE_HEAD)
    for name in ("scheme", *(f"{count} hop{'s' * (count > 1)}" for count in counts), "last / first"):
        table.add_column(name, justify="left" if name == "scheme" else "right")
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        own = [row for row in rows if row["scheme"] == scheme]
        cells = [f"{row['mean_kl']:.2e}\n{100 * row['top1']:.1f}" for row in own]
        table.add_row(scheme, *cells, f"{own[-1]['mean_kl'] / own[0]['mean_kl']:.2f}")
    Console(width=100).print(table)


def picture(result: dict[str, Any]) -> Any:
    """A matplotlib figure: mean KL over hops, both logarithmic."""
    plot.require()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes, rows = figure.subplots(), result["rows"]
    for index, scheme in enumerate(dict.fromkeys(row["scheme"] for row in rows)):
        own = [row for row in rows if row["scheme"] == scheme]
        style = "--" if scheme.startswith(STRAWMAN) else "-"
        colour = _COLOURS[index % len(_COLOURS)]
        axes.plot([r["hops"] for r in own], [r["mean_kl"] for r in own], style, marker="o", c=colour, label=scheme)
    counts = sorted({row["hops"] for row in rows})
    axes.set(xscale="log", yscale="log", xlabel="hops", ylabel="mean KL of the next token (nats)")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    h = result["header"]
    axes.set_title(f"{h['model']}, {h['cached_tokens']} tokens, {h['positions']} positions, {h['date']}")
    axes.legend()
    return figure
