"""Pages from store to store: whatever the receiver held before, it reads back KV of exactly its tokens."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import stacked
from test_page_store import assert_right, kv_of, page_of, read

from qkvshare_agents.kv.page import keep_native
from qkvshare_agents.store.prefix_tree import SHORTEST_SLICE
from qkvshare_agents.store.runs import Step
from qkvshare_agents.store.shared_store import SharedPageStore

Ids = tuple[int, ...]


class Store(SharedPageStore):
    """Pages are made from the fake KV, as in the tests of the page store."""

    def __init__(self, root_key: bytes = b"root", budget_bytes: int = 2**40) -> None:
        super().__init__(root_key, budget_bytes)

    def put(self, ids: Ids, page_size: int = 32, residual: int = 0) -> None:
        values = kv_of(ids)
        self.extend(ids, page_size, len(ids) - residual, lambda start, stop, sealed: page_of(values[start:stop]))


def counting(count: int, first: int = 0) -> Ids:
    return tuple(range(first, first + count))


def move(sender: Store, receiver: Store, ids: Ids, have: bool = True) -> tuple[Step, ...]:
    steps = sender.steps(sender.match(ids), receiver.held(ids) if have else ())
    assert receiver.fits(ids, steps)
    receiver.graft(ids, steps)
    return steps


def test_pages_come_over_once() -> None:
    a, b = Store(), Store()
    ids = counting(100)
    a.put(ids)
    assert [step.page is not None for step in move(a, b, ids)] == [True] * 4
    assert_right(b.match(ids), ids)
    assert b.match(ids).tokens == 100
    longer = (*ids, *counting(60, 500))
    a.put(longer)
    steps = move(a, b, longer)
    assert [step.page is not None for step in steps] == [False] * 3 + [True] * (len(steps) - 3)
    assert b.match(longer).tokens == 160
    assert read(b.match(longer)) == kv_of(longer)


def test_an_open_run_is_replaced_when_a_longer_one_comes() -> None:
    a, b = Store(), Store()
    ids = counting(150)
    a.put(ids[:40])
    move(a, b, ids[:40])
    count = b.page_count
    a.put(ids)
    move(a, b, ids)
    assert b.match(ids).tokens == 150
    assert b.page_count == count - 1 + 4  # the open run of 8 went; 3 sealed pages and an open one came


def test_an_open_run_that_is_sealed_elsewhere_makes_way() -> None:
    a, b = Store(), Store()
    ids = counting(96)
    b.put(ids[:64], residual=32)  # 32 sealed, 32 open
    a.put(ids)
    move(a, b, ids)
    assert b.match(ids).tokens == 96
    b.put((*ids, *counting(10, 900)))
    assert_right(b.match(ids), ids)
    assert b.match(ids).tokens == 96


def test_owners_of_an_open_run_keep_what_they_had() -> None:
    """Its tokens come over in longer, sealed runs: they own as many of these, and nobody owns the rest."""
    a, b = Store(), Store()
    ids = counting(96)
    a.put(ids)
    b.extend(ids[:40], 32, 40, lambda start, stop, sealed: page_of(kv_of(ids[:40])[start:stop]), ("mine",))
    move(a, b, ids)
    assert b.match(ids).tokens == 96
    assert b.match(ids, frozenset({"mine"})).tokens == 32  # 8 more are theirs, fewer than a slice is worth
    assert b.match(ids, frozenset({"other"})).tokens == 0
    shares = [node.owners.get("mine", 0) for node in b.match(ids).nodes]
    assert shares == [32, 8, 0]


def test_only_what_may_be_read_goes_out() -> None:
    a = Store()
    ids = counting(64)
    a.extend(ids, 32, 64, lambda start, stop, sealed: page_of(kv_of(ids)[start:stop]), ("mine",))
    assert a.steps(a.match(ids, frozenset({"other"})), ()) == ()
    assert [step.tokens for step in a.steps(a.match(ids, frozenset({"mine"})), ())] == [32, 32]
    assert [step.tokens for step in a.steps(a.match(ids), ())] == [32, 32]


def test_own_pages_stay() -> None:
    a, b = Store(), Store()
    ids = counting(64)
    a.put(ids)
    b.put(ids)
    mine = b.match(ids).nodes[0].page
    b.graft(ids, a.steps(a.match(ids), ()))
    assert b.match(ids).nodes[0].page is mine
    assert b.page_count == 2


def test_pages_that_are_gone_end_what_comes_over() -> None:
    a, b = Store(), Store()
    ids = counting(128)
    a.put(ids)
    have = [step.key for step in a.steps(a.match(ids), ())][:2]  # b said so, and has lost them since
    assert b.graft(ids, a.steps(a.match(ids), have)) == 0
    assert b.page_count == 0


def test_a_page_shared_in_part_goes_out_cropped() -> None:
    a, b = Store(), Store()
    ids = counting(64)
    other = (*ids[:40], *counting(30, 700))
    a.put(ids)
    a.put(other)
    steps = move(a, b, other)
    assert sum(step.tokens for step in steps) == a.match(other).tokens > 40
    assert all(step.page.tokens == step.tokens for step in steps)
    assert read(b.match(other)) == kv_of(other)[: b.match(other).tokens]
    assert b.match(ids).tokens <= 40  # what came after the fork did not travel


def test_the_end_of_a_match_inside_a_page_goes_out_cropped() -> None:
    a, b = Store(), Store()
    a.put(counting(64))
    asked = (*counting(50), 999)
    steps = move(a, b, asked)
    assert [(step.tokens, step.page.tokens) for step in steps] == [(32, 32), (18, 18)]
    assert read(b.match(asked)) == kv_of(asked)[:50]


def test_another_root_fits_nowhere() -> None:
    a, b = Store(b"tenant a"), Store(b"tenant b")
    ids = counting(64)
    a.put(ids)
    assert not b.fits(ids, a.steps(a.match(ids), ()))
    assert not a.fits(counting(64, 1), a.steps(a.match(ids), ()))
    assert not {step.key for step in a.steps(a.match(ids), ())} & set(b.held(ids))


def test_a_receiver_without_room_keeps_what_fits() -> None:
    a, b = Store(), Store(budget_bytes=32 * 16 * 2)
    ids = counting(128)
    a.put(ids)
    assert b.graft(ids, a.steps(a.match(ids), ())) == 64
    assert b.nbytes <= b.budget_bytes
    assert_right(b.match(ids), ids)


IDS = st.lists(st.integers(0, 2), min_size=1, max_size=90).map(tuple)


@settings(max_examples=300, deadline=None)
@given(
    before=st.lists(st.tuples(st.booleans(), IDS, st.sampled_from([4, 16, 20, 32]), st.integers(0, 20)), max_size=8),
    forks=st.lists(st.tuples(st.integers(0, 90), IDS), max_size=3),
    data=st.data(),
)
def test_whatever_both_held_the_receiver_reads_right(before, forks, data: st.DataObject) -> None:
    a, b = Store(), Store()
    known = [(0,) * 40]
    for to_a, ids, page_size, residual in before:
        base = data.draw(st.sampled_from(known))
        known.append((*base[: data.draw(st.integers(0, len(base)))], *ids))
        (a if to_a else b).put(known[-1], page_size, residual)
    for cut, tail in forks:
        known.append((*data.draw(st.sampled_from(known))[:cut], *tail))
    for ids in known:
        reachable = a.match(ids).tokens
        move(a, b, ids, have=data.draw(st.booleans()))
        assert b.match(ids).tokens > reachable - SHORTEST_SLICE
        for asked in known:
            assert_right(b.match(asked), asked)
    for ids in known:
        b.put(ids)
        assert_right(b.match(ids), ids)
        assert b.match(ids).tokens > len(ids) - SHORTEST_SLICE


def test_hops_are_kept_in_the_page() -> None:
    page = replace(keep_native(stacked(torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2, 1))), hops=3)
    store = Store()
    store.graft((1, 2), [Step(2, b"", False, page)])
    assert store.match((1, 2)).nodes[0].page.hops == 3
    with pytest.raises(AttributeError):
        page.hops = 4  # type: ignore[misc]
