"""Widths are shared out among agents: within the budget, where it helps, and steadily."""

import pytest
from support import tiny_engine

from qkvshare_agents.budget.agents import Residents, page_sizes
from qkvshare_agents.budget.sensitivity import WIDTHS, Unit
from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.host.host import Host
from qkvshare_agents.kv import page
from qkvshare_agents.kv.page import Precision
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.prompt.layout import Message
from qkvshare_agents.prompt.members import Member
from qkvshare_agents.prompt.sampling import Sampling
from qkvshare_agents.settings import HostSettings
from qkvshare_agents.turns.request import Turn

A, B = ("", "a"), ("", "b")
EVEN = [Unit(1.0, 0.0, 1.0)] * 3
STEEP = [Unit(100.0, 100.0, 0.01), Unit(1.0, 0.0, 1.0), Unit(0.01, 0.0, 0.01)]


@pytest.fixture(scope="module")
def engine():
    return tiny_engine(hidden_size=64)


def residents(engine, **options) -> Residents:
    return Residents(Precision(rotate_keys=True), engine.shape, **options)


def flat(precision: Precision) -> list[int]:
    return [bits for layer in range(3) for bits in precision.bits(layer)]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2"])
@pytest.mark.parametrize("bits", WIDTHS)
def test_sizes_are_what_pages_store(kind: str, bits: int) -> None:
    engine = tiny_engine(kind)
    kv = KVCache(engine.shape)
    engine.feed(engine.begin(kv), list(range(64)))
    sealed = page.seal(kv.span(0, 64), Precision(bits, bits), starts_sequence=False)
    assert sealed.nbytes == sum(sizes[WIDTHS.index(bits)] for sizes in page_sizes(engine.shape, Precision()))


def test_nothing_observed_means_all_layers_alike_within_what_is_free(engine) -> None:
    sizes = page_sizes(engine.shape, Precision())
    pages = 17  # an agent is expected to fill these, and another one as many
    for pair in ((8, 8), (4, 4), (4, 2), (2, 2)):
        size = sum(s[WIDTHS.index(pair[i % 2])] for i, s in enumerate(sizes))
        r = residents(engine)
        got = r.precision(A, 2 * pages * size)
        assert got.bits(0) == got.bits(2) == pair
        assert r.uniform_because
    assert residents(engine).precision(A, 0).bits(1) == (2, 2)


def test_bits_go_to_the_layers_and_agents_that_need_them(engine) -> None:
    r = residents(engine, average_bits=3)
    r.observe(A, STEEP)
    a = r.precision(A, 10**9)
    assert a.bits(0)[0] > a.bits(2)[0] and a.bits(1)[1] >= a.bits(2)[1]
    assert not r.uniform_because
    r.observe(B, [Unit(u.keys / 1e4, u.shift / 1e4, u.values / 1e4) for u in STEEP])
    a, b = r.precision(A, 10**9), r.precision(B, 10**9)
    assert sum(flat(a)) > sum(flat(b))
    assert sum(flat(a) + flat(b)) / 12 <= 3.01
    r.prioritise(B, 1e6)
    r.prioritise(A, 1e-6)
    assert sum(flat(r.precision(B, 10**9))) > sum(flat(r.precision(A, 10**9)))


@pytest.mark.parametrize("free", [0, 10_000, 50_000, 100_000, 300_000, 10**9])
def test_what_is_expected_of_all_agents_fits_into_what_is_free(engine, free: int) -> None:
    r = residents(engine)
    for key in (A, B):
        r.observe(key, STEEP)
        r.note_turn(key, range(3000), 3000)
    r.precision(A, free)
    assert r.allocation
    if r.allocation.fits:
        assert 2 * r.allocation.nbytes <= free
    else:
        assert flat(r.precision(B, free)) == [2] * 6


def test_small_changes_change_nothing_and_large_ones_do(engine) -> None:
    r = residents(engine, average_bits=3)
    r.observe(A, STEEP)
    before = r.precision(A, 10**9)
    r.observe(A, [Unit(u.keys * 1.02, u.shift * 1.02, u.values * 0.99) for u in STEEP])
    assert r.precision(A, 10**9) is before
    for _ in range(20):
        r.observe(A, STEEP[::-1])
    after = r.precision(A, 10**9)
    assert after.bits(2)[0] > after.bits(0)[0]


def test_an_agent_that_leaves_makes_room_for_the_others(engine) -> None:
    r = residents(engine)
    for key in (A, B):
        r.observe(key, EVEN)
        r.note_turn(key, range(4000), 4000)
    free = 2 * 62 * 2 * sum(s[1] for s in page_sizes(engine.shape, Precision()))
    both = sum(flat(r.precision(A, free)))
    r.leave(B)
    assert sum(flat(r.precision(A, free))) > both
    r.agent(B)
    r.note_turn(B, range(4000), 4000)
    r.refresh()
    assert sum(flat(r.precision(A, free))) == both


def test_average_bits_belong_to_joint() -> None:
    assert HostSettings("m", precision="joint", average_bits=3).average_bits == 3
    for options in ({"average_bits": 3}, {"precision": "joint", "average_bits": 1.5}):
        with pytest.raises(InvalidSetting, match="average_bits"):
            HostSettings("m", **options)
    with pytest.raises(InvalidSetting, match="joint"):
        HostSettings("m", precision="joined")


def talk(host: Host, name: str, text: str, tokens: int = 12):
    turn = Turn(Member(name, name, ""), name, (Message("user", text, "user"),), Sampling(max_tokens=tokens))
    return host.submit(turn).result()


LONG = "Several agents work on this conversation in turn, and each of them reads what the others said. " * 14


def test_a_host_seals_what_attention_asked_for_and_evicts_what_does_not_fit() -> None:
    engine = tiny_engine(hidden_size=64)
    host = Host(HostSettings("tiny", precision="joint", average_bits=3), engine)
    first = talk(host, "a", LONG)
    assert first.report.mode.value == "TEXT"
    status = host.status()
    (agent,) = status["agents"]
    assert agent["agent"] == "a" and agent["observations"] == 1 and status["uniform_because"] == ""
    assert agent["tokens"] == first.prompt_tokens + first.completion_tokens - 1
    assert agent["stored_tokens"] == agent["tokens"] and agent["stored_bytes"] == status["stored_bytes"] > 0
    assert agent["average_bits"] <= 3.01 and len(set(agent["key_bits"] + agent["value_bits"])) > 1
    stored = [part.packed.bits for part in host.store.match(host.residents.agent(("a", "a")).ids).nodes[0].page.parts]
    assert set(stored) == set(agent["key_bits"] + agent["value_bits"])
    assert talk(host, "a", LONG + LONG[:200]).report.reused_tokens > 300
    for name in "bcd":
        talk(host, name, f"{name} " + LONG)
    before = host.status()
    assert before["stored_bytes"] <= before["budget_bytes"] and len(before["agents"]) == 4
    host.set_budget(before["stored_bytes"] // 2)
    after = host.status()
    assert after["stored_bytes"] <= after["budget_bytes"] == before["stored_bytes"] // 2
    assert after["evicted_pages"] > 0
    rows = {row["agent"]: row for row in after["agents"]}
    assert rows["a"]["stored_tokens"] < rows["a"]["tokens"], "the least recently used"
    assert rows["d"]["stored_tokens"] == rows["d"]["tokens"], "the most recently used"
    reports = [talk(host, name, f"{name} " + LONG * 2).report for name in "bcd"]
    assert any("pages were dropped, least recently used first" in r for report in reports for r in report.reasons)
    assert host.status()["stored_bytes"] <= after["budget_bytes"]
    with pytest.raises(InvalidSetting, match="negative"):
        host.set_budget(-1)
    host.close()


def test_what_was_sealed_stays_as_it_is() -> None:
    host = Host(HostSettings("tiny", precision="joint", average_bits=4), tiny_engine())
    talk(host, "a", LONG)
    ids = host.residents.agent(("a", "a")).ids
    pages = [node.page for node in host.store.match(ids).nodes if node.sealed]
    host.set_budget(host.store.nbytes + 4000)
    assert [node.page for node in host.store.match(ids).nodes if node.sealed] == pages
    talk(host, "a", LONG + LONG)
    now = [node.page for node in host.store.match(host.residents.agent(("a", "a")).ids).nodes if node.sealed]
    assert all(a is b for a, b in zip(pages, now, strict=False))
    host.close()


def test_a_model_that_can_not_be_observed_gets_all_layers_alike_with_the_reason() -> None:
    host = Host(HostSettings("tiny", precision="joint", budget_bytes=10**8), tiny_engine("bloom"))
    talk(host, "a", LONG)
    status = host.status()
    assert status["uniform_because"] == "attention of 0 of 3 layers was seen"
    assert status["agents"][0]["key_bits"] == [8, 8, 8]
    assert talk(host, "a", LONG + "More.").report.reused_tokens > 300
    host.close()
