"""What an agent was told stands in every cue: as far as it is to be repeated, and whole where it is the first."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_transcript import CHATML, CODE, CODER, FAMILIES, TASK, TEMPLATES, TEST, TESTER, said, turns, user

from qkvshare_agents.cue import repeated
from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.ledger import Ledger, Member
from qkvshare_agents.settings import HostSettings
from qkvshare_agents.transcript import Message, Prompt, View, lay_out

LONG = "You review Python. Name one fault.\nSay nothing of style. " + "Be kind to the author at all times. " * 30
CRITIC = Member("critic", "critic", LONG.strip())
ROUND = [user(TASK), said("coder", CODE), said("tester", TEST), said("critic", "None."), said("coder", CODE)]
MEMBERS = {member.name: member for member in (CODER, TESTER, CRITIC)}


def lay(name: str, *messages: Message, tokens: int = 96, template: str = "chatml", view: View | None = None) -> Prompt:
    options = {"template": TEMPLATES[template], "ledger": Ledger(), "view": view}
    return lay_out(messages, MEMBERS[name], MEMBERS, repeat_instruction_tokens=tokens, **options)


def cues(prompt: Prompt) -> list[str]:
    text = CHATML.encoder.decode(prompt.ids, keep_special=True)
    return [turn.split("\n\n")[-1] for turn in turns(text)]


def as_seen_by(name: str, messages: list[Message]) -> list[Message]:
    """Frameworks show an agent the others' answers as the user's."""
    return [replace(m, role="user") if m.source in MEMBERS and m.source != name else m for m in messages]


def test_every_cue_carries_the_instruction() -> None:
    said_so_far = [*ROUND, *ROUND[2:]]
    coder, tester, critic = (f"[{m.label}] {m.instruction}" for m in (CODER, TESTER, CRITIC))
    later = f"[critic] {repeated(LONG, 96, CHATML.encoder)}"
    assert cues(lay("tester", *said_so_far)) == [coder, tester, critic, coder, tester, later, coder, tester]


def test_none_repeats_the_name_only() -> None:
    told = [f"[{m.label}] {m.instruction}" for m in (CODER, TESTER, CRITIC)]
    assert cues(lay("tester", *ROUND, tokens=0)) == [*told, "[coder]", "[tester]"]


@pytest.mark.parametrize("view", [None, View(), View("relay", frozenset(MEMBERS), {("coder", "tester"): "Be strict."})])
@pytest.mark.parametrize("tokens", [0, 5, 96, 10_000])
def test_all_viewers_get_the_same_prompt(tokens: int, view: View | None) -> None:
    prompts = {name: lay(name, *as_seen_by(name, ROUND), tokens=tokens, view=view) for name in MEMBERS}
    settled = prompts["coder"].settled
    assert len({(p.settled, p.ids[:settled]) for p in prompts.values()}) == 1


def test_an_annotated_edge_repeats_both() -> None:
    view = View("relay", frozenset({"coder", "tester"}), {("coder", "tester"): "Be strict."})
    told = f"[tester] {TESTER.instruction} Be strict."
    found = cues(lay("tester", user(TASK), said("coder", CODE), said("tester", TEST), said("coder", CODE), view=view))
    assert [found[1], found[3]] == [told, told]


@pytest.mark.parametrize("dropped", range(len(ROUND)))
def test_the_first_cue_that_is_left_is_whole(dropped: int) -> None:
    """Where the messages behind an agent's first cue are not in the prompt, its next cue says everything."""
    found = cues(lay("critic", *ROUND[dropped:]))
    assert next(cue for cue in found if cue.startswith("[critic]")) == f"[critic] {CRITIC.instruction}"


def test_a_long_instruction_ends_with_a_sentence() -> None:
    encoder = CHATML.encoder
    first = len(encoder.text("You review Python."))
    second = len(encoder.text("You review Python. Name one fault."))
    assert repeated(LONG, first, encoder) == repeated(LONG, second - 1, encoder) == "You review Python."
    assert repeated(LONG, second, encoder) == "You review Python. Name one fault."
    assert repeated(LONG, first - 1, encoder).split() == "You review Python.".split()[:2], (
        "words, when no sentence fits"
    )
    assert repeated("一つ目。二つ目。", len(encoder.text("一つ目。")), encoder) == "一つ目。"


@settings(deadline=None, max_examples=100)
@given(st.text(st.sampled_from("ab .!?\n。é"), max_size=60), st.integers(0, 40), st.sampled_from(sorted(FAMILIES)))
def test_what_is_repeated_is_a_beginning_that_fits(text: str, tokens: int, family: str) -> None:
    encoder = TEMPLATES[family].encoder
    found = repeated(text, tokens, encoder)
    assert text.startswith(found) and len(encoder.text(found)) <= tokens
    assert found == text or len(encoder.text(text)) > tokens
    assert found == repeated(text, tokens, encoder)


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="repeat_instruction_tokens must not be negative: -1"):
        HostSettings("m", repeat_instruction_tokens=-1)
