"""A context that is full: what goes, what stays, that nothing approximate is taken for exact, and that turns go on."""

import itertools

import pytest
import torch
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from hypothesis import given
from hypothesis import strategies as st
from support import tiny_engine, tiny_tokenizer

from qkvshare_agents import QKVShareClient, spans
from qkvshare_agents.context.attention_mass import Attended, AttentionMeter
from qkvshare_agents.context.fit import whole
from qkvshare_agents.context.room import Room, room_for
from qkvshare_agents.errors import ContextOverflow, InvalidSetting
from qkvshare_agents.eval import families
from qkvshare_agents.host import registry
from qkvshare_agents.host.host import Host
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model import rope as rotary
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.prompt.layout import Message
from qkvshare_agents.prompt.sampling import Sampling
from qkvshare_agents.settings import HostSettings
from qkvshare_agents.spans import cut, joined, without
from qkvshare_agents.store.prefix_tree import SHORTEST_SLICE
from qkvshare_agents.turns.access import Access
from qkvshare_agents.turns.request import Turn

WORDS = "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor incididunt ut labore".split()


def text(tokens: int, seed: int = 0) -> str:
    """About so many tokens of the tiny tokenizer."""
    encoder = tiny_engine().template.encoder
    words = (WORDS[(i * i + seed * 7 + i) % len(WORDS)] for i in itertools.count())
    said = ""
    while len(encoder.text(said)) < tokens:
        said += " ".join(itertools.islice(words, 20)) + ". "
    return encoder.decode(encoder.text(said)[:tokens])


PIECE = 50  # tokens of a message


class Recorder:
    """An engine that remembers the logits behind each prompt."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.fed: list[list[int]] = []
        self.said: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def feed(self, run, ids, cancelled=lambda: False):
        logits = self._engine.feed(run, ids, cancelled)
        self.fed.append(list(ids))
        self.said.append(logits)
        return logits


def make(kind: str = "llama", context: int = 2048, **settings: object) -> Host:
    engine = families_engine(kind, context) if kind != "llama" else tiny_engine(max_position_embeddings=context)
    return Host(HostSettings("tiny", **{"precision": "native", "system": "Be brief.", **settings}), Recorder(engine))


def families_engine(kind: str, context: int) -> Engine:
    longest = {"gpt2": "n_positions"}.get(kind, "max_position_embeddings")
    return Engine.of(families.tiny_model(kind, **{longest: context}), tiny_tokenizer(), name=kind)


class Talk:
    """A conversation of two members on a host: a short task, and many messages that may go."""

    def __init__(self, host: Host) -> None:
        self.host, self.messages = host, [Message("user", "Go on.", "user")]
        composer = host._load().runner._composer
        fit = composer.fit

        def record(*asked):
            self.fitted = fit(*asked)
            return self.fitted

        composer.fit = record

    @property
    def stays(self) -> int:
        """Tokens at the front that always stay."""
        return self.prompt.exchanges[0].parts[0].stop

    def ask(self, tokens: int, name: str = "a", max_tokens: int = 24, seed: int = 0, piece: int = PIECE, **options):
        self.before = list(self.messages)
        for said in range(0, tokens, piece):
            said = f"{len(self.messages)}.{seed} {text(max(1, min(piece, tokens - said) - 6), seed)}"
            self.messages.append(Message("user", said, "user"))
        member = self.host.roster.learn("", name, f"You are {name}.")
        turn = Turn(member, "", tuple(self.messages), Sampling(max_tokens=max_tokens, **options))
        self.prompt = self.host.prompt(turn)
        self.host.engine.fed.clear()
        self.host.engine.said.clear()
        answer = self.host.submit(turn).result()
        self.messages.append(Message("user", answer.text, name))
        return answer.report


def expected_logits(host: Host, ids: tuple[int, ...], covered: int, dropped: spans.Spans) -> torch.Tensor:
    """What the model says behind `ids`, whose first `covered` were computed in full, and then lost `dropped`."""
    engine = host.engine._engine
    with torch.inference_mode():
        full = KVCache(engine.shape)
        engine.feed(engine.begin(full), ids[:covered])
        kept = [i for start, stop in without(((0, covered),), dropped) for i in range(start, stop)]
        kv = KVCache(engine.shape)
        for layer in range(engine.shape.layers):
            kv.append(layer, *(part[:, kept] for part in full.layer(layer)))
        rotary.measure(engine).move(kv.span(0, len(kept)), kept, range(len(kept)))
        return engine.feed(engine.begin(kv), ids[covered:])


@pytest.mark.parametrize(("first", "second"), [(1500, 700), (700, 1500)])
def test_1500_tokens_and_700_fit_into_2048_and_the_report_says_what_went(first: int, second: int) -> None:
    talk = Talk(make())
    talk.ask(first)
    report = talk.ask(second, "b", seed=1)
    assert report.prompt_tokens + report.dropped_tokens == len(talk.prompt.ids) > 2200
    assert report.prompt_tokens + 24 <= 2048
    assert report.reused_tokens + report.prefilled_tokens == report.prompt_tokens
    assert f"fitted: {report.dropped_tokens} of {len(talk.prompt.ids)} tokens were dropped" in report.reasons[0]
    assert report.generated_tokens > 0
    if first > second:  # most of what was computed is used again
        assert report.mode.value == "PARTIAL" and report.reused_tokens > 1000 and "was moved" in report.reasons[0]


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "bloom", "cohere"])
def test_the_moved_kv_is_the_full_one_without_what_was_dropped(kind: str) -> None:
    talk = Talk(make(kind, context=512))
    talk.ask(300)
    report = talk.ask(200, "b", seed=1)
    assert report.mode.value == "PARTIAL" and report.dropped_tokens
    rest = talk.host.engine.fed[0]
    covered = len(talk.prompt.ids) - len(rest)
    assert list(talk.prompt.ids[covered:]) == rest, "what is read is the end of the prompt"
    dropped = talk.fitted.dropped
    assert dropped[0][0] == talk.stays and spans.count(dropped) == report.dropped_tokens
    expected = expected_logits(talk.host, talk.prompt.ids, covered, dropped)
    assert (talk.host.engine.said[0] - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_what_layers_with_a_window_keep_is_not_put_together() -> None:
    talk = Talk(make("gemma3_text", context=512))
    talk.ask(300)
    report = talk.ask(200, "b", seed=1)
    assert report.dropped_tokens and "as text, since layers with a window keep no more" in report.reasons[0]


def test_a_conversation_that_goes_on_is_not_read_again() -> None:
    """Each turn reads its own message only, also when the cut grows, and each is what the same cut of the KV gives."""
    talk, reports = Talk(make(context=1024)), []
    talk.ask(800)
    for turn in range(16):
        reports.append(talk.ask(40, "ab"[turn % 2], seed=turn))
    fitted = [r for r in reports if r.dropped_tokens]
    assert len(fitted) >= 10 and len({r.dropped_tokens for r in fitted}) < len(fitted), "one cut serves several turns"
    assert all(r.prefilled_tokens < 150 for r in reports), "only what is new is read"
    assert all(r.prompt_tokens + 24 <= 1024 and r.prompt_tokens > 600 for r in fitted)
    assert {r.mode.value for r in fitted} == {"PARTIAL"}


@pytest.mark.parametrize("precision", ["native", "safe"])
def test_approximate_kv_is_not_found_under_exact_ids(precision: str) -> None:
    """What was read behind a cut is kept, but neither the whole ids nor the cut ones lead to it."""
    talk = Talk(make(context=512, precision=precision))
    talk.ask(300)
    store = talk.host.store
    report = talk.ask(200, "b", seed=1)
    assert report.dropped_tokens
    ids = talk.prompt.ids
    assert store.stored_tokens(ids) == len(ids) - len(talk.host.engine.fed[0]), "only what was exact before"
    assert store.stored_tokens(cut(ids, talk.fitted.dropped)) <= talk.stays
    again = Host(talk.host.settings, tiny_engine(max_position_embeddings=4096))
    assert store.page_count > 0 and again.store.page_count == 0


def test_an_edited_conversation_does_not_continue_from_the_cut_of_another() -> None:
    talk = Talk(make(context=512))
    talk.ask(300)
    talk.ask(200, "b", seed=1)
    talk.messages[1] = Message("user", text(300, seed=5), "user")  # one that was dropped
    report = talk.ask(20, seed=2)
    assert report.reused_tokens <= talk.stays, "the dropped ids are compared, too"


def test_the_first_turn_is_cut_as_text_and_later_turns_continue_from_it() -> None:
    talk = Talk(make(context=512))
    first = talk.ask(900)
    assert first.mode.value == "TEXT" and "as text" in first.reasons[0] and first.dropped_tokens > 300
    reports = [talk.ask(40, "ab"[i % 2], seed=i) for i in range(8)]
    assert all(r.dropped_tokens > 300 and r.prefilled_tokens < 100 for r in reports)
    assert any("was moved" in r.reasons[0] for r in reports), "when more has to go, the KV of the cut text is moved"


def test_cut_text_is_exact() -> None:
    talk = Talk(make(context=512))
    talk.ask(900)
    engine, kept = talk.host.engine._engine, talk.host.engine.fed[0]
    assert (talk.host.engine.said[0] - engine.feed(engine.begin(None), kept)).abs().max() < 1e-4
    assert talk.host.store.match(kept).tokens > len(kept) - SHORTEST_SLICE


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("gpt2", "learned positions"), ("qwen3_5_text", "recurrent state"), ("handoff", "switched off")],
)
def test_where_kv_can_not_be_moved_the_text_is_cut_with_the_reason(kind: str, reason: str) -> None:
    off = kind == "handoff"
    talk = Talk(make("llama" if off else kind, context=512, **({"handoff": False} if off else {})))
    talk.ask(300)
    report = talk.ask(200, "b", seed=1)
    assert report.dropped_tokens and reason in " ".join(report.reasons)
    engine = talk.host.engine._engine
    expected = engine.feed(engine.begin(None), whole(talk.fitted).ids)
    last = talk.host.engine.said[0 if not kind.startswith("qwen") else 1]
    assert (last - expected).abs().max() <= 1e-3 * expected.abs().max()


def test_frequencies_that_switch_are_refused_and_the_text_is_cut() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 256}
    engine = tiny_engine(max_position_embeddings=512, rope_parameters=rope)
    talk = Talk(Host(HostSettings("tiny", precision="native", system="Be brief."), Recorder(engine)))
    talk.ask(300)
    report = talk.ask(200, "b", seed=1)
    assert report.mode.value == "TEXT" and report.dropped_tokens and "frequencies" in " ".join(report.reasons)


def test_the_least_attended_tokens_go_and_the_conversation_goes_on() -> None:
    talk = Talk(make(context=512, fit="drop_least_attended"))
    talk.ask(300)
    report = talk.ask(200, "b", seed=1)
    assert report.mode.value == "PARTIAL" and report.dropped_tokens
    assert report.prompt_tokens + 24 <= 512 and report.reused_tokens > 150
    assert talk.fitted.dropped[0][0] > talk.stays, "the oldest received more attention"
    reports = [talk.ask(40, "ab"[i % 2], seed=i) for i in range(8)]
    assert all(r.prompt_tokens + 24 <= 512 and r.dropped_tokens for r in reports)
    assert sum(r.prefilled_tokens < 100 for r in reports) >= 5, "most turns read what is new only"


@pytest.mark.parametrize("settings", [{"precision": "joint"}, {"precision": "joint", "packed_history": True}])
def test_attention_is_seen_for_both_of_its_readers_and_over_packed_pages(settings: dict) -> None:
    """What is dropped and how wide pages are both come from looking on; the same is dropped as from native KV."""
    reports, masses = [], []
    for chosen in (settings, {"precision": "native"}):
        engine = tiny_engine(max_position_embeddings=512)
        talk = Talk(Host(HostSettings("tiny", system="Be brief.", fit="drop_least_attended", **chosen), engine))
        engine.fed, engine.said = [], []  # as a Recorder has
        talk.ask(300)
        meter = talk.host._load().runner._composer._meter
        masses.append(meter.mass)
        reports.append(talk.ask(200, "b", seed=1))
        assert meter.mass.shape[1] == reports[-1].prompt_tokens
        if chosen is settings:
            assert engine.observer.calls == 1 and talk.host.load().uniform_because == "", "widths were chosen, too"
            packed = chosen.get("packed_history", False)
            assert engine.model.config._attn_implementation == ("qkvshare_sdpa" if packed else "sdpa")
    assert torch.allclose(*masses, rtol=1e-3, atol=1e-3)
    assert reports[0].reasons[0] == reports[1].reasons[0]


def test_attention_is_what_softmax_gives_and_changes_nothing() -> None:
    engine = Engine.of(families.tiny_model("llama", attn_implementation="eager"), tiny_tokenizer(), name="eager")
    ids = [(11 * i + 5) % 600 for i in range(16)]
    expected = engine.feed(engine.begin(None), ids)
    weights = engine.model(input_ids=torch.tensor([ids]), output_attentions=True).attentions
    for implementation in ("eager", "sdpa"):
        engine.model.set_attn_implementation(implementation)
        meter = AttentionMeter(engine.model)
        with meter.watching():
            got = engine.feed(engine.begin(None), ids)
        assert (got - expected).abs().max() < 1e-4
        assert torch.allclose(meter.mass[0], sum(w.sum((0, 1, 2)) for w in weights), atol=1e-3)
        assert meter.mass[1].tolist() == [3 * 4 * (16 - i) for i in range(16)], "layers, heads, queries that see it"
        assert engine.model.config._attn_implementation == implementation


def test_attention_is_added_over_turns_and_kept_from_strangers() -> None:
    known = Attended()
    known.add((1, 2, 3), torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]), (0, 1, 2), ("a",), None)
    known.add((1, 2, 3, 4), torch.tensor([[1.0, 1.0, 5.0], [1.0, 1.0, 1.0]]), (0, 2, 3), ("a",), None)
    assert known.of((1, 2, 3, 4), None).tolist() == [2 / 4, 2 / 2, 4 / 2, 5 / 1]
    assert known.of((1, 2, 9), frozenset("a")).tolist() == [2 / 4, 2 / 2]
    assert known.of((1, 2, 3), frozenset("b")).tolist() == []


def test_a_model_whose_attention_is_not_seen_drops_its_head() -> None:
    talk = Talk(make("bloom", context=512, fit="drop_least_attended"))
    talk.ask(300)
    report = talk.ask(200, "b", seed=1)
    assert report.mode.value == "PARTIAL" and report.dropped_tokens


def test_older_messages_are_summed_up_once_by_who_spoke_last() -> None:
    talk = Talk(make(context=512, fit="summarise"))
    for seed in range(3):
        assert not talk.ask(80, "ab"[seed % 2], seed=seed).dropped_tokens
    reports = []
    for seed in range(3, 9):
        before = len(talk.host.reports)
        reports.append(talk.ask(60, "ab"[seed % 2], seed=seed))
        if len(talk.host.reports) == before + 2:  # the summary is a turn, too
            assert talk.host.reports[-2].agent in "ab" and talk.host.reports[-2].generated_tokens > 0
    written = [len(talk.host.reports) - 9]
    assert 1 <= written[0] < 6, "one summary serves several turns"
    short = [r for r in reports if r.dropped_tokens]
    assert short and all("were replaced by a summary" in r.reasons[0] for r in short)
    assert all(r.prompt_tokens + 24 <= 512 for r in reports)


def test_a_message_that_is_too_long_alone_is_cut_whatever_the_summary() -> None:
    talk = Talk(make(context=512, fit="summarise"))
    talk.ask(100)
    report = talk.ask(900, "b", seed=1, piece=900)
    assert report.prompt_tokens + 24 <= 512 and report.dropped_tokens > 400
    assert any("were left out of the middle of 1 long messages" in reason for reason in report.reasons)


def test_error_is_the_old_way() -> None:
    talk = Talk(make(context=512, fit="error"))
    talk.ask(300)
    with pytest.raises(ContextOverflow, match="context length exceeded"):
        talk.ask(200, "b", seed=1)


def test_a_cap_below_the_models_context() -> None:
    talk = Talk(make(context=4096, context_tokens=512))
    talk.ask(300)
    report = talk.ask(200, "b", seed=1)
    assert report.dropped_tokens and report.prompt_tokens + report.generated_tokens <= 512
    with pytest.raises(InvalidSetting, match="context_tokens must be at least 64"):
        HostSettings("tiny", context_tokens=10)
    with pytest.raises(InvalidSetting, match="no fit 'drop'; choose from drop_head"):
        HostSettings("tiny", fit="drop")


def test_an_answer_gets_what_it_asked_for_up_to_half_of_the_context() -> None:
    assert room_for(2048, 512) == Room(2048, 512) and room_for(512, 4096) == Room(512, 256)
    assert room_for(2048, None) == Room(2048, 256)


def test_a_long_header_stays() -> None:
    talk = Talk(make(context=512, system=text(370, seed=9)))
    talk.ask(50)
    report = talk.ask(50, "b", seed=1)
    assert report.prompt_tokens <= 488
    assert whole(talk.fitted).ids[: talk.stays] == talk.prompt.ids[: talk.stays] and talk.prompt.header > 370


def test_another_process_gets_the_exact_part_and_cuts_it_itself() -> None:
    talk = Talk(make(context=512))
    talk.ask(300)
    talk.ask(200, "b", seed=1)
    there = make(context=512)
    there.roster.learn("", "b", "You are b.")
    member = talk.host.roster.learn("", "a", "You are a.")
    asked = Turn(member, "", (*talk.messages, Message("user", text(20, seed=3), "user")), Sampling(max_tokens=24))
    package = talk.host.export(asked)
    assert len(package.ids) <= 512 and max(package.ids) < 2**32 and all(stop <= 512 for _, _, stop in package.ledger)
    assert there.adopt(package) == ()
    there.roster.learn("", "a", "You are a.")
    report = there.submit(asked).result().report
    assert report.dropped_tokens and report.reused_tokens > 100 and "was moved" in report.reasons[0]


def test_a_turn_that_is_asked_again_finds_what_was_read_behind_the_cut() -> None:
    talk = Talk(make(context=512))
    talk.ask(300)
    first = talk.ask(200, "b", seed=1)
    talk.messages = talk.before
    again = talk.ask(200, "b", seed=1)
    assert again.prefilled_tokens < 20 < first.prefilled_tokens and again.dropped_tokens == first.dropped_tokens
    talk.messages = talk.before
    other = talk.ask(210, "b", seed=7)  # another text behind the same cut
    assert other.dropped_tokens == first.dropped_tokens and other.reused_tokens > 150


def test_isolated_agents_read_no_cut_kv_of_others() -> None:
    h = make(context=512)
    messages = [Message("user", text(30, seed), "user") for seed in range(10)]

    def ask(name: str):
        turn = Turn(
            h.roster.learn("", name, f"You are {name}."), "", tuple(messages), Sampling(max_tokens=24),
            access=Access((name,), frozenset({name})),
        )  # fmt: skip
        answer = h.submit(turn).result()
        messages.append(Message("user", answer.text, name))
        return answer.report

    ask("a")
    messages.append(Message("user", text(200, 1), "user"))
    assert ask("a").mode.value == "PARTIAL"
    messages.append(Message("user", text(20, 2), "user"))
    strange, own = ask("b"), ask("a")
    assert strange.mode.value == "TEXT" and strange.reused_tokens == 0 and strange.dropped_tokens
    assert own.mode.value == "PARTIAL" and own.reused_tokens > 300


async def test_a_team_talks_on_beyond_the_context() -> None:
    settings = {"precision": "native", "max_tokens": 40}
    registry.open_host(
        HostSettings("tiny", precision="native"), "long-talk", engine=tiny_engine(max_position_embeddings=512)
    )
    client = QKVShareClient("tiny", host="long-talk", **settings)
    try:
        agents = [AssistantAgent(name, client, system_message=f"You are {name}.") for name in ("anna", "bert")]
        result = await RoundRobinGroupChat(agents, max_turns=14).run(task=text(200))
        assert len(result.messages) == 15
        last = client.reports[-1]
        assert last.dropped_tokens and last.mode.value == "PARTIAL" and last.prefilled_tokens < 60
    finally:
        await client.close()
        registry.release_host(HostSettings("tiny", precision="native"), "long-talk")


def test_evicted_pieces_mean_text() -> None:
    talk = Talk(make(context=512))
    talk.ask(300)
    talk.ask(200, "b", seed=1)
    talk.host.store.budget_bytes = 1
    talk.ask(20, seed=2)
    report = talk.ask(20, "b", seed=3)
    assert report.mode.value == "TEXT" and report.dropped_tokens


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50))),
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50))),
)
def test_spans_are_sets_of_tokens(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    def tokens(spans) -> set[int]:
        return {i for start, stop in spans for i in range(start, stop)}

    one, two = joined((x, y) for x, y in a if x < y), joined((x, y) for x, y in b if x < y)
    assert tokens(one) == tokens((x, y) for x, y in a if x < y)
    assert tokens(without(one, two)) == tokens(one) - tokens(two)
    assert spans.count(one) == len(tokens(one))
