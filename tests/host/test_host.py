"""The host: one model, many agents, one turn at a time; what it keeps, what it refuses, how it ends."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedHost
from support import tiny_engine, tiny_tokenizer

from qkvshare_agents.errors import Cancelled, ContextOverflow, HostBusy, HostClosed, InvalidSetting, ModelFault
from qkvshare_agents.eval.families import tiny_model as tiny_family
from qkvshare_agents.host.host import Host
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.prompt.layout import Message
from qkvshare_agents.prompt.members import Member
from qkvshare_agents.prompt.sampling import Sampling
from qkvshare_agents.settings import HostSettings
from qkvshare_agents.turns.request import Turn

# One of each kind of layer: attention, a window, state beside attention, state only
_ENGINES = [
    tiny_engine(),
    *(Engine.of(tiny_family(f), tiny_tokenizer()) for f in ("gemma3_text", "qwen3_5_text", "mamba2")),
]
TASK = Message("user", "Say something long enough to fill a page or two of the cache, please.", "user")


def turn(name: str = "a", *messages: Message, instruction: str = "", **options: object) -> Turn:
    sampling = Sampling(**{"max_tokens": 20, **options})
    return Turn(Member(name, name, instruction), "", messages or (TASK,), sampling)


def host(**settings: object) -> Host:
    return Host(HostSettings("tiny", **{"precision": "native", **settings}), tiny_engine())


def converse(h: Host, rounds: int = 6, **options: object) -> list[str]:
    """Two members answer in turn; returns what they said."""
    messages, said = [TASK], []
    for i in range(rounds):
        name = "ab"[i % 2]
        member = h.roster.learn("", name, f"You are {name}.")
        answer = h.submit(Turn(member, "", tuple(messages), Sampling(**{"max_tokens": 20, **options}))).result()
        messages.append(Message("user", answer.text, name))
        said.append(answer.text)
    return said


def test_handoff_says_the_same_as_text_replay() -> None:
    """The product's promise, with free decoding: native KV gives the texts that reading everything again gives."""
    with_kv, without = host(), host(handoff=False)
    assert converse(with_kv) == converse(without)
    assert [r.mode.value for r in with_kv.reports] == ["TEXT", *["KV"] * 5]
    assert [r.mode.value for r in without.reports] == ["TEXT"] * 6
    assert all("switched off" in r.reasons[0] for r in without.reports)


@pytest.mark.parametrize("packed_history", [False, True])
def test_answers_longer_than_the_room_that_was_made_for_them(packed_history: bool) -> None:
    """The working cache grows within a forward then, and the next turn writes into it."""
    h = ScriptedHost(lambda _: "word " * 900, packed_history=packed_history)
    messages = [TASK]
    for name in "ab":
        member = h.roster.learn("", name, f"You are {name}.")
        answer = h.submit(Turn(member, "", tuple(messages), Sampling(max_tokens=900))).result()
        messages.append(Message("assistant", answer.text, name))
    assert h.modes == ["TEXT", "KV"] and h.reports[0].generated_tokens == 900
    h.assert_exact()


@pytest.mark.parametrize("layout", ["relay", "stock"])
def test_sampled_turns_repeat_for_a_seed(layout: str) -> None:
    first, second = host(layout=layout), host(layout=layout, handoff=False)
    assert converse(first, temperature=0.8, seed=5) == converse(second, temperature=0.8, seed=5)


_WORDS = st.sampled_from(["Write add.", "Thanks, go on with the next function please.", "", "<|im_end|>"])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_whatever_messages_come_in_the_right_ids_meet_the_right_kv(data: st.DataObject) -> None:
    """Messages edited, repeated, dropped from anywhere, between any speakers: what is fed is the laid-out prompt
    behind KV of exactly its leading ids. The scripted host checks every turn's logits against one forward."""
    engine = data.draw(st.sampled_from(_ENGINES))
    h = ScriptedHost(lambda prompt: f"Answer {len(prompt)} to what was asked here.", engine=engine)
    messages: list[Message] = [TASK]
    for _ in range(data.draw(st.integers(2, 6))):
        name = data.draw(st.sampled_from("abc"))
        member = h.roster.learn("", name, f"You are {name}, and you say what {name} says.")
        answer = h.submit(Turn(member, "", tuple(messages), Sampling(max_tokens=30))).result()
        report = answer.report
        assert 0 <= report.reused_tokens < report.prompt_tokens == len(h.prompts[-1].ids)
        messages.append(Message(data.draw(st.sampled_from(["user", "assistant"])), answer.text, name))
        edit, at = (
            data.draw(st.sampled_from(["none", "drop", "repeat", "change"])),
            data.draw(st.integers(0, len(messages) - 1)),
        )
        if edit == "drop":
            del messages[at]
        elif edit == "repeat":
            messages.insert(at, messages[at])
        elif edit == "change":
            messages[at] = Message("user", data.draw(_WORDS), data.draw(st.sampled_from(["user", "a", "nobody"])))
    h.assert_exact()
    h._worker.shutdown()


def test_reports_count_every_token_once() -> None:
    h = host(measure_replay=True)
    converse(h, 4)
    reports = list(h.reports)
    for report in reports:
        assert report.reused_tokens + report.prefilled_tokens == report.prompt_tokens
        assert report.replay_first_token_ms and report.first_token_ms > 0
        assert report.to_dict()["mode"] in ("KV", "TEXT")
    assert reports[1].source == "a" and reports[2].source == "b"
    assert reports[1].payload_bytes > 0 and reports[1].fp16_bytes > 0


def test_repeating_a_turn_encodes_nothing_again() -> None:
    h = host(precision="safe")
    h.submit(turn()).result()
    pages, kept = h.store.page_count, h.store.nbytes
    again = h.submit(turn()).result()
    assert again.report.prefilled_tokens == 1
    assert (h.store.page_count, h.store.nbytes) == (pages, kept)


def test_turns_run_in_the_order_they_came() -> None:
    h, order = host(), []
    release = threading.Event()
    first = h.submit(turn(), on_text=lambda _: release.wait(10))
    futures = [h.submit(turn("a", Message("user", f"question {i}", "user"))) for i in range(8)]
    for i, future in enumerate(futures):
        future.add_done_callback(lambda _, i=i: order.append(i))
    release.set()
    first.result()
    [f.result() for f in futures]
    assert order == list(range(8))


def test_threads_share_one_host() -> None:
    h, answers = host(), []

    def ask(i: int) -> None:
        answers.append(h.submit(turn("a", Message("user", f"question {i % 4}", "user"))).result().text)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
    [t.start() for t in threads]
    [t.join(60) for t in threads]
    assert len(answers) == 16 and len(set(answers)) <= 4


def test_cancelling_before_the_first_token_and_in_between_keeps_nothing() -> None:
    h, stop = host(), threading.Event()
    stop.set()
    with pytest.raises(Cancelled, match="before it began"):
        h.submit(turn(), cancelled=stop).result()
    stop = threading.Event()
    heard: list[str] = []

    def hear(piece: str) -> None:
        heard.append(piece)
        stop.set()

    with pytest.raises(Cancelled, match=r"after \d+ tokens"):
        h.submit(turn(max_tokens=500), on_text=hear, cancelled=stop).result()
    assert heard and h.store.page_count == 0 and not h.reports
    assert h.submit(turn()).result().text


def test_a_failing_listener_does_not_poison_the_host() -> None:
    h = host()

    def broken(_: str) -> None:
        raise OSError("the listener is gone")

    with pytest.raises(OSError, match="listener"):
        h.submit(turn(), on_text=broken).result()
    assert h.submit(turn()).result().text


def test_changed_weights_never_read_old_kv() -> None:
    h = host()
    h.submit(turn()).result()
    with torch.no_grad():
        h.engine.model.model.layers[0].mlp.down_proj.weight.mul_(1.01)
    changed = h.submit(turn()).result()
    assert changed.report.mode.value == "TEXT" and changed.report.reused_tokens == 0


def test_another_salt_misses_and_the_same_salt_hits() -> None:
    engine = tiny_engine()
    roots = []
    for salt in ("tenant-a", "tenant-a", "tenant-b", ""):
        h = Host(HostSettings("tiny", salt=salt), engine)
        roots.append(h.store._root.key)
        assert salt.encode() not in roots[-1] or not salt
    assert roots[0] == roots[1] and len(set(roots)) == 3
    assert "tenant-a" not in repr(HostSettings("tiny", salt="tenant-a"))


def test_a_budget_that_holds_nothing_replays_text_and_says_why() -> None:
    h = host(budget_bytes=0)
    converse(h, 3)
    assert h.store.nbytes == 0
    assert [r.mode.value for r in h.reports] == ["TEXT"] * 3
    assert "evicted" in list(h.reports)[2].reasons[0]


def test_kv_that_can_not_be_encoded_is_not_kept_and_the_answer_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    h = host(precision="safe")
    monkeypatch.setattr("qkvshare_agents.turns.store_turn.seal", _refuse)
    answer = h.submit(turn()).result()
    assert answer.text and "not kept" in answer.report.reasons[-1] and h.store.page_count == 0


def _refuse(*_: object, **__: object) -> None:
    from qkvshare_agents.errors import CodecError

    raise CodecError("keys or values hold NaN")


def test_unsupported_families_answer_by_text_replay() -> None:
    h = Host(HostSettings("tiny"), tiny_engine("rwkv", attention_hidden_size=48))
    converse(h, 3)
    assert all(r.mode.value == "TEXT" and "rwkv" in r.reasons[0] for r in h.reports)


def test_length_dependent_rope_replays_text_beyond_the_switch() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    engine = tiny_engine(max_position_embeddings=4096, rope_parameters=rope)
    engine.driver.kv_limit_tokens = 200
    h = Host(HostSettings("tiny", precision="native"), engine)
    converse(h, 4)
    modes = [r.mode.value for r in h.reports]
    assert modes[0] == "TEXT" and modes[-1] == "TEXT" and "rotary" in list(h.reports)[-1].reasons[0]


def test_context_limits_the_answer_and_overflow_is_an_error() -> None:
    engine = tiny_engine(max_position_embeddings=160)
    h = Host(HostSettings("tiny", precision="native", system="", fit="error"), engine)
    prompt = len(h.prompt(turn()).ids)
    answer = h.submit(turn(max_tokens=None)).result()
    assert answer.finish_reason in ("length", "stop")
    assert answer.prompt_tokens + answer.completion_tokens <= 160 and answer.prompt_tokens == prompt
    with pytest.raises(ContextOverflow, match=r"> 160 \(a\)"):
        h.submit(turn("a", Message("user", "word " * 300, "user"))).result()


def test_thoughts_stay_with_their_member() -> None:
    said = iter(["<think>\nThe secret is 42.\n</think>\n\nI know it.", "Fine."])
    h = ScriptedHost(lambda _: next(said))
    member = h.roster.learn("", "a", "You think.")
    first = h.submit(Turn(member, "", (TASK,))).result()
    assert first.text == "I know it." and first.thought and "42" in first.thought
    other = h.roster.learn("", "b", "You check.")
    second = h.submit(Turn(other, "", (TASK, Message("user", first.text, "a")))).result()
    assert "42" not in h.texts[1] and "I know it." in h.texts[1]
    assert second.report.mode.value == "PARTIAL"
    h.assert_exact()


def test_closed_and_forked_hosts_refuse_work(monkeypatch: pytest.MonkeyPatch) -> None:
    h = host()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(HostClosed, match="forked"):
        h.submit(turn())
    monkeypatch.undo()
    h.close()
    with pytest.raises(HostClosed, match="closed"):
        h.submit(turn())


@pytest.mark.parametrize("ask", ["result", "exception"])
def test_waiting_in_a_callback_for_a_later_turn_is_an_error_and_queueing_one_is_not(ask: str) -> None:
    h, later, errors = host(), [], []

    def on_text(_: str) -> None:
        if not later:
            later.append(h.submit(turn("b")))
            try:
                getattr(later[0], ask)()
            except HostBusy as error:
                errors.append(str(error))

    assert h.submit(turn(), on_text=on_text).result(timeout=30).completion_tokens
    assert len(errors) == 1 and "add_done_callback" in errors[0]
    assert later[0].result(timeout=30).completion_tokens
    told: list[int] = []
    later[0].add_done_callback(lambda done: told.append(done.result().completion_tokens))  # done: nobody waits
    assert told == [later[0].result().completion_tokens]


def test_closing_in_a_callback_lets_the_turn_end_and_refuses_the_next() -> None:
    h, queued = host(), []

    def on_text(_: str) -> None:
        if not queued:
            queued.append(h.submit(turn("b")))
            h.close()
            with pytest.raises(HostClosed):
                queued.append(h.submit(turn("c")).result)
                queued[-1](timeout=30)

    future = h.submit(turn(), on_text=on_text)
    deadline = time.monotonic() + 30
    while not future.done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert future.result(timeout=0).completion_tokens
    with pytest.raises(HostClosed):
        queued[0].result(timeout=30)
    with pytest.raises(HostClosed):
        h.submit(turn()).result(timeout=30)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("first", [0, 5])
def test_logits_that_are_no_numbers_end_the_turn_with_an_error(temperature: float, value: float, first: int) -> None:
    h = host()
    before = h.submit(turn()).result()
    pages, turns, calls = h.store.page_count, len(h.reports), []

    def spoil(_: object, __: object, logits: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return logits.index_fill(-1, torch.tensor([7]), value) if len(calls) > first else logits

    hook = h.engine.model.lm_head.register_forward_hook(spoil)
    question = Message("user", "Another question, and a long one.", "user")
    with pytest.raises(ModelFault, match="NaN or Inf"):
        h.submit(turn("b", question, temperature=temperature)).result()
    hook.remove()
    assert (h.store.page_count, len(h.reports)) == (pages, turns), "nothing of it was kept"
    assert h.submit(turn()).result().text == before.text


def test_settings_are_checked() -> None:
    with pytest.raises(InvalidSetting, match="safe"):
        HostSettings("m", precision="int7")
    with pytest.raises(InvalidSetting, match="relay"):
        HostSettings("m", layout="ring")
    with pytest.raises(InvalidSetting, match="budget_bytes"):
        HostSettings("m", budget_bytes=-1)
    with pytest.raises(TypeError):
        HostSettings("m", bugdet=1)


WRONG: dict[str, object] = {
    "budget_bytes": "2GB", "average_bits": "3", "context_tokens": 2048.0, "refresh_every": True, "coarse_limit": None,
    "canary_limit": "high", "recompute_tokens": None, "projectors": "one.safetensors", "device": 0, "device_map": 1,
    "handoff": "no", "splice": 1, "thinking": "yes", "measure_replay": None, "packed_history": 0, "system": None,
    "offload_folder": 3, "attn_implementation": 7, "layout": 1, "fit": None, "lora": 0, "decoding": None, "dtype": 16,
    "precision": 8, "salt": b"s3cret", "secret": 5.5, "share": None, "repeat_instruction_tokens": "96",
}  # fmt: skip


@pytest.mark.parametrize("name", [f.name for f in fields(HostSettings) if f.name != "model"])
def test_the_type_of_every_setting_is_checked(name: str) -> None:
    with pytest.raises(InvalidSetting, match=f"^{name} must be ") as error:
        HostSettings("m", **{name: WRONG[name]})
    assert "s3cret" not in str(error.value)
    assert name != "budget_bytes" or "2 * 1024**3" in str(error.value)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
def test_a_forked_child_opens_hosts_of_its_own() -> None:
    code = """
import os, sys
sys.path[:0] = ["tests", "tests/host"]
from support import tiny_engine
from qkvshare_agents.host import registry
from test_host import HostClosed, HostSettings, turn
engine = tiny_engine()
parents = registry.open_host(HostSettings("tiny"), "shared", engine=engine)
said = parents.submit(turn()).result().text
child = os.fork()
if not child:
    try:
        parents.submit(turn())
    except HostClosed:
        parents.close()
        own = registry.open_host(HostSettings("tiny"), "shared", engine=engine)
        os._exit(own is parents or own.submit(turn()).result(timeout=30).text != said)
    os._exit(2)
print(os.waitpid(child, 0)[1], parents.submit(turn()).result().text == said)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["0", "True"], done.stdout + done.stderr


def test_many_handoffs_keep_memory_flat() -> None:
    """A long chain within a small budget: bytes stay below it, and turns keep working."""
    h = host(precision="safe", budget_bytes=60_000)
    started = time.monotonic()
    for i in range(60):
        h.submit(turn("ab"[i % 2], Message("user", f"conversation {i} " + "word " * 20, "user"), max_tokens=4)).result()
        assert h.store.nbytes <= 60_000
    assert h.store.evicted_pages > 0 and time.monotonic() - started < 60
