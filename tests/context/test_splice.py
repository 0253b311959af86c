"""A text read behind one system prompt, placed behind another: opt-in, said in the report, never taken for exact."""

import pytest
import torch
from support import tiny_engine
from test_fitting import Recorder, make, text

from qkvshare_agents.context.splice import Sequence, Sequences
from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.host.host import Host
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model import rope
from qkvshare_agents.prompt.layout import Message
from qkvshare_agents.prompt.sampling import Sampling
from qkvshare_agents.turns.access import Access
from qkvshare_agents.turns.request import Turn

PROMPTS = {
    "a": "You are a. You read what is given to you, and answer in one line, whatever it is.",
    "b": "As b you look for mistakes.",
}
TASK = Message("user", text(300), "user")


def host_of(**settings: object) -> Host:
    return make(**{"layout": "stock", "splice": True, "measure_replay": True, **settings})


def ask(h: Host, name: str, *messages: Message, **access: object):
    member = h.roster.learn("", name, PROMPTS[name])
    turn = Turn(member, "", messages, Sampling(max_tokens=24), access=Access((name,), **access))
    prompt = h.prompt(turn).ids
    h.engine.fed.clear()
    h.engine.said.clear()
    answer = h.submit(turn).result()
    return answer.report, prompt, Message("assistant", answer.text, name)


def test_a_task_that_another_agent_has_read_is_spliced_and_its_kl_reported() -> None:
    h = host_of()
    ask(h, "a", TASK)
    report, prompt, _ = ask(h, "b", TASK)
    assert report.mode.value == "PARTIAL" and "spliced: KV of" in report.reasons[-1]
    assert report.reused_tokens > 250 and report.prefilled_tokens < 80
    assert report.replay_kl is not None and 0 < report.replay_kl < 0.05
    assert sum(map(len, h.engine.fed[:2])) == report.prefilled_tokens
    assert report.reused_tokens + report.prefilled_tokens == len(prompt)


def test_more_recomputed_tokens_are_closer() -> None:
    def kl(recompute: int) -> float:
        h = host_of(recompute_tokens=recompute)
        ask(h, "a", TASK)
        report = ask(h, "b", TASK)[0]
        assert report.reused_tokens
        return report.replay_kl

    assert kl(200) < kl(0)


def test_spliced_kv_is_what_a_replay_of_it_by_hand_gives() -> None:
    h = host_of(recompute_tokens=8)
    _, first, _ = ask(h, "a", TASK)
    report, second, _ = ask(h, "b", TASK)
    engine = h.engine._engine
    moved = int(report.reasons[-1].split("moved by ")[1].split(";")[0])
    read, segment = (
        len(h.engine.fed[0]),
        report.reused_tokens - (len(second) - report.prefilled_tokens - report.reused_tokens),
    )
    common = len(second) - sum(map(len, h.engine.fed[:2])) - segment  # what both prompts begin with
    assert common >= 0
    at = common + read
    with torch.inference_mode():
        other = KVCache(engine.shape)
        engine.feed(engine.begin(other), first)
        source = next(i for i in range(len(first)) if first[i : i + segment] == second[at : at + segment])
        assert abs(source - at) == moved
        kv = KVCache(engine.shape)
        engine.feed(engine.begin(kv), second[:at])
        for layer in range(engine.shape.layers):
            kv.append(layer, *(part[:, source : source + segment] for part in other.layer(layer)))
        span, new = kv.span(at, at + segment), range(at, at + segment)
        rope.measure(engine).move(span, range(source, source + segment), new)
        expected = engine.feed(engine.begin(kv), second[at + segment :])
    assert (h.engine.said[1] - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("precision", ["native", "safe"])
def test_spliced_kv_is_never_stored_as_exact(precision: str) -> None:
    h = host_of(precision=precision)
    ask(h, "a", TASK)
    report, prompt, _ = ask(h, "b", TASK)
    read = len(h.engine.fed[0])
    stored = h.store.stored_tokens(prompt)
    assert stored < read + 20 < report.reused_tokens, "only what was read before the splice"
    plain = Host(h.settings, Recorder(tiny_engine(max_position_embeddings=2048)))
    assert ask(plain, "b", TASK)[0].mode.value == "TEXT"


def test_the_conversation_goes_on_behind_a_splice() -> None:
    h = host_of()
    messages = [TASK]
    reports = []
    for name in "abababab":
        report, _, said = ask(h, name, *messages)
        reports.append(report)
        messages += [said, Message("user", text(60, seed=len(messages)), "user")]
    assert all(r.reused_tokens > r.prompt_tokens / 2 for r in reports[1:])
    assert all(r.replay_kl < 0.1 for r in reports)
    assert "KV that is an approximation" in " ".join(reports[3].reasons)


def test_without_the_option_nothing_is_spliced() -> None:
    h = host_of(splice=False)
    ask(h, "a", TASK)
    report, _, _ = ask(h, "b", TASK)
    assert report.reused_tokens < 20 and not any("spliced" in reason for reason in report.reasons)


def test_isolated_agents_splice_nothing_of_others() -> None:
    h = host_of()
    ask(h, "a", TASK)
    report, _, _ = ask(h, "b", TASK, readers=frozenset("b"))
    assert report.mode.value == "TEXT" and report.reused_tokens == 0


def test_a_model_whose_kv_can_not_be_moved_reads_the_text() -> None:
    h = make("gpt2", layout="stock", splice=True)
    ask(h, "a", TASK)
    report, _, _ = ask(h, "b", TASK)
    assert report.reused_tokens < 20 and not any("spliced" in reason for reason in report.reasons)


def test_settings() -> None:
    with pytest.raises(InvalidSetting, match='splice is for layout="stock"'):
        make(splice=True)
    with pytest.raises(InvalidSetting, match="recompute_tokens must not be negative"):
        make(recompute_tokens=-1)


def test_the_longest_run_is_found_wherever_it_stands() -> None:
    found = Sequences()
    one, two = tuple(range(1000, 1200)), tuple(range(2000, 2100))
    found.add(Sequence(one, one, owners=("a",)))
    found.add(Sequence(two, two, owners=("b",)))
    prompt = (1, 2, *two[13:90], 5, *one[7:150], 9)
    segment = found.longest(prompt, 0, None)
    assert (segment.sequence.ids, segment.source, segment.start, segment.tokens) == (one, 7, 80, 143)
    segment = found.longest(prompt, 0, frozenset("b"))
    assert (segment.source, segment.start, segment.tokens) == (13, 2, 77)
    assert found.longest(prompt, 215, None) is None
    segment = found.longest(prompt, 100, None)
    assert (segment.source, segment.start) == (27, 100)
    found.add(Sequence((*one, 7), (*one, 7), owners=("a",)))
    assert len(found._known) == 2, "the longer one stands for both"
