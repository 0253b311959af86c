"""Whose pages a turn finds: those of the owners it may read, never others', and nothing is stored twice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedHost
from support import tiny_engine
from test_page_store import PAGE_SIZES, Ids, Store, agreement, assert_right, conversations

from qkvshare_agents.prompt import members
from qkvshare_agents.prompt.layout import Message, View, lay_out, ledger_key
from qkvshare_agents.prompt.ledger import Ledger
from qkvshare_agents.prompt.members import Member, Roster
from qkvshare_agents.prompt.sampling import Sampling
from qkvshare_agents.prompt.tool_calls import ToolCall
from qkvshare_agents.store.prefix_tree import _MOST_OWNERS, SHORTEST_SLICE
from qkvshare_agents.turns.access import Access
from qkvshare_agents.turns.request import Turn

_ENGINE = tiny_engine()
TASK = Message("user", "Say something that is long enough to fill a page or two of the cache, please.", "user")


def own(store: Store, owner: str, ids: Ids, page_size: int = 32, residual: int = 0) -> None:
    """Store `ids` as computed by `owner`."""
    extend = store.extend

    def owned(*args):
        return extend(*args, (owner,))

    store.extend = owned
    try:
        store.put(ids, page_size, residual)
    finally:
        del store.extend


@settings(max_examples=150, deadline=None)
@given(conversations(), st.data(), st.sampled_from(PAGE_SIZES), st.sampled_from([0, 5, 40]))
def test_a_reader_finds_what_its_owners_had_and_no_token_more(
    runs: list[Ids], data: st.DataObject, page_size: int, residual: int
) -> None:
    store, plain = Store(), Store()
    had: dict[str, list[Ids]] = {name: [()] for name in "abc"}
    for ids in filter(None, runs):
        owner = data.draw(st.sampled_from("abc"))
        own(store, owner, ids, page_size, residual)
        plain.put(ids, page_size, residual)
        had[owner].append(ids)
    assert store.made == plain.made and store.nbytes == plain.nbytes, "owners cost pages"
    for ids in runs:
        readers = frozenset(data.draw(st.sets(st.sampled_from("abc"))))
        most = max((agreement(ids, run) for reader in readers for run in had[reader]), default=0)
        match = store.match(ids, readers)
        assert_right(match, ids)
        assert most - SHORTEST_SLICE < match.tokens <= most
    assert store.match(runs[-1], frozenset({"nobody"})).tokens == 0


def test_whoever_computes_the_same_ids_joins_the_owners() -> None:
    store, ids = Store(), tuple(range(64))
    own(store, "a", ids)
    assert store.match(ids, frozenset({"b"})).tokens == 0
    pages = store.page_count
    own(store, "b", ids)
    assert store.match(ids, frozenset({"b"})).tokens == 64
    assert store.page_count == pages


def test_an_open_page_that_another_agent_goes_on_from_stays_its_owners_as_far_as_it_was() -> None:
    store, ids = Store(), tuple(range(100))
    own(store, "a", ids[:50], 32, 10)
    own(store, "b", ids, 32, 10)
    assert store.match(ids, frozenset({"a"})).tokens == 50
    assert store.match(ids, frozenset({"b"})).tokens == 100
    assert store.match(ids).tokens == 100, "without readers everything is found, as before"


def test_pages_without_an_owner_are_found_only_without_readers() -> None:
    store, ids = Store(), tuple(range(40))
    store.put(ids)
    assert store.match(ids).tokens == 40 and store.match(ids, frozenset({"", "a"})).tokens == 0


def test_owners_of_a_page_stay_few() -> None:
    store, ids = Store(), tuple(range(40))
    for i in range(_MOST_OWNERS + 50):
        own(store, f"agent {i}", ids)
    assert all(len(node.owners) <= _MOST_OWNERS for node in store.match(ids).nodes)
    assert store.match(ids, frozenset({f"agent {_MOST_OWNERS + 49}"})).tokens == 40


def test_the_address_names_the_last_page() -> None:
    store, ids = Store(), tuple(range(70))
    assert store.address(ids) == ""
    store.put(ids)
    assert store.address(ids) == store.match(ids).nodes[-1].key.hex()
    assert store.stored_tokens(ids) == 70


def turn(owner: str, *readers: str, name: str = "agent", **fields: object) -> Turn:
    access = Access((owner,), frozenset({owner, *readers}), "they are not shared with it")
    return Turn(Member(name, name), "", (TASK,), Sampling(max_tokens=20), access=access, **fields)


def test_an_isolated_agent_reads_its_own_pages_and_the_report_says_what_others_have() -> None:
    host = ScriptedHost(lambda _: "the answer", engine=_ENGINE)
    answers = [host.submit(turn(owner)).result() for owner in ("a", "b", "b")]
    assert [a.report.reused_tokens > 0 for a in answers] == [False, False, True]
    assert answers[0].handle == answers[1].handle != "", "equal tokens have equal addresses"
    told = Turn(Member("c", "c"), "", (TASK, Message("assistant", "the answer", "agent")), access=turn("c").access)
    late = host.submit(told).result()
    assert late.report.reused_tokens == 0 and "not shared with it" in late.report.reasons[0]
    assert host.submit(turn("d", "a")).result().report.reused_tokens > 0
    host.assert_exact()


def test_a_view_shows_some_members_and_their_handoffs_only() -> None:
    members = {n: Member(n, n, f"You are {n}.") for n in ("coder", "critic", "tester")}
    messages = [TASK, Message("assistant", "CODE", "coder"), Message("user", "BAD", "critic")]
    view = View(
        "relay", frozenset({"coder", "tester"}), {("coder", "tester"): "Test it.", ("tester", "coder"): "Fix it."}
    )
    prompt = lay_out(messages, members["tester"], members, template=_ENGINE.template, ledger=Ledger(), view=view)
    text = _ENGINE.template.encoder.decode(prompt.ids)
    assert "[coder] You are coder." in text and "You are critic." not in text and "[critic]" not in text
    assert (
        text.rstrip().endswith("critic: BAD\n\n[tester] You are tester. Test it.\nassistant") and "Fix it." not in text
    )


def test_an_edited_call_is_another_answer() -> None:
    call = ToolCall("call_1", "add", '{"a": 1, "b": 2}')
    same, edited = ToolCall("call_1", "add", '{"b":2,"a":1}'), ToolCall("call_1", "add", '{"a": 1, "b": 3}')
    assert ledger_key("", [call]) == ledger_key("", [same]) != ledger_key("", [edited])
    assert len({ledger_key("x", [call]), ledger_key("", [call]), ledger_key("y", [call])}) == 3
    assert ledger_key("text", []) == "text"
    assert ledger_key("", [ToolCall("i", "f", "not json")]) == "\0i\0f\0not json"


def test_the_ledger_knows_authors_and_forgets_them_with_the_text() -> None:
    ledger = Ledger(capacity_tokens=4)
    ledger.record("hi", (1, 2), "s", "a")
    ledger.record("hi", (1, 2), "s", "b")
    assert ledger.authors("hi") == {("s", "a"), ("s", "b")}
    ledger.record("longer", (1, 2, 3))
    assert ledger.authors("hi") == frozenset() and ledger.find("hi") is None


def test_scopes_that_learnt_nothing_for_longest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_KEPT_SCOPES", 3)
    roster = Roster()
    for scope in ("a", "b", "a", "c", "d"):
        roster.learn(scope, "x", "text")
    assert not roster.members("b") and all(roster.members(scope) for scope in "acd")


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_whoever_reads_whatever_the_right_ids_meet_the_right_kv(data: st.DataObject) -> None:
    """Members with random rights and views, in either layout, edit and forget: the scripted host checks every turn's
    logits against one forward, and nobody reads more than its owners had."""
    host = ScriptedHost(lambda prompt: f"Answer {len(prompt)} to what was asked here.", engine=_ENGINE)
    messages, had = [TASK], dict[str, list[Ids]]()
    for _ in range(data.draw(st.integers(2, 6))):
        name = data.draw(st.sampled_from("abc"))
        readers = frozenset({name, *data.draw(st.sets(st.sampled_from("abc")))})
        layout = data.draw(st.sampled_from(["relay", "stock"]))
        view = View(layout, frozenset({name, *data.draw(st.sets(st.sampled_from("abc")))}), {("a", "b"): "Mind a."})
        member = host.roster.learn("", name, f"You are {name}, and you say what {name} says.")
        turn = Turn(member, "", tuple(messages), Sampling(max_tokens=30), view=view, access=Access((name,), readers))
        answer = host.submit(turn).result()
        ids = host.prompts[-1].ids
        most = max((agreement(ids, run) for reader in readers for run in had.get(reader, [])), default=0)
        assert answer.report.reused_tokens <= most
        had.setdefault(name, []).append((*ids, *host.engine.template.encoder.text(answer.text)))
        messages.append(Message(data.draw(st.sampled_from(["user", "assistant"])), answer.text, name))
        if len(messages) > 2 and data.draw(st.booleans()):
            messages.pop(data.draw(st.integers(0, len(messages) - 1)))
    host.assert_exact()
    host._worker.shutdown()
