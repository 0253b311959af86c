"""What the stores cost goes with the path that a call touches: operations are counted, never time."""

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from support import stacked
from test_page_store import ids_from
from typer.testing import CliRunner

from qkvshare_agents.eval import store as bench
from qkvshare_agents.kv.page import Page, keep_native
from qkvshare_agents.kv.shape import Window
from qkvshare_agents.kv.span import Block, Span
from qkvshare_agents.kv.state import Snapshot
from qkvshare_agents.store.shared_store import SharedPageStore
from qkvshare_agents.store.state_store import SnapshotStore

Ids = tuple[int, ...]
PAGE = 16
SYSTEM = ids_from(0, 100)  # no multiple of the page: conversations part inside one
WINDOW = Window(frozenset({1}), 24)


def operations(work: Callable[[], object]) -> int:
    """Lines of our own that `work` runs, a loop's once for each round."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if "qkvshare_agents" not in frame.f_code.co_filename:
            return None
        count += 1
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def page_of(tokens: int, windowed: bool) -> Page:
    rows = torch.zeros(1, 1, tokens, 1)
    blocks = (Block((0,), rows, rows), Block((1,), rows, rows)) if windowed else stacked(rows, rows).blocks
    return keep_native(Span(tokens, blocks))


class Store(SharedPageStore):
    def __init__(self, window: Window | None) -> None:
        super().__init__(b"root", 2**40, window)

    def put(self, ids: Ids) -> None:
        windowed = self.window is not None
        settled = max(0, len(ids) - 2 * PAGE)
        self.extend(
            ids, PAGE, len(ids), lambda start, stop, _: page_of(stop - start, windowed),
            points=(settled,), computed_from=settled,
        )  # fmt: skip


def conversation(number: int, tokens: int, shared: int) -> Ids:
    """shared: tokens behind the system text that all conversations begin with."""
    return SYSTEM + ids_from(500, shared) + ids_from(10_000 * (number + 1), tokens)


def filled(count: int, tokens: int, shared: int, window: Window | None) -> Store:
    store = Store(window)
    for number in range(count):
        store.put(conversation(number, tokens, shared))
    return store


def costs(count: int, tokens: int, shared: int, window: Window | None) -> dict[str, int]:
    store = filled(count, tokens, shared, window)
    ids = conversation(count // 2, tokens, shared)
    other = filled(1, tokens, shared, window)
    sent = other.steps(other.match(conversation(0, tokens, shared)), ())
    found = {
        "match": operations(lambda: store.match(ids)),
        "match another": operations(lambda: store.match(conversation(count, tokens, shared))),
        "extend": operations(lambda: store.put(ids + ids_from(7, 40))),
        "branch": operations(lambda: store.put(conversation(count, tokens, shared))),
        "again": operations(lambda: store.put(ids)),
        "graft": operations(lambda: store.graft(conversation(0, tokens, shared), sent)),
        "held": operations(lambda: store.held(ids)),
        "nbytes": operations(lambda: (store.nbytes, store.page_count)),
    }
    found["evict a page"] = operations(lambda: store.resize(store.nbytes - 1))
    return found


# Short ones are open runs beside each other, all of them alike at first
@pytest.mark.parametrize(("tokens", "shared"), [(60, 0), (60, 3), (60, 25), (8, 25), (5, 0)])
@pytest.mark.parametrize("window", [None, WINDOW], ids=["full attention", "windows"])
def test_a_large_store_costs_what_a_small_one_does(tokens: int, shared: int, window: Window | None) -> None:
    small, large = (costs(count, tokens, shared, window) for count in (80, 640))
    assert {name: n for name, n in large.items() if n > 1.5 * small[name] + 30} == {}, small


def test_evicting_costs_the_same_for_each_page() -> None:
    def per_page(count: int) -> float:
        store = filled(count, 60, 3, None)
        n = operations(lambda: store.resize(store.nbytes // 2))
        return n / store.evicted_pages

    assert per_page(200) < 1.2 * per_page(20)


def test_a_long_conversation_without_windows_is_looked_through_once() -> None:
    """Where layers with a window have lost their KV, a match goes back to where they have it, page by page."""

    def cost(pages: int) -> int:
        store = Store(WINDOW)
        ids = ids_from(0, pages * PAGE)
        store.extend(ids, PAGE, len(ids), lambda start, stop, _: page_of(stop - start, windowed=False))
        return operations(lambda: store.match(ids))

    assert cost(160) < 9 * cost(20)


@pytest.mark.parametrize("depth", [1, 12])
def test_snapshots_are_found_and_kept_without_a_look_at_the_others(depth: int) -> None:
    def cost(count: int) -> tuple[int, int]:
        store = SnapshotStore(2**30)
        for number in range(count):
            for turn in range(1, depth + 1):
                store.keep(conversation(number, 10 * turn, 3), Snapshot(100, ({"state": torch.zeros(1)},)))
        ids = conversation(count // 2, 10 * depth, 3)
        assert store.longest((*ids, 1)).tokens == 100
        return operations(lambda: store.longest((*ids, 1))), operations(lambda: store.keep((*ids, 2), Snapshot(1, ())))

    small, large = cost(20), cost(400)
    assert all(b < 1.5 * a + 30 for a, b in zip(small, large, strict=True)), (small, large)


def test_a_reader_waits_for_one_page_that_makes_room_and_not_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(40, 60, 3, None)
    ids = conversation(39, 60, 3)
    evict, evicted_before = SharedPageStore._evict, []
    reader = threading.Thread(target=lambda: evicted_before.append((store.match(ids).tokens, store.evicted_pages)))

    def evict_while_one_waits(self: SharedPageStore) -> bool:
        if reader.ident is None:
            reader.start()
            while not store._lock.is_awaited():
                pass
        return evict(self)

    monkeypatch.setattr(SharedPageStore, "_evict", evict_while_one_waits)
    store.resize(store.nbytes // 2)
    reader.join(timeout=10)
    assert evicted_before == [(len(ids), 1)]
    assert store.evicted_pages > 20


def test_the_budget_holds_while_room_is_made() -> None:
    """Room is made before pages come in: at no time is more stored than the budget, whoever looks."""
    store = filled(20, 60, 3, None)
    store.budget_bytes = store.nbytes
    lines: list[int] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if "page_store" in frame.f_code.co_filename and not store._lock._lock.locked():
            lines.append(store.nbytes)
        return trace

    sys.settrace(trace)
    try:
        store.put(conversation(99, 200, 3))
    finally:
        sys.settrace(None)
    assert lines and max(lines) <= store.budget_bytes
    assert store.match(conversation(99, 200, 3)).tokens == len(conversation(99, 200, 3))


def test_bench_store_measures_stores_of_the_sizes_that_it_names() -> None:
    said: list[str] = []
    result = bench.run(sizes=((60, 4), (200, 10)), rounds=3, report=said.append)
    assert [(row["pages"], row["conversations"]) for row in result["rows"]] == [(60, 4), (200, 10)]
    assert all(row[name] > 0 for row in result["rows"] for name in ("match_ms", "extend_ms", "evict_ms_per_page"))
    assert len(said) == 2


def test_the_command_prints_rows_and_says_what_it_does_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    from qkvshare_agents.cli.app import app

    monkeypatch.setattr(bench.run, "__kwdefaults__", bench.run.__kwdefaults__ | {"sizes": ((30, 2),)})
    done = CliRunner().invoke(app, ["bench", "store", "--json", "--rounds", "2"])
    assert json.loads(done.stdout)["rows"][0]["pages"] == 30 and "storing 30 pages" in done.stderr
    assert "evict_ms_per_page" in CliRunner().invoke(app, ["bench", "store", "--rounds", "2"]).stdout
