"""Whether canaries tell right KV from wrong: many conversations, each with right and with wrong caches behind it.

Right caches are opened by a receiver that computes in another way than the sender did: on one thread, or with another
implementation of attention. Wrong ones are well-formed, so that digests and addresses would find nothing.
"""

import copy
import datetime
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.eval import corpus
from qkvshare_agents.ids import Ids
from qkvshare_agents.kv.page import PRESETS, Page, Precision, keep_native, seal
from qkvshare_agents.kv.part import Part
from qkvshare_agents.kv.shape import WATCHED
from qkvshare_agents.kv.span import Block, Span
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model.canary import COARSE, Canary, canary_of, default_limit, divergence
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.model.key_calibration import settle
from qkvshare_agents.prompt.layout import SHARED_SYSTEM

_TRIED = ("safe", "compact")
# How many tokens before the end of the answer KV is handed over; each right one comes to two receivers
_RIGHT_ENDS, _WRONG_ENDS = (0, 2, 4, 6, 8, 10, 12, 14), (0, 8)
FAINT = ("a bit in 0.1 % of bytes", "one layer of one page")  # damage that may move nothing: not counted as wrong


@dataclass(frozen=True)
class _Case:
    """A conversation: its ids, their native KV, and what the model expected behind the last of them."""

    ids: Ids
    kv: Span
    canary: Canary


class _Lab:
    """Engine, models that are not it, and a working cache."""

    def __init__(self, engine: Engine, seed: int) -> None:
        if engine.refusal or engine.shape is None or engine.has_state:
            raise InvalidSetting(
                f"{engine.name} can't hand plain KV over: {engine.refusal or 'it has recurrent state'}"
            )
        self.engine, self.random = engine, random.Random(seed)
        self.kv = KVCache(engine.shape)
        torch.manual_seed(seed)
        self.models = {"tuned": _changed(engine, _tuned), "pruned": _changed(engine, _pruned)}
        self.times_ms: list[float] = []

    def read(self, ids: Ids, engine: Engine | None = None) -> Span:
        self.kv.clear(len(ids))
        (engine or self.engine).feed((engine or self.engine).begin(self.kv), ids)
        return self._copy(len(ids))

    def converse(self, text: str, task: str, tokens: int) -> _Case:
        """Greedy, at least WATCHED tokens long."""
        engine, template = self.engine, self.engine.template
        system, first = ("", f"{SHARED_SYSTEM}\n\n{text}") if template.folds_system else (SHARED_SYSTEM, text)
        ids = [*template.head(system, (), f"{first}\n\n{task}"), *template.turn]
        self.kv.clear(len(ids) + tokens)
        run = engine.begin(self.kv)
        logits = engine.feed(run, ids)
        for step in range(tokens):
            assert logits is not None
            token = int(logits.argmax())
            if token in engine.stop_ids and step >= WATCHED:
                break
            ids.append(token)
            logits = engine.feed(run, [token])
        return _Case(tuple(ids), self._copy(len(ids)), canary_of(torch.stack(tuple(run.expected))))

    def expected(self, pages: list[Page], ids: Ids) -> Tensor:
        """As a host does it (`Runner.expected`)."""
        started = time.perf_counter()
        self.kv.clear(len(ids))
        self.kv.load((page, page.tokens) for page in pages)
        self.kv.crop(len(ids) - WATCHED)
        logits = self.engine.logits(self.kv, ids[-WATCHED:], WATCHED)
        self.times_ms.append((time.perf_counter() - started) * 1000)
        return logits

    def _copy(self, tokens: int) -> Span:
        return _edited(self.kv.span(0, tokens), Tensor.clone)


@torch.inference_mode()
def run(
    *, model: str = "smollm2-135m", engine: Engine | None = None, conversations: int = 13, answer_tokens: int = 32
) -> dict[str, Any]:
    """{"header", "rows"}: per preset and kind of cache, how many were tried, how many raised the alarm, and the least
    and most nats they were off. Of each conversation and preset 16 right ones and 16 wrong ones of eight kinds.
    Besides, `coarse` compares right ones with native KV, as the sender does, and the kinds in FAINT are damage that may
    be too small to matter. Raises InvalidSetting for a model that can't hand KV over.
    """
    engine = engine or Engine.load(model)
    started, lab = time.perf_counter(), _Lab(engine, seed=0)
    limit = default_limit(engine.model.dtype)
    found: dict[tuple[str, str], list[float]] = {}
    before: _Case | None = None
    for text, task in corpus.tasks(conversations + 1):
        case = lab.converse(text, task, answer_tokens)
        wrong = _wrong(lab, case, before) if before else {}
        for name in _TRIED if before else ():
            precision = settle(PRESETS[name], engine)
            logits = lab.expected(_pages(case.kv, precision), case.ids)
            found.setdefault((name, "coarse"), []).append(divergence(case.canary.last(WATCHED), logits))
            found.setdefault((name, "right"), []).extend(_right(lab, case, precision))
            for end in _WRONG_ENDS:
                ids = case.ids[: len(case.ids) - end]
                pages = _pages(case.kv, precision, len(ids))
                canary = canary_of(lab.expected(pages, ids))
                caches = {kind: _pages(kv, precision, len(ids)) for kind, kv in wrong.items()} | _damaged(lab, pages)
                for kind, cache in caches.items():
                    found.setdefault((name, kind), []).append(divergence(canary, lab.expected(cache, ids)))
        before = case
    rows = [
        {
            "preset": name,
            "kind": kind,
            "count": len(nats),
            "alarms": sum(not n <= (COARSE if kind == "coarse" else limit) for n in nats),
            "least_nats": min(nats),
            "most_nats": max(nats),
        }
        for (name, kind), nats in found.items()
    ]
    header = {
        "model": engine.name, "dtype": str(engine.model.dtype).removeprefix("torch."), "limit": limit,
        "coarse_limit": COARSE, "watched": WATCHED, "conversations": conversations,
        "tokens": len(before.ids) if before else 0, "canary_ms": statistics.median(lab.times_ms),
        "torch": torch.__version__, "threads": torch.get_num_threads(), "date": datetime.date.today().isoformat(),
        "seconds": round(time.perf_counter() - started),
    }  # fmt: skip
    return {"header": header, "rows": rows}


def _right(lab: _Lab, case: _Case, precision: Precision) -> Iterator[float]:
    """Nats by which the receiver is off, at several ends of the conversation, computed in two other ways."""
    for end in _RIGHT_ENDS:
        ids = case.ids[: len(case.ids) - end]
        pages = _pages(case.kv, precision, len(ids))
        canary = canary_of(lab.expected(pages, ids))
        for other_way in (_one_thread, _eager):
            with other_way(lab.engine):
                yield divergence(canary, lab.expected(pages, ids))


def _wrong(lab: _Lab, case: _Case, other: _Case) -> dict[str, Span]:
    """The wrong native KV for `case` in six ways."""
    at = lab.random.random()
    later = lab.read((case.ids[0], *case.ids))
    shared = min(len(other.ids), len(case.ids))
    foreign = [
        Block(a.layers, torch.cat([b.keys[:, :, :shared], a.keys[:, :, shared:]], 2),
              torch.cat([b.values[:, :, :shared], a.values[:, :, shared:]], 2))
        for a, b in zip(case.kv.blocks, other.kv.blocks, strict=True)
    ]  # fmt: skip
    return {
        "positions one later": later.cut(1, later.tokens),
        "tokens one later": _edited(case.kv, lambda tensor: tensor.roll(-1, 2)),
        "layers swapped": _edited(case.kv, lambda tensor: tensor[_swapped(len(tensor), at)]),
        "another conversation": Span(case.kv.tokens, tuple(foreign)),
        "tuned model (2 % noise)": lab.read(case.ids, lab.models["tuned"]),
        "pruned model (10 %)": lab.read(case.ids, lab.models["pruned"]),
    }


def _swapped(layers: int, at: float) -> list[int]:
    """The order of `layers` with two neighbours swapped, `at` of the way up."""
    first = int(at * (layers - 1))
    return [*range(first), *range(first, min(first + 2, layers))[::-1], *range(first + 2, layers)]


def _edited(span: Span, edit: Callable[[Tensor], Tensor]) -> Span:
    return Span(span.tokens, tuple(Block(b.layers, edit(b.keys), edit(b.values)) for b in span.blocks))


def _damaged(lab: _Lab, pages: list[Page]) -> dict[str, list[Page]]:
    """`pages` with wrong codes: two ways that count, and those in FAINT."""
    return {
        "a bit in 1 % of bytes": [_flipped(page, 1e-2) for page in pages],
        "one page of noise": _noise(lab, pages, one_layer=False),
        FAINT[0]: [_flipped(page, 1e-3) for page in pages],
        FAINT[1]: _noise(lab, pages, one_layer=True),
    }


def _pages(kv: Span, precision: Precision, tokens: int | None = None) -> list[Page]:
    """The first `tokens` tokens (all) as a host stores them."""
    size, tokens = precision.page_size, kv.tokens if tokens is None else tokens
    spans = [kv.cut(start, min(start + size, tokens)) for start in range(0, tokens, size)]
    return [
        seal(span, precision, starts_sequence=index == 0) if span.tokens == size else keep_native(span)
        for index, span in enumerate(spans)
    ]


def _flipped(page: Page, share: float) -> Page:
    """One bit flipped in so many of the bytes that hold codes."""

    def edit(codes: Tensor) -> Tensor:
        hit = torch.rand(codes.shape) < share
        return codes ^ ((1 << torch.randint(0, 8, codes.shape)).to(torch.uint8) * hit).to(codes.device)

    return replace(page, keys=_all(page.keys, edit), values=_all(page.values, edit))


def _noise(lab: _Lab, pages: list[Page], *, one_layer: bool) -> list[Page]:
    """The codes of the values of one page are noise, in all layers or in one."""

    def edit(codes: Tensor) -> Tensor:
        codes, layer = codes.clone(), lab.random.randrange(len(codes))
        (codes[layer] if one_layer else codes).random_(0, 256)
        return codes

    index = lab.random.choice([i for i, page in enumerate(pages) if any(part.packed for part in page.values)])
    changed = replace(pages[index], values=_all(pages[index].values, edit))
    return [*pages[:index], changed, *pages[index + 1 :]]


def _all(parts: tuple[Part, ...], edit: Callable[[Tensor], Tensor]) -> tuple[Part, ...]:
    """Parts with other codes."""
    return tuple(replace(p, packed=replace(p.packed, codes=edit(p.packed.codes))) if p.packed else p for p in parts)


def _changed(engine: Engine, change: Callable[[Tensor], None]) -> Engine:
    """The model with every matrix changed."""
    model = copy.deepcopy(engine.model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                change(parameter)
    return Engine.of(model, engine.tokenizer, name=f"{engine.name}, changed")


def _tuned(weights: Tensor) -> None:
    weights.add_(torch.randn_like(weights) * weights.std() * 0.02)


def _pruned(weights: Tensor) -> None:
    weights[weights.abs() < weights.abs().flatten().kthvalue(max(1, weights.numel() // 10)).values] = 0


@contextmanager
def _one_thread(_: Engine) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _eager(engine: Engine) -> Iterator[None]:
    usual = engine.model.config._attn_implementation
    engine.model.set_attn_implementation("eager")
    try:
        yield
    finally:
        engine.model.set_attn_implementation(usual)


def show(result: dict[str, Any]) -> None:
    """Print a result of `run`."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    h = result["header"]
    title = f"{h['model']} ({h['dtype']}): alarm above {h['limit']:g} nats, coarse above {h['coarse_limit']:g}"
    table = Table(title=title, box=SIMPLE_HEAD)
    for name in ("preset", "cache", "tried", "alarms", "least nats", "most nats"):
        table.add_column(name, justify="left" if name in ("preset", "cache") else "right")
    for row in result["rows"]:
        least, most = (f"{row[name]:.1e}" for name in ("least_nats", "most_nats"))
        table.add_row(row["preset"], row["kind"], str(row["count"]), str(row["alarms"]), least, most)
    console = Console(width=100)
    console.print(table)
    console.print(f"one comparison of {h['watched']} tokens behind {h['tokens']}: {h['canary_ms']:.0f} ms")
