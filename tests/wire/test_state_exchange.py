"""Recurrent state between processes: what it is continued from, and what is refused with a reason."""

from dataclasses import replace

import pytest
import torch
from packages import SECRET
from scripted import ScriptedHost
from support import of_words, tiny_engine, tiny_tokenizer

from qkvshare_agents.errors import PackageError
from qkvshare_agents.eval import families
from qkvshare_agents.host.host import Host
from qkvshare_agents.kv.state import State, StatePart
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.prompt.layout import Message
from qkvshare_agents.prompt.sampling import Sampling
from qkvshare_agents.settings import HostSettings
from qkvshare_agents.turns.request import Turn
from qkvshare_agents.wire import package
from qkvshare_agents.wire.package import Package
from qkvshare_agents.wire.payload import Payload

STATEFUL = (
    "qwen3_next", "qwen3_5_text", "olmo_hybrid", "lfm2", "mamba", "falcon_mamba", "mamba2", "falcon_h1", "zamba2",
    "granitemoehybrid", "jamba", "bamba", "nemotron_h", "kimi_linear", "qwen4_exp_text",
)  # fmt: skip
TASK = Message("user", "Say something long enough to fill a page or two of the cache, please.", "user")


def say(prompt: str) -> str:
    return f"The answer number {len(prompt)} in some words, enough of them to fill a page or so."


def scripted(family: str = "qwen3_5_text", **settings: object) -> ScriptedHost:
    engine = Engine.of(families.tiny_model(family), tiny_tokenizer(), name=family)
    host = ScriptedHost(say, engine=engine, secret=SECRET, **settings)
    for name in "ab":
        host.roster.learn("", name, f"You are {name}.")
    return host


def turn(host: Host, name: str, messages: list[Message]) -> Turn:
    return Turn(host.roster.members("")[name], "", tuple(messages), Sampling(max_tokens=90))


def answered(host: Host, name: str, messages: list[Message]) -> list[Message]:
    answer = host.submit(turn(host, name, messages)).result()
    return [*messages, Message("assistant", answer.text, name)]


def carried(package_: Package) -> Package:
    """Over bytes and back."""
    payload = package_.write(secret=SECRET)
    return package.read(Payload([b"".join(payload.pieces)]), secret=SECRET)


@pytest.fixture(scope="module")
def sent() -> tuple[Package, list[Message]]:
    a = scripted()
    messages = answered(a, "a", [TASK])
    return a.export(turn(a, "b", messages)), messages


@pytest.mark.parametrize("family", STATEFUL)
def test_a_conversation_goes_on_in_another_process_and_back(family: str) -> None:
    """The scripted hosts compare the logits behind what came with one forward over the whole prompt."""
    a, b = scripted(family), scripted(family)
    messages = answered(a, "a", [TASK])
    out = a.export(turn(a, "b", messages))
    assert out.state and out.state.tokens == out.covered_tokens
    arrival = b.take(carried(out))
    assert arrival.reasons == () and arrival.canary_nats is not None and abs(arrival.canary_nats) < 1e-6
    messages = answered(b, "b", messages)
    back = b.export(turn(b, "a", messages), have=a.store.held(out.ids))
    assert sum(step.page is not None for step in back.steps) < len(back.steps)
    assert a.take(carried(back)).reasons == ()
    answered(a, "a", messages)
    assert a.modes == ["TEXT", "KV"] and b.modes == ["KV"]
    assert b.reports[0].reused_tokens == out.covered_tokens
    a.assert_exact()
    b.assert_exact()


def test_what_an_indexer_keeps_goes_along() -> None:
    a, b = scripted("deepseek_v32"), scripted("deepseek_v32")
    messages = answered(a, "a", [TASK])
    out = a.export(turn(a, "b", messages))
    assert out.state is None and [len(group.layers) for group in out.groups] == [3, 3]
    assert b.take(carried(out)).reasons == ()
    answered(b, "b", messages)
    assert b.modes == ["KV"]
    b.assert_exact()


@pytest.mark.parametrize("precision", ["native", "safe", "tiny"])
def test_two_processes_say_what_one_says(precision: str) -> None:
    def opened() -> Host:
        engine = Engine.of(of_words(families.tiny_model("falcon_h1")), tiny_tokenizer())
        host = Host(HostSettings("tiny", precision=precision, secret=SECRET), engine)
        for name in "ab":
            host.roster.learn("", name, f"You are {name}.")
        return host

    a, b, alone = opened(), opened(), opened()
    messages = answered(a, "a", [TASK])
    assert answered(alone, "a", [TASK]) == messages
    for hop in range(4):
        sender, receiver, name = (a, b, "b") if hop % 2 == 0 else (b, a, "a")
        assert receiver.adopt(carried(sender.export(turn(sender, name, messages)))) == ()
        expected = answered(alone, name, messages)
        messages = answered(receiver, name, messages)
        assert messages == expected
    assert {r.mode.value for r in [*b.reports, *list(a.reports)[1:]]} == {"KV"}


def _changed(state: State, which: int, **fields: object) -> State:
    parts = list(state.parts)
    parts[which] = replace(parts[which], **fields)
    return replace(state, parts=tuple(parts))


DAMAGE = {
    "missing": (lambda s: None, "lacks the recurrent state"),
    "of another position": (lambda s: replace(s, tokens=s.tokens - 1), "behind 253 tokens, its KV of 254"),
    "a tensor less": (lambda s: replace(s, parts=s.parts[:-1]), "another than this model's: 5 tensors, not 6"),
    "a tensor more": (lambda s: replace(s, parts=(*s.parts, StatePart(9, "x", torch.ones(2)))), "7 tensors, not 6"),
    "another shape": (lambda s: _changed(s, 1, tensor=s.parts[1].tensor[..., :-1]), "another than this model's"),
    "another dtype": (lambda s: _changed(s, 1, tensor=s.parts[1].tensor.half()), "float16"),
    "another name": (lambda s: _changed(s, 1, name="recurrent_states.1"), "recurrent_states.1 of layer 0"),
    "of another layer": (lambda s: _changed(s, 1, layer=1), "recurrent_states.0 of layer 1"),
    "in another order": (lambda s: replace(s, parts=s.parts[::-1]), "another than this model's"),
    "layers swapped": (
        lambda s: replace(
            s, parts=tuple(replace(p, tensor=q.tensor) for p, q in zip(s.parts, s.parts[2:] + s.parts[:2], strict=True))
        ),
        "off its canary",
    ),
    "nothing but zeros": (
        lambda s: replace(s, parts=tuple(replace(p, tensor=torch.zeros_like(p.tensor)) for p in s.parts)),
        "off its canary",
    ),
    "huge": (lambda s: _changed(s, 1, tensor=s.parts[1].tensor * 1e30), "off its canary"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_state_that_is_not_the_right_one_is_text_with_a_reason(sent, damage, reason: str) -> None:
    out, messages = sent
    b = scripted()
    arrival = b.take(replace(out, state=damage(out.state), id="0" * 32))
    assert reason in arrival.reasons[0]
    assert b.store.page_count == 0 and b.load().snapshots.nbytes == 0, "never a partial cache"
    b.submit(replace(turn(b, "b", messages), arrival=arrival)).result()
    assert b.modes == ["TEXT"] and b.reports[0].reasons[0] == arrival.reasons[0]
    b.assert_exact()


def test_state_of_another_conversation_is_found_out(sent) -> None:
    out, _ = sent
    other = scripted("qwen3_5_text")
    messages = answered(other, "b", answered(other, "a", [Message("user", "Another text of a few words.", "user")]))
    theirs = other.export(turn(other, "a", messages)).state
    arrival = scripted().take(replace(out, state=replace(theirs, tokens=out.covered_tokens)))
    assert arrival.alarmed and "off its canary" in arrival.reasons[0]


def test_state_for_a_model_without_any_is_refused(sent) -> None:
    out, _ = sent
    host = ScriptedHost(say, engine=tiny_engine(), secret=SECRET)
    shape = host.engine.shape
    arrival = host.take(replace(out, fingerprint=host.fingerprint, groups=shape.groups))
    assert arrival.reasons == ("the package has recurrent state, and this model has none",)


def test_state_is_checked_also_where_all_pages_are_known(sent) -> None:
    out, messages = sent
    b = scripted()
    assert b.take(replace(out, id="1" * 32)).reasons == ()
    b.load().snapshots.clear()
    zeros = replace(out.state, parts=tuple(replace(p, tensor=torch.zeros_like(p.tensor)) for p in out.state.parts))
    assert b.take(replace(out, state=zeros, id="2" * 32)).alarmed
    assert b.take(replace(out, id="3" * 32)).reasons == ()
    answered(b, "b", messages)
    assert b.modes == ["KV"]
    b.assert_exact()


def test_state_that_is_gone_stays_here_and_is_text_there() -> None:
    a = scripted()
    messages = answered(a, "a", [TASK])
    a.load().snapshots.clear()
    with pytest.raises(PackageError, match="recurrent state behind it is no longer stored"):
        a.export(turn(a, "b", messages))


def test_state_that_does_not_fit_into_the_budget_is_text_with_a_reason(sent) -> None:
    out, messages = sent
    b = scripted()
    b.load().snapshots.budget_bytes = out.state.nbytes - 1
    arrival = b.take(replace(out, id="4" * 32))
    assert arrival.reasons == ("the recurrent state that came over does not fit into budget_bytes",)
    answered(b, "b", messages)
    assert b.modes == ["TEXT"]
    b.assert_exact()


def test_an_edited_conversation_goes_on_from_the_state_before_the_edit() -> None:
    a, b = scripted(), scripted()
    first = answered(a, "a", [TASK])
    before = a.export(turn(a, "b", first)).covered_tokens
    edited = [*answered(a, "b", first)[:-1], Message("assistant", "Something that nobody generated.", "b")]
    out = a.export(turn(a, "a", edited))
    assert out.covered_tokens == out.state.tokens == before
    assert b.take(carried(out)).reasons == ()
    answered(b, "a", edited)
    assert b.modes == ["PARTIAL"] and b.reports[0].reused_tokens == before
    b.assert_exact()


def test_pages_that_are_too_coarse_are_sent_wider() -> None:
    """Measured behind the native cache of the turn, as long as that is there: the text's own canary can't be had."""
    coarse = scripted("falcon_h1", precision="tiny", coarse_limit=1e-4)
    messages = answered(coarse, "a", [TASK])
    out = coarse.export(turn(coarse, "b", messages))
    assert {part.packed.bits for step in out.steps for part in step.page.parts if part.packed} == {8}
    b = scripted("falcon_h1", precision="tiny", coarse_limit=1e-4)
    assert b.take(carried(out)).reasons == ()
    # another turn ran since: nothing to compare with, and nothing wider to send
    coarse._load().runner._working.held = ()
    out = coarse.export(turn(coarse, "b", messages))
    assert {part.packed.bits for step in out.steps for part in step.page.parts if part.packed} == {3, 2}
    with pytest.raises(PackageError, match="another turn ran since"):
        coarse.export(turn(coarse, "b", messages), wider=True)


def test_state_that_grows_stays_in_its_process() -> None:
    a = scripted("deepseek_v4")
    messages = answered(a, "a", [TASK])
    with pytest.raises(PackageError, match="grows with its tokens"):
        a.export(turn(a, "b", messages))


def test_a_full_context_is_not_sent() -> None:
    a = scripted()
    messages = answered(a, "a", [TASK])
    a.engine._engine.driver.context_tokens = a.export(turn(a, "b", messages)).covered_tokens
    with pytest.raises(PackageError, match="context is full"):
        a.export(turn(a, "b", messages))


def test_what_came_is_not_kept_alive_by_its_package(sent) -> None:
    out, _ = sent
    b = scripted()
    b.take(replace(out, id="5" * 32))
    assert b.load().snapshots.nbytes == out.state.nbytes
    held = b.load().snapshots.longest(out.ids)
    ours = {t.data_ptr() for layer in held.layers for t in layer["conv_states"].values()}
    assert not ours & {part.tensor.data_ptr() for part in out.state.parts}
