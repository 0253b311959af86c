"""Ids are kept verbatim within a capacity; callers are told apart by what a framework lets through."""

import threading

import pytest

from qkvshare_agents.prompt.ledger import Ledger
from qkvshare_agents.prompt.members import Member, Roster, hash_name

CODER, TESTER, REVIEWER = "You write Python.", "You write tests.", "You review."
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {}}}


def test_the_ledger_keeps_ids_verbatim() -> None:
    ledger = Ledger()
    ids = [5, 4, 3]
    ledger.record("an answer", ids)
    ids.append(2)
    assert ledger.find("an answer") == (5, 4, 3)
    assert ledger.find("An answer") is None


def test_no_scope_spells_for_another() -> None:
    ledger = Ledger()
    ledger.record("yes", [1], "one", "a")
    ledger.record("yes", [2, 3], "two", "b")
    assert (ledger.find("yes", "one"), ledger.find("yes", "two"), ledger.find("yes")) == ((1,), (2, 3), None)
    assert ledger.within("one").find("yes") == (1,) and ledger.within("three").find("yes") is None
    assert ledger.authors("yes") == {("one", "a"), ("two", "b")}


def test_what_one_scope_forgets_another_keeps() -> None:
    ledger = Ledger(capacity_tokens=4)
    ledger.record("yes", [1, 2], "one", "a")
    ledger.record("yes", [3, 4], "two", "b")
    ledger.record("no", [5], "two", "b")
    assert (ledger.find("yes", "one"), ledger.find("yes", "two")) == (None, (3, 4))
    assert ledger.authors("yes") == {("two", "b")}


def test_the_newest_ids_of_a_text_count() -> None:
    ledger = Ledger(capacity_tokens=5)
    ledger.record("a", [1, 2, 3])
    ledger.record("a", [4, 5])
    ledger.record("b", [6, 7, 8])
    assert (ledger.find("a"), ledger.find("b")) == ((4, 5), (6, 7, 8)), "replaced ids must not count any more"


def test_empty_texts_and_ids_are_not_recorded() -> None:
    ledger = Ledger()
    ledger.record("", [1])
    ledger.record("a", [])
    assert ledger.find("") is None and ledger.find("a") is None


def test_the_least_recently_used_go_first() -> None:
    ledger = Ledger(capacity_tokens=30)
    for key in "abc":
        ledger.record(key, [0] * 10)
    ledger.find("a")
    ledger.record("d", [0] * 10)
    assert [key for key in "abcd" if ledger.find(key)] == ["a", "c", "d"]
    ledger.record("e", [0] * 15)
    assert [key for key in "acde" if ledger.find(key)] == ["d", "e"]


def test_an_answer_beyond_the_capacity_is_kept_alone() -> None:
    ledger = Ledger(capacity_tokens=10)
    ledger.record("a", [0])
    ledger.record("long", [0] * 100)
    assert ledger.find("a") is None and ledger.find("long") == (0,) * 100
    ledger.record("b", [0])
    assert ledger.find("long") is None and ledger.find("b") == (0,)


def test_threads_may_record_and_find_at_once() -> None:
    ledger, wrong = Ledger(capacity_tokens=200), []

    def work(offset: int) -> None:
        for step in range(300):
            key = str((step + offset) % 40)
            ledger.record(key, [int(key)] * 10)
            wrong.extend(ids for ids in [ledger.find(key)] if ids not in (None, (int(key),) * 10))

    threads = [threading.Thread(target=work, args=(7 * index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not wrong
    assert ledger._tokens == sum(map(len, ledger._entries.values())) <= 200


def roster(*members: tuple[str, str], scope: str = "team") -> Roster:
    known = Roster()
    for name, instruction in members:
        known.learn(scope, name, instruction)
    return known


def test_learning_makes_and_updates_a_member() -> None:
    known = Roster()
    assert known.learn("team", "coder", CODER) == Member("coder", "coder", CODER)
    assert known.learn("team", "coder", TESTER, [TOOL]) == Member("coder", "coder", TESTER, (TOOL,))
    assert dict(known.members("team")) == {"coder": Member("coder", "coder", TESTER, (TOOL,))}


def test_a_call_without_tools_or_instruction_takes_nothing_away() -> None:
    known = Roster()
    known.learn("team", "coder", CODER, [TOOL])
    assert known.learn("team", "coder", CODER, []).tools == (TOOL,)
    assert known.learn("team", "coder", None).instruction == CODER
    assert known.learn("team", "coder", "").instruction == "", "an empty instruction is one"


def test_a_label_stays_as_it_was_first() -> None:
    known = Roster()
    assert known.learn("team", "#1", CODER, named=False).label == ""
    assert known.learn("team", "#1", CODER, named=True).label == ""
    assert known.learn("team", "coder", CODER).label == "coder"


def test_scopes_are_apart() -> None:
    known = roster(("coder", CODER))
    assert known.members("other team") == {}
    known.learn("other team", "coder", TESTER)
    assert known.members("team")["coder"].instruction == CODER


def test_a_snapshot_of_members_does_not_change() -> None:
    known = roster(("coder", CODER))
    before = known.members("team")
    known.learn("team", "tester", TESTER)
    assert list(before) == ["coder"] and list(known.members("team")) == ["coder", "tester"]
    with pytest.raises(TypeError):
        before["x"] = Member("x", "x")  # type: ignore[index]


def test_who_is_told_is_believed() -> None:
    known = roster(("coder", CODER), ("tester", TESTER))
    assert known.identify("team", CODER, told="tester", running="coder", last="coder") == ("tester", True)


def test_the_running_agent_is_met_for_the_first_time() -> None:
    """Whoever spoke last: after a handoff that is another member."""
    known = roster(("coder", CODER))
    assert known.identify("team", TESTER, running="tester") == ("tester", True)
    assert known.identify("team", TESTER, running="tester", last="coder") == ("tester", True)
    assert known.identify("team", CODER, running="clone", last="coder") == ("clone", True)


def test_a_swarm_member_is_itself_though_another_member_spoke_last() -> None:
    known = roster(("coder", CODER), ("tester", TESTER))
    assert known.identify("team", TESTER, running="tester", last="coder") == ("tester", True)


def test_a_member_may_change_its_instruction() -> None:
    known = roster(("coder", CODER))
    assert known.identify("team", "You write Rust.", running="coder", last="coder") == ("coder", True)
    known.learn("team", "tester", TESTER)
    assert known.identify("team", TESTER, running="coder", last="coder") == ("coder", True), "even to another's"


def test_an_agent_used_as_a_tool_is_not_the_agent_that_runs() -> None:
    known = roster(("outer", CODER))
    nameless = (f"#{hash_name(TESTER)}", False)
    assert known.identify("team", TESTER, running="outer") == nameless, "its first call, before it said anything"
    known.learn("team", nameless[0], TESTER, named=False)
    assert known.identify("team", TESTER, running="outer") == (nameless[0], True)
    assert known.identify("team", TESTER, running="outer", last="inner") == ("inner", True)
    assert known.identify("team", CODER, running="outer", last="outer") == ("outer", True)
    assert known.identify("team", CODER, running="outer") == ("outer", True)


def test_an_agent_used_as_a_tool_is_known_by_its_instruction() -> None:
    known = roster(("outer", CODER), ("inner", TESTER))
    assert known.identify("team", TESTER, running="outer") == ("inner", True)
    assert known.identify("team", TESTER, running="outer", last="inner") == ("inner", True)
    assert known.identify("team", TESTER, running="outer", last="other") == ("other", True), "a clone of it"


def test_without_a_runtime_the_newest_assistant_message_names_the_caller() -> None:
    assert Roster().identify("team", CODER, last="coder") == ("coder", True)
    assert roster(("coder", CODER)).identify("team", "You write Rust.", last="coder") == ("coder", True)


def test_without_a_runtime_a_handoff_is_seen_by_the_instruction() -> None:
    """Another member's message came along; the instruction is that of a third one who is known."""
    known = roster(("coder", CODER), ("tester", TESTER))
    assert known.identify("team", TESTER, last="coder") == ("tester", True)
    assert known.identify("team", CODER, last="coder") == ("coder", True)
    assert known.identify("team", REVIEWER, last="coder") == ("coder", True)


def test_with_nothing_but_an_instruction_it_decides() -> None:
    known = roster(("coder", CODER), ("tester", TESTER))
    assert known.identify("team", TESTER) == ("tester", True)
    assert known.identify("team", REVIEWER) == (f"#{hash_name(REVIEWER)}", False)
    assert known.identify("other team", TESTER) == (f"#{hash_name(TESTER)}", False)


def test_an_empty_instruction_names_nobody() -> None:
    known = roster(("a", ""), ("b", CODER))
    assert known.identify("team", "") == (f"#{hash_name('')}", False)


def test_clones_are_told_apart_by_what_they_said() -> None:
    known = roster(("first", CODER), ("second", CODER))
    assert known.identify("team", CODER) == (f"#{hash_name(CODER)}", False), "one of two: nobody"
    assert known.identify("team", CODER, last="second") == ("second", True)
    assert known.identify("team", CODER, running="second", last="first") == ("second", True)


def test_a_clone_of_the_running_agent_is_not_it() -> None:
    """One instruction for both, as frameworks have by default: their tools differ, or one of them said something."""
    known, nameless = Roster(), (f"#{hash_name(CODER)}", False)
    known.learn("team", "outer", CODER, [TOOL])
    assert known.identify("team", CODER, running="outer") == nameless
    assert known.identify("team", CODER, [TOOL], running="outer") == ("outer", True)
    assert known.identify("team", CODER, running="outer", last="outer") == ("outer", True)
    known.learn("team", "other", CODER)
    assert known.identify("team", CODER, running="outer") == nameless
    known.learn("team", "tester", TESTER)
    assert known.identify("team", CODER, last="tester") == nameless, "it handed off to one of two"


def test_tools_of_members_that_are_gone_are_forgotten() -> None:
    """Else everybody's header would hold them for good."""
    known = Roster()
    for name in ("old", "rare", "new"):
        known.learn("team", name, CODER, [TOOL])
    for call in range(200):
        known.learn("team", "new", CODER, [TOOL])
        if call % 50 == 0:
            known.learn("team", "rare", CODER, [TOOL])
    members = known.members("team")
    assert {name: bool(member.tools) for name, member in members.items()} == {"old": False, "rare": True, "new": True}
    assert known.learn("team", "old", CODER, [TOOL]).tools == (TOOL,), "it came back"


def test_a_nameless_agent_keeps_its_cues_when_its_name_comes_up() -> None:
    known = Roster()
    name, named = known.identify("team", CODER)
    known.learn("team", name, CODER, [TOOL], named=named)
    assert known.identify("team", CODER) == (name, True)
    assert known.identify("team", CODER, last="coder") == ("coder", True)
    assert dict(known.members("team")) == {"coder": Member("coder", "", CODER, (TOOL,))}


def test_a_nameless_agent_does_not_replace_a_member_of_that_name() -> None:
    known = roster(("coder", CODER))
    known.learn("team", f"#{hash_name(TESTER)}", TESTER, named=False)
    assert known.identify("team", TESTER, last="coder") == (f"#{hash_name(TESTER)}", True)
    assert known.members("team")["coder"] == Member("coder", "coder", CODER)


def test_a_name_comes_up_in_many_threads_at_once() -> None:
    for _ in range(30):
        known, errors, barrier = Roster(), [], threading.Barrier(4)
        known.learn("team", f"#{hash_name(CODER)}", CODER, named=False)

        def identify(known: Roster = known, errors: list = errors, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(timeout=10)
            try:
                assert known.identify("team", CODER, last="coder") == ("coder", True)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=identify) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=10)
        assert not errors


def test_names_made_from_instructions_are_stable_and_do_not_show_them() -> None:
    assert hash_name(CODER) == hash_name(CODER) != hash_name(TESTER)
    assert len(hash_name(CODER)) == 8 and "Python" not in hash_name(CODER)
