"""What every team really sends, laid out: one agent's prompt and answer begin the next one's prompt."""

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, permutations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from templates import FAMILIES, tokenizer

from qkvshare_agents.errors import InvalidMessage
from qkvshare_agents.ids import Ids
from qkvshare_agents.prompt.chat_template import Template
from qkvshare_agents.prompt.cue import quoted
from qkvshare_agents.prompt.layout import LAYOUTS, NO_RESULT, Message, Prompt, answered, lay_out, ledger_key
from qkvshare_agents.prompt.ledger import Ledger
from qkvshare_agents.prompt.members import Member, Members
from qkvshare_agents.prompt.tool_calls import ToolCall, result_text

TEMPLATES = {name: Template(tokenizer(name)) for name in FAMILIES}
CHATML, QWEN = TEMPLATES["chatml"], TEMPLATES["qwen3"]


def tool(name: str) -> dict:
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": {}}}


CODER = Member("coder", "coder", "You write Python.")
TESTER = Member("tester", "tester", "You write tests.")
BOSS = Member("boss", "boss")
TASK, CODE, TEST, CODE2 = "Add two numbers.", "def add(a, b): return a + b", "assert add(1, 2) == 3", "def add(*n): ..."


def user(text: str, source: str = "user") -> Message:
    return Message("user", text, source)


def said(source: str, text: str = "", *calls: ToolCall) -> Message:
    return Message("assistant", text, source, calls)


def result(call: ToolCall, text: str) -> Message:
    return Message("tool", text, call_id=call.id, tool=call.name)


class Team:
    """Members, what they generated, and the prompts they got."""

    def __init__(self, *members: Member, template: Template = CHATML, layout: str = "relay") -> None:
        self.members = {member.name: member for member in members}
        self.template, self.layout, self.ledger = template, layout, Ledger()

    def prompt(self, name: str, *messages: Message) -> Prompt:
        speaker = self.members.get(name) or Member(name, name)
        settings = {"template": self.template, "ledger": self.ledger, "layout": self.layout}
        return lay_out(messages, speaker, self.members, **settings)

    def answer(self, name: str, *messages: Message, text: str = "", calls: Sequence[ToolCall] = ()) -> Ids:
        """Ids of a prompt and of what was generated behind it, in other tokens than an encoder's."""
        prompt = self.prompt(name, *messages)
        generated = spell(self.template, text or "".join(call.name for call in calls))
        self.ledger.record(ledger_key(text, calls), generated)
        return prompt.ids + generated

    def text(self, name: str, *messages: Message) -> str:
        return self.template.encoder.decode(self.prompt(name, *messages).ids, keep_special=True)


def spell(template: Template, text: str) -> Ids:
    return sum((template.encoder.text(letter) for letter in text), ())


def continues(longer: Prompt | Ids, shorter: Ids) -> bool:
    ids = longer.ids if isinstance(longer, Prompt) else longer
    return ids[: len(shorter)] == shorter


def shared(a: Prompt, b: Prompt) -> int:
    return next((i for i, (x, y) in enumerate(zip(a.ids, b.ids, strict=False)) if x != y), min(len(a.ids), len(b.ids)))


def roles(text: str) -> list[str]:
    return [part.split("\n", 1)[0] for part in text.split("<|im_start|>")[1:]]


def turns(text: str) -> list[str]:
    """What stands in each user turn of a ChatML prompt."""
    return [p.split("<|im_end|>")[0] for p in text.split("<|im_start|>user\n")[1:]]


def test_the_exact_text_of_a_relay() -> None:
    team = Team(CODER, TESTER)
    text = team.text("coder", user(TASK), said("coder", CODE), user(TEST, "tester"), user("Faster!"))
    assert turns(text) == [
        "Add two numbers.\n\n[coder] You write Python.",
        "[tester] You write tests.",
        "Faster!\n\n[coder] You write Python.",
    ]
    assert roles(text) == ["system", "user", "assistant", "user", "assistant", "user", "assistant"]


def test_round_robin_for_both_viewers() -> None:
    team = Team(CODER, TESTER)
    first = team.answer("coder", user(TASK), text=CODE)
    second = team.answer("tester", user(TASK), user(CODE, "coder"), text=TEST)
    third = team.answer("coder", user(TASK), said("coder", CODE), user(TEST, "tester"), text=CODE2)
    fourth = team.prompt("tester", user(TASK), user(CODE, "coder"), said("tester", TEST), user(CODE2, "coder"))
    assert continues(second, first) and continues(third, second) and continues(fourth, third)
    assert fourth.settled == len(third)


def test_round_robin_stock_reuses_an_agents_own_prefix() -> None:
    team = Team(CODER, TESTER, layout="stock")
    first = team.answer("coder", user(TASK), text=CODE)
    other = team.prompt("tester", user(TASK), user(CODE, "coder"))
    third = team.prompt("coder", user(TASK), said("coder", CODE), user(TEST, "tester"))
    assert continues(third, first) and third.settled == len(first)
    assert not continues(other, first[:20])
    assert turns(team.text("tester", user(TASK), user(CODE, "coder"))) == [f"{TASK}\n\ncoder: {CODE}"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_selector_manager_and_its_retries(layout: str) -> None:
    """One user message with the history in it; a lone caller without an instruction is not given a name."""
    team = Team(CODER, TESTER, BOSS, layout=layout)
    asked = user("Roles: coder, tester.\ncoder: def add\n\n\nRead the above and select the next role.")
    first = team.answer("boss", asked, text="nobody")
    retry = (asked, said("boss", "nobody"), user("No such role, choose again."))
    assert continues(team.prompt("boss", *retry), first)
    assert turns(team.text("boss", *retry)) == [asked.text, "No such role, choose again."]


def test_swarm_handoff_context() -> None:
    """The target sees the sender's calls as the sender's own assistant message."""
    call = ToolCall("c1", "look_up", '{"x": 1}')
    coder = replace(CODER, tools=(tool("look_up"), tool("transfer_to_tester")))
    team = Team(coder, TESTER, template=QWEN)
    called = team.answer("coder", user(TASK), calls=[call])
    context = (user(TASK), said("coder", "", call), result(call, "It is 7."))
    both = team.prompt("tester", *context, user("Transferred to tester.", "coder"))
    assert continues(both, called)
    own = team.prompt("coder", *context)  # the sender goes on: results in the template's own form
    assert continues(own, called) and continues(both, own.ids)
    assert "<tool_response>\nIt is 7.\n</tool_response>" in QWEN.encoder.decode(both.ids)
    handed = team.prompt("tester", *context)  # no word from the sender behind the result: it is text before the cue
    assert continues(handed, called) and "[tester] You write tests." in QWEN.encoder.decode(handed.ids)


def test_swarm_two_messages_of_one_speaker() -> None:
    team = Team(CODER, TESTER)
    text = team.text("coder", user(TASK), user(TEST, "tester"), user("Transferred to coder.", "tester"))
    told = f"[tester] {TESTER.instruction}"
    assert turns(text) == [f"{TASK}\n\n{told}", told, f"[coder] {CODER.instruction}"]
    assert roles(text)[1:] == ["user", "assistant"] * 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_magentic_one_prompts_itself(layout: str) -> None:
    """Facts and plan: an orchestrator's prompts come as user messages of its own."""
    team = Team(CODER, BOSS, layout=layout)
    facts = team.answer("boss", user("List the facts.", "boss"), text="No facts.")
    plan = (user("List the facts.", "boss"), said("boss", "No facts."), user("Now a plan.", "boss"))
    assert continues(team.prompt("boss", *plan), facts)
    assert turns(team.text("boss", *plan)) == ["List the facts.", "Now a plan."]


def test_magentic_one_ledger_calls() -> None:
    team = Team(CODER, BOSS)
    seen = (said("boss", "Facts and plan."), said("boss", "Coder, begin."))
    coder = team.answer("coder", user(seen[0].text, "boss"), user(seen[1].text, "boss"), text=CODE)
    ask = user("Is the request satisfied? Answer in JSON.", "boss")
    ledger = team.prompt("boss", *seen, user(CODE, "coder"), ask)
    assert continues(ledger, coder)
    text = team.text("boss", *seen, user(CODE, "coder"), ask)
    assert roles(text)[1:] == ["user", "assistant"] * 4
    assert turns(text) == ["[boss]", "[boss]", "[coder] You write Python.", f"{ask.text}\n\n[boss]"]
    next_round = team.prompt("boss", *seen, user(CODE, "coder"), said("boss", "Coder, go on."), ask)
    assert continues(next_round, coder), "the ledger prompt is not kept and must not cost what is before it"


def test_society_of_mind() -> None:
    """Inner agents are no members of the outer team: their words are named text."""
    inner = Team(CODER, TESTER)
    first = inner.answer("coder", user("Earlier messages.", "society"), user(TASK), text=CODE)
    seen = (user("Earlier messages.", "society"), user(TASK), user(CODE, "coder"))
    assert continues(inner.prompt("tester", *seen), first)
    outer = Team(Member("society", "society"))
    said_inside = (user(CODE, "coder"), user(TEST, "tester"))
    text = outer.text("society", user("Given this task:"), *said_inside, user("Summarise."))
    assert turns(text) == [f"Given this task:\n\ncoder: {CODE}\n\ntester: {TEST}\n\nSummarise."]


def test_graph_flow_fan_out() -> None:
    left, right, last = (Member(n, n, f"You are {n}.") for n in ("left", "right", "last"))
    team = Team(CODER, left, right, last)
    coder = team.answer("coder", user(TASK), text=CODE)
    context = (user(TASK), user(CODE, "coder"))
    lefts, rights = (team.answer(n, *context, text=f"I am {n}.") for n in ("left", "right"))
    assert continues(lefts, coder) and continues(rights, coder)
    joined = team.prompt("last", *context, user("I am right.", "right"), user("I am left.", "left"))
    assert continues(joined, rights)
    again = team.prompt("left", *context, said("left", "I am left."), user("I am right.", "right"))
    assert continues(again, lefts), "own answers first, whatever came first for others"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["chatml", "qwen3", "mistral3"])
def test_tool_calls_and_reflection(layout: str, name: str) -> None:
    call = ToolCall("call_123456789", "look_up", "{}")
    coder = replace(CODER, tools=(tool("look_up"),))
    team = Team(coder, TESTER, template=TEMPLATES[name], layout=layout)
    calling = team.answer("coder", user(TASK), calls=[call])
    private = (user(TASK), said("coder", "", call), result(call, "It is 7."))
    reflecting = team.answer("coder", *private, text="Seven.")
    assert continues(reflecting, calling)
    assert continues(team.prompt("coder", *private, said("coder", "Seven."), user(TEST, "tester")), reflecting)
    # another viewer sees the answer only
    other = team.prompt("tester", user(TASK), user("Seven.", "coder"))
    assert "It is 7." not in team.template.encoder.decode(other.ids)
    if layout == "relay":
        assert shared(other, team.prompt("coder", user(TASK))) == len(team.prompt("coder", user(TASK)).ids)
    # without reflection the summary is in the others' lists only
    team.prompt("coder", *private, user(TEST, "tester"))


A, B, C = (ToolCall(name, "price", json.dumps({"item": name})) for name in "abc")


def results_of(*calls: ToolCall) -> list[Message]:
    return [result(call, f"It is {call.id}.") for call in calls]


def told(template: Template, layout: str, *messages: Message) -> list[str]:
    """The results in a prompt, in order."""
    text = Team(replace(CODER, tools=(tool("price"),)), template=template, layout=layout).text("coder", *messages)
    return re.findall(r"It is (\w)\.|(\(no result\))", text)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["chatml", "qwen3", "mistral3", "llama31"])
def test_results_stand_in_the_order_of_their_calls(layout: str, name: str) -> None:
    """Ids are not shown by most templates: then order alone says which result belongs to which call."""
    asked = [user(TASK), said("coder", "", A, B, C)]
    laid_out = {order: told(TEMPLATES[name], layout, *asked, *results_of(*order)) for order in permutations((A, B, C))}
    assert set(map(tuple, laid_out.values())) == {(("a", ""), ("b", ""), ("c", ""))}
    both = [*asked[:1], said("coder", "", A), said("coder", "", B, C), *results_of(C, A, B)]
    assert [a for a, _ in told(TEMPLATES[name], layout, *both)] == ["a", "b", "c"], "two answers, then their results"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["chatml", "qwen3", "mistral3"])
def test_a_call_without_a_result_leaves_the_others_in_their_places(layout: str, name: str) -> None:
    asked, template = [user(TASK), said("coder", "", A, B, C)], TEMPLATES[name]
    assert told(template, layout, *asked, *results_of(C, A)) == [("a", ""), ("", NO_RESULT), ("c", "")]
    assert told(template, layout, *asked, user("Never mind.")) == [], "the question stands where results would"
    late = [*asked, *results_of(B), user("Well?"), *results_of(C, A), said("coder", "So."), user("More.")]
    assert [a or "-" for a, _ in told(template, layout, *late)] == ["-", "b", "-", "a", "c"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_result_without_a_call_is_text_behind_the_others(layout: str) -> None:
    stray = Message("tool", "It is z.", call_id="z", tool="other")
    messages = [user(TASK), said("coder", "", A, B), stray, *results_of(B, A)]
    assert [a for a, _ in told(QWEN, layout, *messages)] == ["a", "b", "z"]
    assert [a for a, _ in told(QWEN, layout, user(TASK), stray)] == ["z"]
    same = [replace(call, id="") for call in (A, replace(B, name="weight"))]  # ids that nobody gave
    unnamed = [replace(r, call_id="", tool=c.name) for r, c in zip(results_of(B, A), same[::-1], strict=True)]
    assert [a for a, _ in told(QWEN, layout, user(TASK), said("coder", "", *same), *unnamed)] == ["a", "b"]


@pytest.mark.parametrize("template", [CHATML, QWEN], ids=["as text", "native"])
def test_one_header_for_all_members(template: Template) -> None:
    b, a = tool("b"), tool("a")
    respelt = {"function": {"parameters": {}, "description": "Does b.", "name": "b"}, "type": "function"}
    coder, tester = replace(CODER, tools=(b, a)), replace(TESTER, tools=(respelt,))
    orders: list[Members] = [{"coder": coder, "tester": tester}, {"tester": tester, "coder": coder}]
    prompts = {
        lay_out([user(TASK), said("coder", CODE)], speaker, members, template=template, ledger=Ledger()).ids[:60]
        for speaker in (coder, tester)
        for members in orders
    }
    assert len(prompts) == 1
    text = template.encoder.decode(Team(coder, tester, template=template).prompt("coder", user(TASK)).ids)
    assert text.index("Does a.") < text.index("Does b.") and text.count("Does b.") == 1


def test_memory_adds_system_messages_in_the_middle() -> None:
    team = Team(CODER)
    memory = Message("system", "Relevant memory: the user likes short answers.")
    first = team.answer("coder", user(TASK), memory, text=CODE)
    again = (user(TASK), memory, said("coder", CODE), user("And subtract."), memory)
    assert continues(team.prompt("coder", *again), first)
    assert turns(team.text("coder", *again))[1] == f"And subtract.\n\n{memory.text}\n\n[coder] {CODER.instruction}"


def test_contexts_that_drop_messages() -> None:
    """A shorter match, never an error: Buffered drops the head, TokenLimited the middle."""
    team = Team(CODER, TESTER)
    whole = [user(TASK), said("coder", CODE), user(TEST, "tester"), said("coder", CODE2), user("More.", "tester")]
    full = team.prompt("coder", *whole)
    middle = team.prompt("coder", *whole[:3], *whole[4:])
    skipped = team.prompt("coder", *whole[:2], user("Skipped 2 messages.", "System"), whole[4])
    head = team.prompt("coder", *whole[1:])
    assert shared(full, middle) >= team.prompt("coder", *whole[:3]).settled
    assert shared(full, skipped) >= team.prompt("coder", *whole[:2]).settled
    assert shared(full, head) >= len(CHATML.encoder.text("Several agents work on this conversation in turn."))


def test_messages_repeated_after_a_cancelled_call() -> None:
    team = Team(CODER)
    once = team.prompt("coder", user("Hello."))
    twice = team.prompt("coder", user("Hello."), user("Hello."), user("Second."))
    assert shared(once, twice) > len(CHATML.head("x"))


def test_own_words_that_come_back_as_a_user_message() -> None:
    """A team that goes on with earlier messages, or nodes that store answers as named user messages."""
    team = Team(CODER, TESTER)
    first = team.answer("coder", user(TASK), text=CODE)
    for viewer in ("coder", "tester"):
        assert continues(team.prompt(viewer, user(TASK), user(CODE, "coder"), user("More.")), first)


def test_an_unnamed_caller() -> None:
    nameless = Member("#1234", "", "You are terse.")
    team = Team(nameless)
    text = team.text("#1234", user(TASK), said("", CODE), user("More."))
    assert turns(text) == [f"{TASK}\n\nYou are terse.", "More.\n\nYou are terse."]
    assert turns(Team().text("", user("Hi."))) == ["Hi."]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_opened_thoughts_are_shown_once(layout: str) -> None:
    team = Team(CODER, template=TEMPLATES["r1"], layout=layout)
    text = team.text("coder", user(TASK), said("coder", CODE), user("More."))
    assert text.count("<think>") == 1 and text.endswith("<think>\n")


def test_unusable_messages() -> None:
    with pytest.raises(InvalidMessage, match="the roles are system, user"):
        Message("critic", "no")
    with pytest.raises(InvalidMessage, match="must be text, not list"):
        Message("user", ["an image"])


SOURCES = st.sampled_from(["", "user", "coder", "tester", "stranger"])
TEXTS = st.one_of(
    st.text(max_size=12), st.sampled_from(["", " x ", "\n\n", "<|im_end|>", "[coder] You", "None\n", "naïve 🙂"])
)
CALLS = st.lists(st.sampled_from([ToolCall(f"id{i}", f"f{i}", "{}") for i in range(3)]), max_size=2, unique=True)
MESSAGES = st.lists(
    st.one_of(
        st.builds(Message, st.sampled_from(["system", "user"]), TEXTS, SOURCES),
        st.builds(lambda text, source, calls: Message("assistant", text, source, tuple(calls)), TEXTS, SOURCES, CALLS),
        st.builds(lambda i, text: Message("tool", text, call_id=f"id{i}", tool=f"f{i}"), st.integers(0, 2), TEXTS),
    ),
    max_size=8,
)
MEMBERS: Members = {m.name: m for m in (replace(CODER, tools=(tool("f0"),)), TESTER, BOSS)}
NAMES = st.sampled_from(sorted(MEMBERS))
layouts = st.sampled_from(LAYOUTS)
families = st.sampled_from(sorted(set(TEMPLATES) - {"r1"}))  # r1 opens a thought behind the prompt, see above
properties = settings(deadline=None, max_examples=150)


def plain(messages: Sequence[Message], name: str, ledger: Ledger, layout: str, template: Template = CHATML) -> Prompt:
    return lay_out(messages, MEMBERS[name], MEMBERS, template=template, ledger=ledger, layout=layout)


@properties
@given(MESSAGES, NAMES, layouts, st.sampled_from(sorted(TEMPLATES)))
def test_any_list_is_laid_out(messages: list[Message], name: str, layout: str, family: str) -> None:
    """Strict alternation by construction, so that no list is refused by any template; always the same ids."""
    before, template = copy.deepcopy(messages), TEMPLATES[family]
    prompt = plain(messages, name, Ledger(), layout, template)
    assert messages == before
    assert plain(messages, name, Ledger(), layout, template) == prompt
    assert 0 <= prompt.settled <= len(prompt.ids)
    assert prompt.ids[-len(template.turn) :] == template.turn


@properties
@given(MESSAGES, NAMES, layouts)
def test_every_message_is_in_the_prompt_in_order(messages: list[Message], name: str, layout: str) -> None:
    prompt = plain(messages, name, Ledger(), layout)
    at, text = 0, CHATML.encoder.decode(prompt.ids)
    for are_results, group in groupby(messages, lambda message: message.role == "tool"):
        ends = [at]  # results that stand together may change places
        for message in group:
            forms = (message.text, quoted(message.text, [*MEMBERS, message.source]))
            forms = tuple(result_text(message.tool, form) for form in forms) if are_results else forms
            expected = next((form for form in forms if form in text), forms[0])
            found = text.find(expected, at)
            assert found >= 0, f"{expected!r} is missing"
            ends.append(found + len(expected))
            at = at if are_results else ends[-1]
        at = max(ends)
    control = [i for i in prompt.ids if i in CHATML.encoder.control_ids]
    start, end = CHATML.encoder.markup("<|im_start|><|im_end|>")
    assert control == [start, end] * (len(control) // 2) + [start]
    found = roles(CHATML.encoder.decode(prompt.ids, keep_special=True))
    assert [r for r in found if r != "system"] == ["user", "assistant"] * (len(found) // 2)


@properties
@given(MESSAGES, NAMES, NAMES, TEXTS, CALLS, MESSAGES, layouts, families)
def test_whatever_follows_an_answer_continues_it(
    messages: list[Message],
    name: str,
    other: str,
    text: str,
    calls: list[ToolCall],
    further: list[Message],
    layout: str,
    family: str,
) -> None:
    """The speaker's own next prompt in both layouts; in the relay anybody's."""
    ledger, template = Ledger(), TEMPLATES[family]
    viewer = other if layout == "relay" else name
    answer = said(name, text, *calls)
    # A text that was said before by other tokens now reads as these: a shorter match.
    assume(answer.ledger_key not in {message.ledger_key for message in messages})
    if viewer != name:  # what an orchestrator prompts itself with is seen by no one else
        assume(not any(m.role == "user" and m.source in (name, viewer) for m in messages))
    prompt = plain(messages, name, ledger, layout, template)
    generated = spell(template, text or "-" * bool(calls))
    ledger.record(answer.ledger_key, generated)
    seen = answer if viewer == name or calls else user(text, name)
    assert continues(plain([*messages, seen, *further], viewer, ledger, layout, template), prompt.ids + generated)


@properties
@given(MESSAGES, st.data(), NAMES, layouts)
def test_an_edit_shortens_the_match_to_what_is_before_it(
    messages: list[Message], data: st.DataObject, name: str, layout: str
) -> None:
    """Drop, repeat or change a message: the prompts are equal up to the turn in which it stood."""
    assume(messages)
    at = data.draw(st.integers(0, len(messages) - 1))
    edits = [[], [messages[at]] * 2, [replace(messages[at], text=messages[at].text + "!")]]
    edited = [*messages[:at], *data.draw(st.sampled_from(edits)), *messages[at + 1 :]]
    ledger = Ledger()
    before, after = plain(messages, name, ledger, layout), plain(edited, name, ledger, layout)
    kept = plain(messages[:at], name, ledger, layout)
    assert shared(before, after) >= kept.settled


def test_the_ids_of_an_answer_are_the_generated_ones() -> None:
    ledger, odd = Ledger(), spell(CHATML, CODE)
    assert odd != CHATML.encoder.text(CODE)
    ledger.record(CODE, odd)
    ids = lay_out([user(TASK), said("coder", CODE)], CODER, {}, template=CHATML, ledger=ledger).ids
    assert any(ids[i : i + len(odd)] == odd for i in range(len(ids)))


def test_the_last_answerer_within_some_tokens() -> None:
    prompt = Prompt(tuple(range(100)), 80, ((30, "coder"), (60, "tester")))
    assert [prompt.last_answerer(t) for t in (0, 28, 29, 58, 59, 100)] == ["", "", "coder", "coder", "tester", "tester"]


@pytest.mark.parametrize("generated", [True, False], ids=["generated", "written"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_prompt_and_its_answer_begin_every_later_prompt(template: Template, layout: str, generated: bool) -> None:
    ledger, members = Ledger(), {"coder": CODER, "tester": TESTER}
    options = {"template": template, "ledger": ledger, "layout": layout}
    messages = [user(TASK), said("coder", CODE), said("tester", TEST)]
    answer = said("coder", CODE2)
    if generated:
        ledger.record(answer.ledger_key, [*template.answer("def "), *template.answer("add(*n): ...")])
    short = answered(lay_out(messages, CODER, members, **options), answer, template, ledger)
    longer = lay_out([*messages, answer, user("And now?")], CODER, members, **options)
    assert longer.ids[: len(short.ids)] == short.ids
    assert short.answers == longer.answers and short.header == longer.header and short.settled == len(short.ids)
