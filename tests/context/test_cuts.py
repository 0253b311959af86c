"""Whatever fits: what a turn can't do without is in its prompt, which consists of whole turns of the template."""

import re
from functools import cache

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain.agents import create_agent
from langgraph.graph import START, MessagesState, StateGraph
from scripted import install, uninstall
from support import CHATML, tiny_engine, tiny_tokenizer

from qkvshare_agents import ChatQKVShare, QKVShareClient, add_cache_handoff, spans
from qkvshare_agents.context.fit import fit, whole
from qkvshare_agents.context.room import room_for
from qkvshare_agents.context.shortening import Shortener, shorter_text
from qkvshare_agents.errors import ContextOverflow
from qkvshare_agents.host.host import Host
from qkvshare_agents.prompt.chat_template import Template
from qkvshare_agents.prompt.layout import Message, Prompt, lay_out
from qkvshare_agents.prompt.ledger import Ledger
from qkvshare_agents.prompt.members import Member
from qkvshare_agents.prompt.tool_calls import ToolCall
from qkvshare_agents.settings import HostSettings
from qkvshare_agents.turns.request import Turn

BRACKETS = (  # an answer ends as no user text does, and turns have to alternate
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'system' %}{{ '<SYS>' + m['content'] + '</SYS>' }}{% else %}"
    "{{ m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "look", "description": "TOOLWORD", "parameters": {"type": "object"}}}
CONTEXT = 320
NAMES = ("anna", "bert", "carl")
WORDS = "lorem ipsum dolor sit amet consectetur adipiscing elit".split()
TURNS = re.compile(r"(<\|im_start\|>(system|user|assistant)\n(?:(?!<\|im_(start|end)\|>).)*<\|im_end\|>\n)+", re.S)


@cache
def template(form: str) -> Template:
    return Template(tiny_tokenizer(form))


def words(number: int, count: int) -> str:
    return f"m{number}. " + " ".join(WORDS[(number + i) % len(WORDS)] for i in range(count)) + f" .m{number}"


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Message, ...]:
    """A task, then answers, calls with their results, and texts of people."""
    sizes = st.one_of(st.integers(0, 12), st.integers(0, 60), st.integers(0, 400))
    messages = [Message("user", f"TASKWORD {words(0, draw(sizes))}", "user")]
    for number in range(1, draw(st.integers(2, 14))):
        kind, name = draw(st.sampled_from(("answer", "answer", "call", "user"))), draw(st.sampled_from(NAMES))
        text = words(number, draw(sizes))
        if kind == "user":
            messages.append(Message("user", text, "user"))
        elif kind == "answer":
            messages.append(Message("assistant", text, name))
        else:
            calls = tuple(ToolCall(f"c{number}{i}", "look", f'{{"x": "CALL{number}-{i}."}}') for i in range(2))
            messages.append(Message("assistant", "", name, calls))
            for i, call in enumerate(calls):
                result = f"RESULT{number}-{i}. {words(number, draw(sizes))}"
                messages.append(Message("tool", result, "", (), call.id, "look"))
    return tuple(messages)


@settings(max_examples=60, deadline=None)
@given(
    messages=conversations(), context=st.integers(160, 1200), wanted=st.integers(1, 300), least=st.booleans(),
    layout=st.sampled_from(("relay", "stock")), form=st.sampled_from((CHATML, BRACKETS)), tools=st.booleans(),
    told=st.integers(1, 60), repeated=st.sampled_from((0, 8, 96)), speaker=st.sampled_from(NAMES),
)  # fmt: skip
def test_what_must_stay_is_in_every_prompt_that_fits(
    messages, context, wanted, least, layout, form, tools, told, repeated, speaker
) -> None:
    made = template(form)
    members = {n: Member(n, n, f"RULE-{n} {words(9, told)} END-{n}", (TOOL,) * tools) for n in NAMES}

    def lay(turn: Turn) -> Prompt:
        return lay_out(
            turn.messages, members[speaker], members, template=made, ledger=Ledger(), layout=layout,
            system="SYSTEMWORD", repeat_instruction_tokens=repeated,
        )  # fmt: skip

    turn, room = Turn(members[speaker], "", messages), room_for(context, wanted)
    prompt = lay(turn)
    try:
        short = Shortener().shorten(turn, prompt, room, lay, made.encoder)
    except ContextOverflow as error:
        assert str(len(prompt.ids)) in str(error) and f"> {context}" in str(error)
        assert len(prompt.ids) > room.prompt
        return
    fitted = fit(short.prompt, short.room, short.cuts)
    if least and short.room.lacks(len(short.prompt.ids)):
        mass = [(i * 37) % 101 / 101 for i in range(len(short.prompt.ids))]
        dropped = short.cuts.plan(short.room.lacks(len(short.prompt.ids)), short.room, (), mass)
        ids = spans.cut(short.prompt.ids, dropped)
    else:
        ids = whole(fitted).ids
    text = made.encoder.decode(ids, keep_special=True)
    assert len(ids) <= short.room.prompt <= context and short.room.answer >= min(wanted, context // 8)
    assert ids[: prompt.header] == prompt.ids[: prompt.header], "system text and tools"
    assert "TOOLWORD" in text or not tools
    assert f"RULE-{speaker} {words(9, told)} END-{speaker}" in text, "the whole instruction"
    assert "TASKWORD" in text
    newest = [m for m in messages if m.role == "user"][-1]
    assert newest.text.split()[0] in text and newest.text.split()[-1] in text
    for number in range(len(messages)):
        for i in range(2):  # a result never without its call, nor a call without its result
            assert (f"CALL{number}-{i}." in text) == (f"RESULT{number}-{i}." in text)
    if form == CHATML:
        opened, answer = text.rsplit("<|im_start|>", 1)
        assert TURNS.fullmatch(opened) and answer == "assistant\n", text
    else:
        assert re.fullmatch(
            r"(<SYS>.*</SYS>)?(\[INST\](?:(?!\[/?INST\]).)*\[/INST\](?:(?!\[/?INST\]).)*)+", text, re.S
        ), text
        assert "[/INST][INST]" not in text and text.count("[/INST]") == text.count("<|im_end|>") + 1


@settings(max_examples=20, deadline=None)
@given(messages=conversations(), context=st.integers(300, 900), layout=st.sampled_from(("relay", "stock")))
def test_a_cut_of_one_turn_serves_the_next(messages, context, layout) -> None:
    """What was dropped stays dropped when it still suffices, or more goes beside it: nothing comes back."""
    made, room = template(CHATML), room_for(context, 40)
    members = {n: Member(n, n, f"You are {n}.") for n in NAMES}

    def lay(turn: Turn) -> Prompt:
        return lay_out(
            turn.messages, members["anna"], members, template=made, ledger=Ledger(), layout=layout, system=""
        )

    shortener, dropped, before = Shortener(), (), Prompt((), 0)
    for number in range(6):
        turn = Turn(members["anna"], "", messages)
        prompt = lay(turn)
        try:
            short = shortener.shorten(turn, prompt, room, lay, made.encoder)
        except ContextOverflow:
            return  # what must stay is more than the context: there is no cut to serve the next turn
        lacking = short.room.lacks(len(short.prompt.ids))
        stop = dropped[-1][1] if dropped else 0
        kept = before.ids[:stop] == short.prompt.ids[:stop]
        if lacking:
            planned = short.cuts.plan(lacking, short.room, dropped if kept else ())
            if planned is not None and kept:
                assert not spans.without(dropped, planned)
                assert planned == dropped or spans.count(dropped) < lacking
            dropped = planned or short.cuts.plan(lacking, short.room) or ()
        before = short.prompt
        messages = (*messages, Message("assistant", words(50 + number, 10), "anna"), Message("user", "More?", "user"))


def test_a_shortened_text_keeps_its_ends_and_says_what_is_missing() -> None:
    encoder = template(CHATML).encoder
    text = words(3, 500)
    short = shorter_text(text, 60, encoder)
    assert short.startswith("m3. lorem"[:4]) and short.endswith(".m3") and "tokens left out ...]\n" in short
    assert int(re.search(r"\.\.\. (\d+) tokens", short)[1]) == len(encoder.text(text)) - 60
    assert shorter_text(text, 5000, encoder) == text and shorter_text("日本語" * 200, 30, encoder).count("\ufffd") == 0


class Recorded:
    """A host of a tiny model with a small context, and the text of its prompts."""

    def __init__(self, name: str, **options: object) -> None:
        chosen = HostSettings("scripted", precision="native", context_tokens=CONTEXT, **options)
        self.host = Host(chosen, tiny_engine(num_hidden_layers=1))
        self.name, self.seen = name, []
        composer = self.host._load().runner._composer
        original = composer.fit

        def record(turn, *rest):
            found = original(turn, *rest)
            text = self.host.engine.template.encoder.decode(whole(found).ids, keep_special=True)
            self.seen.append((turn.speaker.name, text))
            return found

        composer.fit = record

    def __enter__(self) -> "Recorded":
        install(self.host, self.name)
        return self

    def __exit__(self, *_: object) -> None:
        uninstall(self.name)

    def check(self, turns: int) -> None:
        assert len(self.seen) >= turns and any(r.dropped_tokens for r in self.host.reports)
        assert all(r.prompt_tokens + r.generated_tokens <= CONTEXT for r in self.host.reports)
        for who, text in self.seen:
            assert f"{who.upper()}RULE" in text and "TASKWORD" in text


@pytest.mark.parametrize("layout", ["relay", "stock"])
@pytest.mark.parametrize("fit_", ["drop_head", "drop_least_attended", "summarise"])
async def test_sixty_turns_of_autogen_keep_instructions_and_task(layout: str, fit_: str) -> None:
    options = {"layout": layout, "fit": fit_}
    with Recorded(f"cut-{layout}-{fit_}", **options) as talk:
        client = QKVShareClient(
            "scripted", host=talk.name, precision="native", context_tokens=CONTEXT, max_tokens=8, temperature=1.0,
            seed=1, **options,
        )  # fmt: skip
        agents = [AssistantAgent(n, client, system_message=f"You are {n.upper()}RULE.") for n in ("anna", "bert")]
        await RoundRobinGroupChat(agents, max_turns=60).run(task="TASKWORD: write is_even.")
        talk.check(60)


@pytest.mark.parametrize("annotated", [True, False])
def test_sixty_turns_of_langgraph_keep_instructions_and_task(annotated: bool) -> None:
    with Recorded(f"cut-graph-{annotated}") as talk:
        model = ChatQKVShare(
            model="scripted",
            host=talk.name,
            precision="native",
            context_tokens=CONTEXT,
            max_tokens=8,
            temperature=1.0,
            seed=1,
        )
        graph = StateGraph(MessagesState)
        for name in ("anna", "bert"):
            agent = create_agent(model, system_prompt=f"You are {name}: {name.upper()}RULE holds.", name=name)
            graph.add_node(name, agent)
        graph.add_edge(START, "anna")

        def further(state: MessagesState) -> str:
            return "anna" if len(state["messages"]) < 61 else "__end__"

        if annotated:
            add_cache_handoff(graph, "anna", "bert")
            add_cache_handoff(graph, "bert", "anna", path=further, path_map=["anna", "__end__"])
        else:
            graph.add_edge("anna", "bert")
            graph.add_conditional_edges("bert", further, ["anna", "__end__"])
        graph.compile().invoke({"messages": [("user", "TASKWORD: write is_even.")]}, {"recursion_limit": 100})
        talk.check(60)
