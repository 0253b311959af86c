"""What the page store costs by itself, without a model: the same calls on small and on large stores."""

import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.ids import Ids
from qkvshare_agents.kv.page import Page, keep_native
from qkvshare_agents.kv.span import Block, Span
from qkvshare_agents.store.shared_store import SharedPageStore

SIZES = ((1_000, 30), (10_000, 300), (100_000, 3_000))  # (pages, conversations)
_PAGE_SIZE = 16  # tokens
_SYSTEM_TOKENS = 100  # no multiple of the page size: conversations part inside a page
_DROPPED = 0.1  # of the bytes
_COLUMNS = ("pages", "conversations", "match_ms", "extend_ms", "evict_ms_per_page")


def run(
    *, sizes: Sequence[tuple[int, int]] = SIZES, rounds: int = 200, report: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """A row for each (pages, conversations) of `sizes`, all conversations under one system text.

    match_ms: of finding a whole conversation; extend_ms: of adding a turn of two pages to one, its encoding left out;
    medians over `rounds` conversations. evict_ms_per_page: a tenth of the bytes makes room. report: is told what is
    done. Raises InvalidSetting for sizes or rounds below 1, or fewer pages than conversations.
    """
    if rounds < 1 or any(not 0 < conversations <= pages for pages, conversations in sizes):
        raise InvalidSetting(f"rounds ({rounds}) and sizes ({sizes}) must be at least 1, with a page per conversation")
    rows = []
    for pages, conversations in sizes:
        report(f"storing {pages:,} pages in {conversations:,} conversations")
        rows.append(_row(pages, conversations, rounds))
    return {"rows": rows, "versions": {"python": platform.python_version(), "torch": torch.__version__}}


def _row(pages: int, conversations: int, rounds: int) -> dict[str, Any]:
    chance = random.Random(0)
    store = SharedPageStore(b"", 2**62)
    system = _drawn(chance, _SYSTEM_TOKENS)
    own_pages, rest = divmod(max(0, pages - _SYSTEM_TOKENS // _PAGE_SIZE), conversations)
    begun = _SYSTEM_TOKENS % _PAGE_SIZE  # tokens of each conversation's first page
    known = []
    for number in range(conversations):
        own_tokens = max(1, own_pages + (number < rest)) * _PAGE_SIZE - begun
        known.append(system + _drawn(chance, own_tokens))
        _extend(store, known[-1], _made)
    count = store.page_count
    asked = [chance.choice(known) for _ in range(rounds)]
    match_ms = statistics.median(_ms(store.match, ids) for ids in asked)
    made = [_made(0, _PAGE_SIZE, True) for _ in range(2 * rounds)]
    longer = [ids + _drawn(chance, 2 * _PAGE_SIZE) for ids in asked]
    extend_ms = statistics.median(_ms(_extend, store, ids, lambda *_: made.pop()) for ids in longer)
    evicted = store.evicted_pages
    evict_ms = _ms(store.resize, round((1 - _DROPPED) * store.nbytes))
    evict_ms_per_page = evict_ms / max(1, store.evicted_pages - evicted)
    store.clear()
    return dict(zip(_COLUMNS, (count, conversations, match_ms, extend_ms, evict_ms_per_page), strict=True))


def _extend(store: SharedPageStore, ids: Ids, make_page: Callable[[int, int, bool], Page]) -> None:
    store.extend(ids, _PAGE_SIZE, len(ids), make_page)


def _made(start: int, stop: int, sealed: bool) -> Page:
    tokens = torch.zeros(1, 1, stop - start, 1)
    return keep_native(Span(stop - start, (Block((0,), tokens, tokens),)))


def _drawn(chance: random.Random, tokens: int) -> Ids:
    return tuple(chance.randrange(50_000) for _ in range(tokens))


def _ms(call: Callable[..., object], *given: object) -> float:
    started = time.perf_counter()
    call(*given)
    return (time.perf_counter() - started) * 1000


def show(result: dict[str, Any]) -> None:
    """Print the result of `run` as a table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title="page store, all conversations under one system text", box=box.SIMPLE_HEAD)
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for row in result["rows"]:
        table.add_row(*(f"{v:,}" if isinstance(v := row[column], int) else f"{v:.4f}" for column in _COLUMNS))
    Console().print(table)
