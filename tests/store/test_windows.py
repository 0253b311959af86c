"""Layers with a window: what they look back at is kept and moved, no more; and never less, whatever is continued."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import ScriptedHost
from support import tiny_engine, tiny_tokenizer

from qkvshare_agents.eval import families
from qkvshare_agents.kv.page import Page, Precision, keep_native, seal
from qkvshare_agents.kv.shape import KVShape, LayerGroup
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model import key_calibration
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.prompt.layout import Message
from qkvshare_agents.prompt.sampling import Sampling
from qkvshare_agents.store.lookback import KEPT_POINTS
from qkvshare_agents.store.prefix_tree import SHORTEST_SLICE
from qkvshare_agents.store.shared_store import SharedPageStore
from qkvshare_agents.turns.plan import Mode
from qkvshare_agents.turns.request import Turn
from qkvshare_agents.wire import package
from qkvshare_agents.wire.package import Package
from qkvshare_agents.wire.payload import Payload

WINDOW = 24
ENGINES = {
    "mistral": tiny_engine("mistral", sliding_window=WINDOW),  # every layer
    "gemma3_text": tiny_engine("gemma3_text", sliding_window=WINDOW, head_dim=16, num_hidden_layers=6),
    "cohere2": tiny_engine("cohere2", sliding_window=WINDOW, num_hidden_layers=4),
    # windows beside full attention of another shape, and layers that use others' KV
    "gemma4_text": Engine.of(families.tiny_model("gemma4_text"), tiny_tokenizer(), name="gemma4_text"),
}
TASK = Message("user", "Write a function that adds two numbers, and then some more of them, please.", "user")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The working cache begins every turn full of NaN: what was not loaded is not there by chance."""
    original = KVCache.clear

    def clear(kv: KVCache, reserve_tokens: int) -> None:
        original(kv, reserve_tokens)
        for tensor in (t for pair in kv._held for t in pair):
            tensor.fill_(torch.nan)

    monkeypatch.setattr(KVCache, "clear", clear)
    yield


def scripted(engine: Engine, **given_settings: object) -> ScriptedHost:
    host = ScriptedHost(lambda prompt: f"Answer {len(prompt)} to what was asked.", engine=engine, **given_settings)
    for name in "abc":
        host.roster.learn("", name, f"You are {name}, and you say what {name} says.")
    return host


def turn(host: ScriptedHost, name: str, messages: list[Message]) -> Turn:
    return Turn(host.roster.members("")[name], "", tuple(messages), Sampling(max_tokens=40))


def say(host: ScriptedHost, name: str, messages: list[Message]) -> str:
    answer = host.submit(turn(host, name, messages)).result()
    messages.append(Message("assistant", answer.text, name))
    return host.modes[-1]


@pytest.mark.parametrize("kind", ENGINES)
def test_a_conversation_is_continued_exactly(kind: str) -> None:
    host = scripted(ENGINES[kind])
    messages = [TASK]
    modes = [say(host, "ab"[i % 2], messages) for i in range(8)]
    assert modes == ["TEXT", *["KV"] * 7]
    host.assert_exact()


def held_tokens(host: ScriptedHost) -> tuple[int, int]:
    """Tokens whose KV is stored: of layers with a window, and of the others (or of all, without such layers)."""
    shape = host.engine.shape
    seen, other = 0, 0
    for node in host.store.match(host.prompts[-1].ids).nodes:
        layers = {layer for part in node.page.keys for layer in part.layers}
        seen += node.page.tokens * (shape.window.layers <= layers)
        other += node.page.tokens * (frozenset(range(shape.layers)) - shape.window.layers <= layers)
    return seen, other


@pytest.mark.parametrize("kind", ENGINES)
def test_no_more_is_handed_over_or_kept_than_is_looked_back_at(kind: str) -> None:
    host = scripted(ENGINES[kind])
    messages = [TASK]
    for i in range(10):
        say(host, "ab"[i % 2], messages)
    shape, report = host.engine.shape, host.reports[-1]
    assert report.mode is Mode.KV and report.reused_tokens > 500
    windowed = sum(g.values_per_token for g in shape.groups if shape.window.layers >= set(g.layers))
    most = 4 * (shape.values_per_token - windowed) * report.reused_tokens + 4 * windowed * (WINDOW + 2 * 64)
    assert report.payload_bytes <= most < 4 * shape.values_per_token * report.reused_tokens
    seen, other = held_tokens(host)
    turns_tokens = len(host.prompts[-1].ids) - host.prompts[-3].settled
    assert seen <= turns_tokens + WINDOW + 3 * 64 < other
    host.assert_exact()


@pytest.mark.parametrize("kind", ENGINES)
def test_another_answer_resumes_before_the_cue_and_siblings_where_they_part(kind: str) -> None:
    host = scripted(ENGINES[kind])
    messages = [TASK]
    for name in "aba":
        say(host, name, messages)
    shared = list(messages)
    for name in "bcb":  # three branches behind the same message, each longer than the window
        branch = list(shared)
        assert say(host, name, branch) == "KV"
        assert host.reports[-1].reused_tokens >= host.prompts[-1].settled - 1
    host.assert_exact()


def test_where_windows_are_gone_the_text_is_read_once_and_then_they_are_back() -> None:
    host = scripted(ENGINES["gemma3_text"])
    messages = [TASK]
    for i in range(8):
        say(host, "ab"[i % 2], messages)
    past = messages[:4]
    say(host, "c", past)  # long after the windows there were forgotten
    report = host.reports[-1]
    assert report.mode is not Mode.KV and report.reused_tokens < host.prompts[-1].settled - WINDOW
    assert "windows are kept only where turns end" in report.reasons[0]
    assert say(host, "b", past) == "KV"
    assert say(host, "a", messages) == "KV", "the other branch did not lose its own"
    host.assert_exact()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_is_edited_branched_or_repeated_is_exact(data: st.DataObject) -> None:
    host = scripted(data.draw(st.sampled_from([*ENGINES.values()])))
    branches = [[TASK]]
    for _ in range(data.draw(st.integers(3, 9))):
        messages = list(data.draw(st.sampled_from(branches)))
        if data.draw(st.booleans()):
            messages = messages[: data.draw(st.integers(1, len(messages)))]
        say(host, data.draw(st.sampled_from("abc")), messages)
        branches.append(messages)
    host.assert_exact()
    host._worker.shutdown()


LONG = "Now write it once more, in other words, with some examples of what it is for, and then say why. "


def long_winded(kind: str, rules: str = "Be brief, and say only what was asked for. " * 4) -> ScriptedHost:
    """Answers, and the system text, are several times as long as the window."""
    host = ScriptedHost(lambda prompt: LONG, engine=ENGINES[kind], system=rules)
    for name in "abc":
        host.roster.learn("", name, f"You are {name}, and you say what {name} says.")
    return host


def ask(host: ScriptedHost, name: str, messages: list[Message]) -> int:
    """How many tokens were reused."""
    answer = host.submit(replace(turn(host, name, messages), sampling=Sampling(max_tokens=200))).result()
    messages.append(Message("assistant", answer.text, name))
    return host.reports[-1].reused_tokens


@pytest.mark.parametrize("kind", ENGINES)
def test_the_same_prompt_again_is_not_read_again(kind: str) -> None:
    host = long_winded(kind)
    assert [ask(host, "a", [TASK]) for _ in range(2)] == [0, len(host.prompts[0].ids) - 1]
    messages = [TASK]
    for name in "aba":
        ask(host, name, messages)
    again = ask(host, "a", messages[:-1])
    assert again > len(host.prompts[-1].ids) - 1 - SHORTEST_SLICE, "a later turn, tried again"
    assert again > host.prompts[-1].settled
    host.assert_exact()


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])
def test_other_conversations_begin_behind_the_shared_system_text(kind: str) -> None:
    host = long_winded(kind)
    messages = [TASK]
    ask(host, "a", messages)
    for number in range(3):
        ask(host, "ab"[number % 2], messages)
        other = [Message("user", f"Conversation {number} is about something else.", "user")]
        assert ask(host, "c", other) > host.prompts[-1].header - SHORTEST_SLICE > 3 * WINDOW
    host.assert_exact()


def test_what_is_kept_for_headers_and_prompts_does_not_grow_with_the_conversation() -> None:
    """One window behind the header, and what the last two turns look back at."""
    host, held = long_winded("mistral"), []
    messages = [TASK]
    for i in range(9):
        ask(host, "ab"[i % 2], messages)
        windowed, full = held_tokens(host)
        held.append(windowed)
        turns_tokens = len(host.prompts[-1].ids) + 100 - host.prompts[max(0, i - 1)].settled
        assert windowed <= turns_tokens + 2 * (WINDOW + 2 * 64)
    assert full > 2 * held[-1] and max(held[6:]) <= max(held[:6]) + 64
    host.assert_exact()


# -- between processes ---------------------------------------------------------------------------------------------


def carried(sent: Package) -> Package:
    return package.read(Payload([b"".join(sent.write().pieces)]))


@pytest.mark.parametrize("kind", ENGINES)
def test_only_the_window_travels_and_the_receiver_goes_on_exactly(kind: str) -> None:
    a, b = scripted(ENGINES[kind]), scripted(ENGINES[kind])
    messages = [TASK]
    for i in range(8):
        say(a, "ab"[i % 2], messages)
    out = a.export(turn(a, "b", messages))
    shape = a.engine.shape
    travelled = sum(step.tokens for step in out.steps if step.page.holds(shape.window.layers))
    assert WINDOW - 1 <= travelled <= WINDOW + 2 * 64 < out.covered_tokens
    assert b.adopt(carried(out)) == ()
    assert say(b, "b", messages) == "KV"
    held = b.store.held(b.prompts[-1].ids)
    say(a, "b", messages := messages[:-1])
    later = a.export(turn(a, "a", messages), have=held)
    assert any(step.page is None for step in later.steps)
    b.assert_exact()


def test_a_receiver_that_lacks_the_window_says_so_and_reads_the_text() -> None:
    a, b = (scripted(ENGINES["gemma3_text"]) for _ in range(2))
    messages = [TASK]
    for i in range(4):
        say(a, "ab"[i % 2], messages)
    out = a.export(turn(a, "b", messages))
    windows = a.engine.shape.window.layers
    bare = tuple(replace(step, page=step.page.without(windows)) for step in out.steps)
    assert "lacks layers that look back at it" in b.adopt(carried(replace(out, steps=bare)))[0]
    assert b.store.page_count == 0
    left_out = tuple(replace(step, page=None) if step.sealed else step for step in out.steps)
    assert "0 of" in b.adopt(carried(replace(out, id="0" * 32, steps=left_out)))[0]
    assert say(b, "b", messages) == "TEXT"
    b.assert_exact()


def test_pages_that_lost_their_windows_are_asked_for_again() -> None:
    """They are no longer among those that are held, where the next reader would look back at them."""
    a, b = (scripted(ENGINES["mistral"]) for _ in range(2))
    messages = [TASK]
    for i in range(4):
        say(a, "ab"[i % 2], messages)
    assert b.adopt(carried(a.export(turn(a, "b", messages)))) == ()
    past = list(messages)
    for i in range(6):
        say(b, "ab"[i % 2], messages)
    ids = b.prompts[-1].ids
    short = ids[: len(a.prompts[-1].ids)]
    nodes = [node for node in b.store._find(short).nodes if node.sealed]
    assert not any(node.key in b.store.held(short) for node in nodes[:3])
    out = a.export(turn(a, "c", past), have=b.store.held(short))
    assert b.adopt(carried(replace(out, id="1" * 32))) == ()
    assert say(b, "c", past) == "KV"
    b.assert_exact()


@pytest.mark.parametrize("kind", ENGINES)
def test_packed_windows_travel_and_wider_ones_can_be_had(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_calibration, "probed", lambda engine: (True, None))  # a scripted engine can't be probed
    a, b = (scripted(ENGINES[kind], precision="tiny", canary_limit=50.0, coarse_limit=50.0) for _ in range(2))
    messages = [TASK]
    for i in range(10):  # so many that the window reaches back into a sealed page
        say(a, "ab"[i % 2], messages)
    out = a.export(turn(a, "b", messages), wider=True)
    widths = {part.packed.bits for step in out.steps for part in step.page.parts if part.packed}
    assert widths == {8}
    assert b.adopt(carried(out)) == ()
    assert say(b, "b", messages) == "KV"


# -- the store alone -----------------------------------------------------------------------------------------------

SHAPE = KVShape(
    (LayerGroup((0,), 1, 1, 1), LayerGroup((1,), 1, 1, 1)), torch.float64, torch.device("cpu"), (None, WINDOW)
)


def number(ids: tuple[int, ...], layer: int) -> float:
    """What the KV of the last of `ids` must be: different for every prefix."""
    return float(hash((ids, layer)) % 2**40)


class Writer:
    """Turns without a model: reads what the store hands over, checks it, and stores what it `computes` behind it."""

    def __init__(self) -> None:
        self.store = SharedPageStore(b"root", 2**40, SHAPE.window)

    def take_turn(self, ids: tuple[int, ...], settled: int, header: int = 0, residual: int = 0) -> int:
        """Returns how many tokens were handed over."""
        kv = KVCache(SHAPE)
        kv.clear(len(ids))
        match = self.store.match(ids[:settled])
        kv.load(match.runs)
        at = match.tokens
        for layer, keys, values in kv.span(0, at).layers():
            first = 0 if layer == 0 else SHAPE.window.first_seen(at)
            expected = [number(ids[: i + 1], layer) for i in range(first, at)]
            assert keys[0, first:, 0].tolist() == values[0, first:, 0].tolist() == expected
        for layer in (0, 1):
            new = torch.tensor([number(ids[: i + 1], layer) for i in range(at, len(ids))], dtype=torch.float64)
            kv.append(layer, new[None, :, None], new[None, :, None])

        def make_page(start: int, stop: int, sealed: bool) -> Page:
            return keep_native(kv.span(start, stop))

        self.store.extend(
            ids, 32, len(ids) - residual, make_page, points=(settled, len(ids)), header=header, computed_from=at
        )
        assert self.store.match(ids).tokens > len(ids) - SHORTEST_SLICE, "the end of a turn can be continued from"
        return at

    def hand_over(self, other: "Writer", ids: tuple[int, ...], *, held: bool) -> None:
        steps = self.store.steps(self.store.match(ids), set(other.store.held(ids)) if held else ())
        covered = sum(step.tokens for step in steps)
        lacks = other.store.lacks(ids, steps)
        assert other.store.fits(ids, steps) and (held or not lacks)
        if not lacks:
            assert other.store.graft(ids, steps) > covered - SHORTEST_SLICE


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_what_the_store_hands_over_is_right_and_complete(data: st.DataObject) -> None:
    writers, known = [Writer(), Writer()], [()]
    for _ in range(data.draw(st.integers(1, 14))):
        writer, other = data.draw(st.permutations(writers))
        base = data.draw(st.sampled_from(known))
        if data.draw(st.booleans()):
            base = base[: data.draw(st.integers(0, len(base)))]
        if base and data.draw(st.integers(0, 2)) == 0:
            writer.hand_over(other, base, held=data.draw(st.booleans()))
            continue
        tail = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=60))
        ids = (*base, *tail)
        writer.take_turn(ids, data.draw(st.integers(0, len(ids) - 1)))
        known.append(ids)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_the_end_of_a_header_can_be_continued_from_as_long_as_it_is_stored(data: st.DataObject) -> None:
    writer, known, headers = Writer(), [()], []
    for number in range(data.draw(st.integers(2, 14))):
        base = known[-1]
        if data.draw(st.integers(0, 3)) == 0:
            base = data.draw(st.sampled_from(known))
            base = base[: data.draw(st.integers(0, len(base)))]
        ids = (*base, *[number] * data.draw(st.integers(1, 90)))
        header, settled = (data.draw(st.integers(0, len(ids) - 1)) for _ in range(2))
        if header < (at := writer.take_turn(ids, settled, header, data.draw(st.sampled_from([0, 40])))):
            assert at <= len(ids)
        elif header:
            headers.append(ids[:header])
        known.append(ids)
        for begun in headers:
            assert writer.store.match(begun).tokens > len(begun) - SHORTEST_SLICE


def test_points_stay_until_newer_ones_come() -> None:
    writer, ids, ends = Writer(), (), []
    for turn_number in range(8):
        settled = len(ids)
        ids += tuple([turn_number] * 50)
        assert writer.take_turn(ids, settled) == settled
        ends.append(len(ids))
    for end in ends[-KEPT_POINTS:]:
        assert writer.store.match(ids[:end]).tokens > end - SHORTEST_SLICE
    assert writer.store.match(ids[: ends[1]]).tokens < ends[1] - SHORTEST_SLICE
    assert writer.store.match(ids[: ends[1]]).agreeing > ends[1] - SHORTEST_SLICE


def test_sealed_pages_without_windows_are_smaller_by_just_those() -> None:
    shape = ENGINES["gemma3_text"].shape
    kv = KVCache(shape)
    kv.clear(64)
    for layer in range(shape.layers):
        kv.append(layer, torch.randn(2, 64, 16), torch.randn(2, 64, 16))
    page = seal(kv.span(0, 64), Precision(), starts_sequence=False)
    bare = page.without(shape.window.layers)
    assert bare.nbytes * shape.layers == page.nbytes * (shape.layers - len(shape.window.layers))
    assert bare.without(shape.window.layers) is bare
    assert not bare.holds(shape.window.layers) and page.holds(shape.window.layers)
