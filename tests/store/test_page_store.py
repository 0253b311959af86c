"""The store never returns KV of other tokens, and never encodes stored tokens again.

The fake KV of token t is a hash of ids[:t + 1]: it differs whenever anything before differs, as real KV does, so
that reading a match back proves that every token's KV belongs to exactly that prefix.
"""

import gc
import hashlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import stacked

from qkvshare_agents.errors import CodecError, InvalidSetting
from qkvshare_agents.kv.page import Page, keep_native
from qkvshare_agents.store.page_store import PageStore
from qkvshare_agents.store.prefix_tree import SHORTEST_SLICE, Match

TOKEN_BYTES = 16  # an int64 for the key and one for the value
PAGE_SIZES = (4, 16, 20, 32)
Ids = tuple[int, ...]


def kv_of(ids: Ids) -> list[int]:
    """What the KV of each token of `ids` must be."""
    running, values = hashlib.sha256(), []
    for token in ids:
        running.update(token.to_bytes(8, "little"))
        values.append(int.from_bytes(running.copy().digest()[:7], "little"))
    return values


def page_of(values: list[int]) -> Page:
    keys = torch.tensor(values, dtype=torch.int64).reshape(1, 1, -1, 1)
    return keep_native(stacked(keys, -keys))


class Store(PageStore):
    """A store whose pages are made from the fake KV; `made` are the spans that were."""

    def __init__(self, budget_bytes: int = 2**40, root_key: bytes = b"root") -> None:
        super().__init__(root_key, budget_bytes)
        self.made: list[tuple[int, int, bool]] = []

    def put(self, ids: Ids, page_size: int = 32, residual: int = 0) -> list[tuple[int, int, bool]]:
        """Extend; returns the spans that pages were made for."""
        values, spans = kv_of(ids), []

        def make_page(start: int, stop: int, sealed: bool) -> Page:
            spans.append((start, stop, sealed))
            return page_of(values[start:stop])

        count = self.extend(ids, page_size, len(ids) - residual, make_page)
        assert count == len(spans)
        self.made += spans
        return spans


def read(match: Match) -> list[int]:
    """The KV of a match, as the working cache would load it."""
    content: list[int] = []
    for page, tokens in match.runs:
        keys, values = (torch.full((1, 1, tokens, 1), -1, dtype=torch.int64) for _ in range(2))
        page.open_into(stacked(keys, values))
        assert torch.equal(keys, -values)
        content += keys.flatten().tolist()
    return content


def assert_right(match: Match, ids: Ids) -> None:
    assert match.tokens <= len(ids)
    assert read(match) == kv_of(ids)[: match.tokens]


def agreement(a: Ids, b: Ids) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@st.composite
def conversations(draw: st.DrawFn, most: int = 12) -> list[Ids]:
    """Sequences that go on from, part from or repeat earlier ones at any token."""
    made: list[Ids] = [()]
    for _ in range(draw(st.integers(2, most))):
        base = draw(st.sampled_from(made))
        cut = draw(st.one_of(st.just(len(base)), st.integers(0, len(base))))
        # two ids only, so that tails meet by chance as well, and a tail of one kind, so that they meet for long
        kind = draw(st.sampled_from(("zeros", "ones", "mixed")))
        length = draw(st.integers(0, 70))
        tail = draw(st.binary(min_size=length, max_size=length)) if kind == "mixed" else b""
        made.append(base[:cut] + (tuple(b % 2 for b in tail) or (int(kind == "ones"),) * length))
    return made[1:]


@settings(max_examples=250, deadline=None)
@given(conversations(), st.sampled_from(PAGE_SIZES), st.integers(0, 70), st.data())
def test_match_is_right_complete_and_nothing_sealed_is_made_again(
    sequences: list[Ids], page_size: int, residual: int, data: st.DataObject
) -> None:
    store, stored, sealed = Store(), [], []
    for ids in sequences:
        best_sealed = max((agreement(ids, other) for other in sealed), default=0)
        spans = store.put(ids, page_size, residual)
        stored.append(ids)
        assert all(start > best_sealed - SHORTEST_SLICE for start, _, _ in spans), "sealed tokens were made again"
        if full := [stop for _, stop, is_sealed in spans if is_sealed]:
            sealed.append(ids[: full[-1]])
        for asked in (ids, *stored, ids[: data.draw(st.integers(0, len(ids)))], (*ids, 0), (1, *ids)):
            match = store.match(asked)
            assert_right(match, asked)
            longest = max(agreement(asked, other) for other in stored)
            assert longest - SHORTEST_SLICE < match.tokens <= longest
    store_bytes = sum(page.nbytes for page in {id(n.page): n.page for n in nodes(store)}.values())
    assert store.nbytes == store_bytes


@settings(max_examples=100, deadline=None)
@given(conversations(), st.lists(st.tuples(st.sampled_from(PAGE_SIZES), st.integers(0, 70)), min_size=12, max_size=12))
def test_page_size_and_residual_may_change_from_turn_to_turn(
    sequences: list[Ids], precisions: list[tuple[int, int]]
) -> None:
    store = Store()
    for ids, (page_size, residual) in zip(sequences, precisions, strict=False):
        store.put(ids, page_size, residual)
        for other in sequences:
            assert_right(store.match(other), other)
        assert store.match(ids).tokens > len(ids) - SHORTEST_SLICE


@settings(max_examples=150, deadline=None)
@given(conversations(), st.sampled_from(PAGE_SIZES), st.integers(0, 40), st.integers(0, 200))
def test_the_budget_holds_after_every_turn(
    sequences: list[Ids], page_size: int, residual: int, budget_tokens: int
) -> None:
    store = Store(budget_tokens * TOKEN_BYTES)
    for ids in sequences:
        store.put(ids, page_size, residual)
        assert store.nbytes <= store.budget_bytes
        for other in sequences:
            assert_right(store.match(other), other)


def nodes(store: PageStore) -> list:
    found, stack = [], [*store._root.children]
    while stack:
        node = stack.pop()
        found.append(node)
        stack += node.children
    return found


def ids_from(start: int, count: int) -> Ids:
    return tuple(range(start, start + count))


def test_an_empty_store_matches_nothing() -> None:
    match = Store().match(ids_from(0, 100))
    assert (match.tokens, match.nbytes, list(match.runs)) == (0, 0, [])


def test_pages_are_full_up_to_the_residual_window_and_the_rest_is_open() -> None:
    assert Store().put(ids_from(0, 100), 32) == [(0, 32, True), (32, 64, True), (64, 96, True), (96, 100, False)]
    assert Store().put(ids_from(0, 100), 32, residual=10) == [(0, 32, True), (32, 64, True), (64, 100, False)]
    assert Store().put(ids_from(0, 64), 32) == [(0, 32, True), (32, 64, True)]
    assert Store().put(ids_from(0, 64), 32, residual=100) == [(0, 64, False)]


def test_sealed_tokens_beyond_the_ids_make_no_page_beyond_them() -> None:
    spans: list[tuple[int, int, bool]] = []

    def make_page(start: int, stop: int, sealed: bool) -> Page:
        spans.append((start, stop, sealed))
        return page_of([0] * (stop - start))

    Store().extend(ids_from(0, 40), 32, 1000, make_page)
    assert spans == [(0, 32, True), (32, 40, False)]


def test_the_same_prompt_again_makes_nothing() -> None:
    store = Store()
    store.put(ids_from(0, 100))
    pages = store.page_count
    assert store.put(ids_from(0, 100)) == []
    assert store.put(ids_from(0, 80)) == []
    assert store.page_count == pages


def test_a_longer_conversation_replaces_only_the_open_page() -> None:
    store = Store()
    store.put(ids_from(0, 100))
    assert store.put(ids_from(0, 140)) == [(96, 128, True), (128, 140, False)]
    assert store.page_count == 5 and store.nbytes == 140 * TOKEN_BYTES


def test_branches_inside_a_page_share_its_bytes_and_start_behind_the_fork() -> None:
    store = Store()
    trunk = ids_from(0, 64)
    store.put(trunk)
    assert store.put(trunk[:50] + ids_from(1000, 40)) == [(50, 82, True), (82, 90, False)]
    assert store.nbytes == (64 + 40) * TOKEN_BYTES, "the shared page was counted twice"
    assert store.put(trunk[:50] + ids_from(2000, 8)) == [(50, 58, False)], "the second branch uses the same slice"
    assert store.page_count == 2 + 2 + 1
    assert store.match(trunk[:50] + ids_from(1000, 40)).tokens == 90
    assert store.match(trunk).tokens == 64, "the trunk must stay whole"


@pytest.mark.parametrize(("fork", "start"), [(32 + SHORTEST_SLICE - 1, 32), (32 + SHORTEST_SLICE, 32 + SHORTEST_SLICE)])
def test_slices_are_not_shorter_than_stated(fork: int, start: int) -> None:
    store = Store()
    store.put(ids_from(0, 64))
    branch = ids_from(0, fork) + ids_from(1000, 10)
    assert store.match(branch).tokens == start
    assert store.put(branch)[0][0] == start


def test_a_long_open_run_does_not_hide_sealed_pages() -> None:
    """Both turns agree with the open run of the first for longer than with the sealed page of the second."""
    store = Store()
    shared = ids_from(0, 74)
    store.put(shared, 64, residual=64)
    store.put(shared[:64] + ids_from(1000, 64), 64, residual=64)
    assert store.match(shared).tokens == 74
    assert store.put(shared + ids_from(2000, 60), 64, residual=0)[0] == (64, 128, True)
    assert store.match(shared + ids_from(2000, 60)).tokens == 134


def test_an_outgrown_open_run_goes_wherever_its_successor_hangs() -> None:
    store = Store()
    shared = ids_from(0, 74)
    store.put(shared, 64, residual=64)
    store.put(shared[:64] + ids_from(1000, 64), 64, residual=64)
    before = store.nbytes
    store.put(shared + ids_from(2000, 2), 64, residual=64)
    assert store.nbytes == before - 74 * TOKEN_BYTES + 12 * TOKEN_BYTES


def test_eviction_takes_the_least_recently_used_and_its_newest_tokens_first() -> None:
    store = Store(budget_bytes=96 * TOKEN_BYTES)
    first, second, third = ids_from(0, 32), ids_from(1000, 32), ids_from(2000, 32)
    for ids in (first, second, third):
        store.put(ids)
    store.match(first)
    store.put(first + ids_from(32, 32))
    assert [store.match(ids).tokens for ids in (first, second, third)] == [32, 0, 32]
    assert store.evicted_pages == 1
    long = ids_from(3000, 96)
    store.put(long)
    assert [store.match(ids).tokens for ids in (first, third, long)] == [0, 0, 96]
    store.put(ids_from(4000, 16))
    assert store.match(long).tokens == 64, "the tail goes, the beginning stays"


@pytest.mark.parametrize("use", [Store.put, Store.match], ids=["storing again", "matching"])
def test_what_was_used_again_stays_longer(use: Callable[[Store, Ids], object]) -> None:
    store = Store(budget_bytes=64 * TOKEN_BYTES)
    first, second = ids_from(0, 32), ids_from(1000, 32)
    store.put(first)
    store.put(second)
    use(store, first)
    store.put(ids_from(2000, 32))
    assert (store.match(first).tokens, store.match(second).tokens) == (32, 0)


def test_a_dropped_slice_is_not_an_evicted_page() -> None:
    store = Store(budget_bytes=(64 + 10) * TOKEN_BYTES)
    trunk = ids_from(0, 64)
    store.put(trunk)
    store.put(trunk[:50] + ids_from(1000, 10))
    store.match(trunk)
    store.put(trunk + ids_from(64, 5))
    assert store.nbytes == 69 * TOKEN_BYTES
    assert store.evicted_pages == 1, "the branch's page"


def test_a_budget_of_nothing_stores_nothing() -> None:
    store = Store(budget_bytes=0)
    store.put(ids_from(0, 100))
    assert (store.nbytes, store.page_count, store.match(ids_from(0, 100)).tokens) == (0, 0, 0)


def test_a_match_stays_readable_after_eviction_and_clear() -> None:
    store = Store()
    ids = ids_from(0, 100)
    store.put(ids)
    match = store.match(ids)
    store.clear()
    assert (store.nbytes, store.page_count, store.match(ids).tokens) == (0, 0, 0)
    assert_right(match, ids)
    assert match.tokens == 100
    store.put(ids)
    assert store.match(ids).tokens == 100


def test_match_bytes_count_a_shared_page_once() -> None:
    store = Store()
    trunk = ids_from(0, 64)
    store.put(trunk)
    branch = trunk[:50] + trunk[:20]
    store.put(branch)
    match = store.match(branch)
    assert match.nbytes == (32 + 32 + 20) * TOKEN_BYTES


@pytest.mark.parametrize("failure", [CodecError("NaN"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_page_that_fails_leaves_the_store_as_it_was(failure: BaseException, at: int) -> None:
    store = Store()
    store.put(ids_from(0, 50))
    before = [(n.key, n.sealed) for n in nodes(store)]
    calls: list[int] = []

    def make_page(start: int, stop: int, sealed: bool) -> Page:
        calls.append(start)
        if len(calls) > at:
            raise failure
        return page_of([0] * (stop - start))

    with pytest.raises(type(failure)):
        store.extend(ids_from(0, 120), 32, 120, make_page)
    assert [(n.key, n.sealed) for n in nodes(store)] == before
    assert_right(store.match(ids_from(0, 120)), ids_from(0, 120))
    assert store.match(ids_from(0, 120)).tokens == 50


def key_of(ids: Ids, root_key: bytes = b"root") -> bytes:
    store = Store(root_key=root_key)
    store.put(ids, page_size=4)
    return store.match(ids).nodes[-1].key


def test_keys_tell_ids_parents_and_roots_apart() -> None:
    sequences = [(1, 23), (12, 3), (1, 2, 3), (123,), (1, 23, 0), (0, 1, 23), (1, 23 + 2**32), (1 << 40,), (2**63 - 1,)]
    sequences += [(1, 1, 1, 1, 5), (2, 1, 1, 1, 5)]  # the same last page behind other parents
    keys = [key_of(ids) for ids in sequences]
    assert len(set(keys)) == len(keys)
    assert key_of((1, 23)) == key_of((1, 23))
    assert key_of((1, 23)) != key_of((1, 23), b"another fingerprint or salt")


@pytest.mark.parametrize("bad", [-1, 2**63, -(2**63)])
def test_impossible_ids_are_refused_before_anything_is_made(bad: int) -> None:
    store = Store()
    store.put(ids_from(0, 40))
    with pytest.raises(InvalidSetting, match=str(bad)):
        store.extend((*ids_from(0, 70), bad), 32, 71, lambda *_: pytest.fail("a page was made"))
    assert store.match((*ids_from(0, 70), bad)).tokens == 40


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run work(0) ... work(count - 1) at once; what one raises is raised here."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def guarded(index: int) -> None:
        try:
            barrier.wait(timeout=10)
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("clears", [False, True])
def test_threads_that_extend_match_and_clear_at_once_never_see_a_wrong_page(clears: bool) -> None:
    store = Store(budget_bytes=400 * TOKEN_BYTES)
    trunk = ids_from(0, 80)

    def work(index: int) -> None:
        for step in range(40):
            ids = trunk[: 20 + (7 * step + 13 * index) % 60] + ids_from(1000 * (step % 3), 10 + step % 37)
            store.put(ids, page_size=16, residual=step % 20)
            assert_right(store.match(ids), ids)
            assert store.nbytes <= store.budget_bytes
            if clears and index == 0 and step % 10 == 9:
                store.clear()

    in_threads(6, work)
    assert all(not (node.children and not node.sealed) for node in nodes(store)), "an open run is a leaf"


def test_threads_that_store_the_same_ids_at_once_store_them_once() -> None:
    store = Store()
    ids = ids_from(0, 100)
    in_threads(6, lambda _: store.put(ids, page_size=16))
    assert (store.nbytes, store.page_count) == (100 * TOKEN_BYTES, 7)
    assert store.match(ids).tokens == 100


def test_a_turn_that_overtakes_another_meanwhile_loses_nothing() -> None:
    """While the pages of one turn are made, another turn stores its open beginning, and a third one branches."""
    store = Store()
    ids = ids_from(0, 100)
    values = kv_of(ids)
    others = (ids[:84], ids[:40] + ids_from(1000, 20))

    def make_page(start: int, stop: int, sealed: bool) -> Page:
        if start == 0:
            for other in others:
                store.put(other)
        return page_of(values[start:stop])

    store.extend(ids, 32, 100, make_page)
    for stored in (ids, *others):
        assert store.match(stored).tokens == len(stored)
        assert_right(store.match(stored), stored)
    keys = Counter(node.key for node in nodes(store))
    assert max(keys.values()) == 1
    assert all(not (node.children and not node.sealed) for node in nodes(store)), "an open run is a leaf"


def test_cleared_pages_are_freed_without_a_garbage_collection() -> None:
    store = Store()
    store.put(ids_from(0, 200))
    pages = [weakref.ref(page) for page, _ in store.match(ids_from(0, 200)).runs]
    gc.disable()
    try:
        store.clear()
        assert len(pages) > 3 and all(page() is None for page in pages)
    finally:
        gc.enable()


@pytest.mark.parametrize("tokens", [0, 1, 31, 32, 33, 60, 75])
def test_the_head_of_a_match_is_its_first_tokens(tokens: int) -> None:
    store, ids = Store(), tuple(range(75))
    store.put(ids)
    match = store.match(ids)
    head = match.head(tokens)
    assert head.tokens == tokens and head.nodes == match.nodes[: len(head.nodes)]
    assert read(head) == kv_of(ids)[:tokens]
