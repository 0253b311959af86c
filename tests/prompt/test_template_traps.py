"""What chat templates and tokenizers do that could part two prompts, or put KV under tokens it was not computed for.

Each runs whole turns: the scripted host compares the logits behind handed-over KV with one forward over the prompt.
"""

import datetime

import pytest
from scripted import ScriptedHost
from support import CHATML, SPECIAL, tiny_model, tiny_tokenizer
from templates import FAMILIES, tokenizer
from tokenizers import AddedToken, normalizers, processors

from qkvshare_agents.model.engine import Engine
from qkvshare_agents.prompt.chat_template import Template
from qkvshare_agents.prompt.layout import Message, lay_out
from qkvshare_agents.prompt.ledger import Ledger
from qkvshare_agents.prompt.members import Member
from qkvshare_agents.prompt.sampling import Sampling
from qkvshare_agents.turns.request import Turn

TASK = Message("user", "Name two colours, and then say something long enough that a page of the cache fills.", "user")
MODEL = tiny_model(vocab_size=1024)


def engine(made) -> Engine:
    return Engine.of(MODEL, made, name="tiny")


class Team:
    """Two agents on a scripted host; each sees the other's answers as a framework passes them: as text."""

    def __init__(self, engine: Engine, *answers: str, stop: tuple[str, ...] = ()) -> None:
        said = iter(answers)
        self.host = ScriptedHost(lambda _: next(said), engine=engine)
        for name in "ab":
            self.host.roster.learn("", name, f"You are {name}.")
        self.messages, self.stop = [TASK], stop

    def say(self, name: str) -> str:
        member = self.host.roster.members("")[name]
        answer = self.host.submit(Turn(member, "", tuple(self.messages), Sampling(stop=self.stop))).result()
        self.messages.append(Message("assistant", answer.text, name))
        self.host.assert_exact()
        return answer.text


@pytest.mark.parametrize("name", FAMILIES)
def test_thoughts_that_the_next_prompt_drops(name: str) -> None:
    """KV of a thought stays behind; what was said is read by everyone, and the KV before the thought is used."""
    thought = ("" if FAMILIES[name].thinks else "<think>\n") + "The secret is 4711.\n</think>\n\n"
    other = "</think>\n\n" if FAMILIES[name].thinks else ""
    team = Team(engine(tokenizer(name)), f"{thought}Red.", f"{other}Blue.", f"{thought}Green.", f"{other}Done.")
    assert [team.say(who) for who in "abab"] == ["Red.", "Blue.", "Green.", "Done."]
    assert team.host.modes[0] == "TEXT" and set(team.host.modes[1:]) <= {"KV", "PARTIAL"}
    assert not any("4711" in text for text in team.host.texts)
    assert all(text.index("Red.") < text.index("Blue.") for text in team.host.texts[2:])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("stop", ["END", "ND", " END", "é"])
def test_stop_strings_inside_tokens(name: str, stop: str) -> None:
    """What lies behind the stop string was computed, but is nobody's to see."""
    answers = ("Red and blue. ENDédef add(a, b)", "Yes. ENDé of it", "Fine.")
    thought = "Hm.</think>\n\n" * FAMILIES[name].thinks
    team = Team(engine(tokenizer(name)), *(thought + answer for answer in answers), stop=(stop,))
    first, second = team.say("a"), team.say("b")
    assert stop not in first + second and first.startswith("Red and blue.")
    team.say("a")
    assert team.host.modes[1:] != ["TEXT", "TEXT"]
    assert not any("def add" in text or "of it" in text for text in team.host.texts)


def test_the_date_is_frozen_however_the_template_asks_for_it() -> None:
    """A format in a variable, one with a flag, a clock behind a condition and inside of a macro."""
    asks = (
        "{%- macro day() -%}{{- strftime_now('%-d%% %B') -}}{%- endmacro -%}{%- set form = '%d %b %Y ' -%}"
        "{{- strftime_now(form) + (strftime_now('%H:%M:%S.%f ') if strftime_now is defined else '') + day() -}}"
    )
    made = tiny_tokenizer("{{- '<|im_start|>system\nToday is ' -}}" + asks + "{{- '<|im_end|>\n' -}}" + CHATML)
    first, second = (Template(made, date=datetime.date(2026, 1, 2)) for _ in range(2))
    assert first.head("Be kind.") == second.head("Be kind.")
    assert "Today is 02 Jan 2026 00:00:00.000000 2% January" in first.encoder.decode(first.head("Be kind."))
    assert first.head("") != Template(made, date=datetime.date(2026, 1, 3)).head("")


TOOLS = (
    "{%- if tools -%}{{- '<|im_start|>system\n' -}}{%- for t in tools | ORDER -%}{{- t.function.name + '\n' -}}"
    "{%- endfor -%}{{- '<|im_end|>\n' -}}{%- endif -%}" + CHATML
)


@pytest.mark.parametrize("order", ["reverse", "sort(attribute='function.description')", "list"])
def test_templates_that_reorder_tools(order: str) -> None:
    """Whoever has which tools, and in whatever order they come: one header for all members."""

    def tool(name: str, description: str) -> dict:
        return {"type": "function", "function": {"name": name, "description": description, "parameters": {}}}

    template = Template(tiny_tokenizer(TOOLS.replace("ORDER", order)))
    tools = (tool("find", "z"), tool("add", "y"), tool("call", "x"))
    heads = set()
    for mine, others in ((tools[:1], tools[1:]), (tools[::-1], tools), (tools[1:], tools[:2])):
        a, b = Member("a", "a", "You add.", mine), Member("b", "b", "You call.", others)
        for speaker in (a, b):
            for members in ({"a": a, "b": b}, {"b": b, "a": a}):
                ids = lay_out([TASK], speaker, members, template=template, ledger=Ledger()).ids
                heads.add(ids[: ids.index(template.encoder.text("Name")[0])])
    assert len(heads) == 1


@pytest.mark.parametrize("template_has_it", [True, False])
def test_a_tokenizer_that_adds_a_token_at_the_beginning(template_has_it: bool) -> None:
    """Once if the template has it, never because segments are encoded one by one; as the template's own ids."""
    special = ["<s>", *SPECIAL]
    made = tiny_tokenizer(("{{- bos_token -}}" if template_has_it else "") + CHATML, special=special)
    made.bos_token = "<s>"
    bos = made.convert_tokens_to_ids("<s>")
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", bos)]
    )
    assert made("x").input_ids[0] == bos
    template = Template(made)
    ids = template.head("Be kind.", (), "Go.") + template.turn + template.answer("Red.") + template.user("More.")
    assert ids.count(bos) == (1 if template_has_it else 0)
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Go."}]
    native = made.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids[: len(native)] == tuple(native)
    team = Team(engine(made), "Red.", "Blue.", "Green.")
    assert [team.say(who) for who in "aba"] == ["Red.", "Blue.", "Green."]
    assert team.host.modes == ["TEXT", "KV", "KV"]


def lossy() -> list:
    """Tokenizers whose text, decoded and encoded again, has other ids, or is another text."""
    lower, folded, stripped, added = (tiny_tokenizer() for _ in range(4))
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    folded.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents()])
    stripped.add_tokens([AddedToken("Blue", lstrip=True, rstrip=True, normalized=False)])
    added.add_tokens([AddedToken("ed.", normalized=False), AddedToken(" ", normalized=False)])
    return [lower, folded, stripped, added]


@pytest.mark.parametrize("which", range(4))
def test_decoding_and_encoding_again_is_not_the_identity(which: int) -> None:
    made = lossy()[which]
    team = Team(engine(made), "Réd and  Blue  ﬁne. RED.", "  Blue  Réd.", "Red.", "Ende.")
    for who in "abab":
        team.say(who)
    assert team.host.modes == ["TEXT", "KV", "KV", "KV"]


def test_the_same_words_in_other_tokens() -> None:
    """A text that was generated again in other ids: prompts read as the newest, and the KV is that of these ids."""
    made = engine(tiny_tokenizer())
    team = Team(made, "Red and blue.", "Yes.", "No.")
    team.say("a")
    spelt = sum((made.template.encoder.text(letter) for letter in "Red and blue."), ())
    assert spelt != team.host.ledger.find("Red and blue.")
    team.host.ledger.record("Red and blue.", spelt)
    team.say("b")
    assert team.host.modes == ["TEXT", "PARTIAL"]
    team.say("a")
    assert team.host.modes[2] == "KV"
