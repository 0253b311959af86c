"""Conversations that go on in other processes, without keys being passed: here several hosts over one store."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from courier_child import SECRET, TASK
from scripted import ScriptedHost
from servers import free_port, valkey  # noqa: F401
from support import of_words, tiny_engine, tiny_tokenizer

from qkvshare_agents.errors import HostConflict, InvalidSetting, TransportTimeout
from qkvshare_agents.eval import families
from qkvshare_agents.host import registry
from qkvshare_agents.host.courier import Courier
from qkvshare_agents.host.host import Host
from qkvshare_agents.host.sharing_host import SharingHost
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.prompt.layout import Message
from qkvshare_agents.prompt.sampling import Sampling
from qkvshare_agents.settings import HostSettings
from qkvshare_agents.transport import interface
from qkvshare_agents.transport.interface import Transport
from qkvshare_agents.transport.shm import ShmTransport
from qkvshare_agents.turns.access import Access
from qkvshare_agents.turns.request import Turn
from qkvshare_agents.wire.package import read
from qkvshare_agents.wire.payload import Payload

NAMES = "abc"


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy machines are no fault that these tests are about: neither late answers, nor text that is faster."""
    monkeypatch.setattr(SharingHost, "deadline_ms", 20_000.0)
    monkeypatch.setattr(Courier, "slower_than_text", lambda *_: None)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `share="shm"` puts its packages in this test."""
    place = tmp_path / "packages"
    monkeypatch.setattr("qkvshare_agents.transport.shm.default_directory", lambda: place)
    return place


def open_host(family: str = "", **settings: object) -> Host:
    kind = SharingHost if settings.get("share", "shm") else Host
    engine = Engine.of(of_words(families.tiny_model(family)), tiny_tokenizer()) if family else tiny_engine()
    host = kind(HostSettings("tiny", **{"precision": "native", "share": "shm", **settings}), engine)
    for name in NAMES:
        host.roster.learn("", name, f"You are {name}, and you say what {name} says.")
    return host


def say(host: Host, name: str, messages: list[Message], **fields: object) -> None:
    turn = Turn(host.roster.members("")[name], "", tuple(messages), Sampling(max_tokens=60), **fields)
    messages.append(Message("assistant", host.submit(turn).result().text, name))


def converse(hosts: dict[str, Host], turns: int = 6) -> list[Message]:
    messages = [TASK]
    for name in (NAMES * turns)[:turns]:
        say(hosts[name], name, messages)
    return messages


def modes(host: Host) -> list[str]:
    return [report.mode.value for report in host.reports]


@pytest.mark.parametrize(
    ("where", "family"), [("shm", ""), ("redis", ""), ("shm", "qwen3_5_text"), ("shm", "mamba"), ("redis", "falcon_h1")]
)
def test_a_conversation_over_three_processes(
    where: str, family: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    place = {"share": "shm"}
    if where == "redis":
        place = {"share": request.getfixturevalue("valkey"), "secret": SECRET}
    apart, alone = {name: open_host(family, **place) for name in NAMES}, open_host(family, share="")
    got, want = converse(apart), converse(dict.fromkeys(NAMES, alone))
    assert got == want, [[(r.mode, r.reasons) for r in h.reports] for h in apart.values()]
    told = [[r.mode.value for r in host.reports] for host in apart.values()]
    assert told == [["TEXT", "KV"], ["KV", "KV"], ["KV", "KV"]]
    together = list(alone.reports)
    for turn, report in enumerate(r for pair in zip(*(h.reports for h in apart.values()), strict=True) for r in pair):
        assert (report.reused_tokens, report.source) == (together[turn].reused_tokens, together[turn].source)
        assert report.reasons == () or turn == 0
        assert bool(report.transfer_ms) == (turn > 0)


def test_only_new_pages_travel_and_a_late_process_finds_the_earlier_ones(folder: Path) -> None:
    a, b, c = (open_host() for _ in NAMES)
    messages, sizes = [TASK], []
    for turn in range(8):
        say((a, b)[turn % 2], NAMES[turn % 2], messages)
        sizes.append(sum(file.nbytes for file in ShmTransport().files()))
    published = [after - before for before, after in zip([0, *sizes], sizes, strict=False)]
    whole = c.export(Turn(a.roster.members("")["a"], "", (TASK,))) if c.store.page_count else None
    assert whole is None
    assert max(published[4:]) < sizes[-1] / 3, "the whole conversation was published again"
    say(c, "c", messages)
    assert modes(c) == ["KV"] and c.reports[0].reasons == ()
    assert c.reports[0].reused_tokens >= a.reports[-1].prompt_tokens


def test_parts_that_are_gone_are_text_with_a_reason(folder: Path) -> None:
    """Words of a package whose KV is not used are not used either: the text is encoded as by whoever finds nothing."""
    a, b, c, alone = open_host(), open_host(), open_host(), open_host(share="", handoff=False)
    messages = [TASK]
    for turn in range(4):
        say((a, b)[turn % 2], NAMES[turn % 2], messages)
    transport = ShmTransport()
    newest = max(transport.files(), key=lambda file: file.expires_s)
    for file in list(transport.files()):
        if file.key != newest.key:
            transport.delete(file.key)
    again = list(messages)
    say(c, "c", messages)
    say(alone, "c", again)
    assert messages == again
    assert modes(c) == ["TEXT"] and "not here" in c.reports[0].reasons[0]


def test_a_page_that_was_not_published_travels_with_the_next_package(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = open_host(), open_host()
    messages = [TASK]
    with monkeypatch.context() as broken:
        broken.setattr(a._transport, "put", _full)
        say(a, "a", messages)
    a._paused_until = 0.0
    say(a, "a", messages)
    say(b, "b", messages)
    assert modes(b) == ["KV"] and b.reports[0].reused_tokens > a.reports[0].prompt_tokens


def _full(*_: object, **__: object) -> None:
    from qkvshare_agents.errors import TransportError

    raise TransportError("full")


@pytest.mark.parametrize("differs", ["salt", "secret"])
def test_who_has_another_salt_or_secret_finds_nothing(differs: str, folder: Path) -> None:
    a, b = open_host(secret=SECRET), open_host(**{"secret": SECRET, differs: "quite another one, and long enough"})
    messages = [TASK]
    say(a, "a", messages)
    names = [file.key for file in ShmTransport().files()]
    assert len(names) == 1 and SECRET not in names[0]
    say(b, "b", messages)
    assert modes(b) == ["TEXT"] and b.store.page_count > 0 and not b.reports[0].transfer_ms


def test_a_store_that_is_down_is_text_and_waited_for_once(caplog: pytest.LogCaptureFixture) -> None:
    place = f"redis://:hush@127.0.0.1:{free_port()}/0"
    a, b = open_host(share=place, secret=SECRET), open_host(share=place, secret=SECRET)
    messages = [TASK]
    with caplog.at_level(logging.WARNING):
        for host, name in ((a, "a"), (b, "b"), (a, "a"), (b, "b"), (b, "b")):
            say(host, name, messages)
    assert modes(a) == ["TEXT", "PARTIAL"] and modes(b) == ["TEXT", "PARTIAL", "KV"]
    first, second, third = b.reports
    assert "not looked for over redis" in first.reasons[0] and "moments ago" in second.reasons[0]
    assert third.reasons == (), "its own answer is not looked for elsewhere"
    assert len(caplog.records) == 1
    assert "hush" not in caplog.text


class Scripted(ScriptedHost, SharingHost):
    pass


def test_calls_are_not_published(folder: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    host = Scripted(lambda _: '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>', share="shm")
    host.roster.learn("", "a", "You add.", (tool,))
    member = host.roster.members("")["a"]
    answer = host.submit(Turn(member, "", (TASK,), Sampling(max_tokens=60), tools=(tool,))).result()
    assert answer.calls and not list(ShmTransport().files())


def test_owners_come_over_to_those_who_may_read_them(folder: Path) -> None:
    a, friend, stranger = open_host(), open_host(), open_host()
    messages = [TASK]
    say(a, "a", messages, access=Access(("a of thread 1",), frozenset({"a of thread 1"})))
    again = list(messages)
    say(friend, "b", messages, access=Access(("b",), frozenset({"b", "a of thread 1"})))
    say(stranger, "b", again, access=Access(("b",), frozenset({"b", "a of thread 2"}), "not annotated"))
    assert modes(friend) == ["KV"] and modes(stranger) == ["TEXT"]
    text = b"".join(bytes(p) for f in ShmTransport().files() for p in ShmTransport().get(f.key).pieces)
    assert b"thread 1" not in text and "not annotated" in stranger.reports[0].reasons


def test_the_registry_opens_it_and_nothing_shows_the_address(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKVSHARE_SHARE", "shm")
    settings = HostSettings("tiny")
    assert settings.share == "shm" and "share" not in repr(settings)
    host = registry.open_host(settings, "shared", engine=tiny_engine())
    try:
        assert isinstance(host, SharingHost)
        with pytest.raises(HostConflict, match="share"):
            registry.open_host(HostSettings("tiny", share=""), "shared")
    finally:
        registry.release_host(settings, "shared")


@pytest.mark.parametrize("share", ["shared", "http://localhost", "redis:localhost", "/dev/shm"])
def test_addresses_that_are_none(share: str) -> None:
    with pytest.raises(InvalidSetting, match="QKVSHARE_SHARE"):
        SharingHost(HostSettings("tiny", share=share), tiny_engine())


def test_packages_of_others_can_not_name_endless_parts(folder: Path) -> None:
    a, b = open_host(), open_host()
    messages = [TASK]
    say(a, "a", messages)
    key = next(ShmTransport().files()).key
    package = a.export(Turn(a.roster.members("")["b"], "", tuple(messages)))
    named = " ".join(["../../etc/passwd", "*", key, *(f"{i:032x}" for i in range(10_000))])[:60_000]
    steps = tuple(replace(step, page=None) if step.sealed else step for step in package.steps)
    bare = replace(package, steps=steps, metadata={"parts": named}, id="0" * 32)
    ShmTransport().delete(key)
    ShmTransport().put(key, bare.write())
    started = time.monotonic()
    say(b, "b", messages)
    assert time.monotonic() - started < 20
    assert modes(b) == ["TEXT"] and "not here" in b.reports[0].reasons[0]


class Clock:
    """Stands for `time` in the transports' interface."""

    def __init__(self) -> None:
        self.ms = 0.0

    def monotonic(self) -> float:
        return self.ms / 1000


class Stalling:
    """A transport whose calls for some keys are never answered; every other one takes a millisecond of `clock`."""

    name, crosses_machines = "stalling", False

    def __init__(self, inner: Transport, clock: Clock, stalls: Callable[[str, str], bool]) -> None:
        self.inner, self.clock, self.stalls = inner, clock, stalls
        self.calls: list[str] = []

    def put(self, key: str, payload: Payload, *, deadline_ms: float, lifetime_ms: int) -> None:
        self.wait("put", key, deadline_ms)
        self.inner.put(key, payload, lifetime_ms=lifetime_ms, deadline_ms=20_000)

    def get(self, key: str, *, deadline_ms: float) -> Payload:
        self.wait("get", key, deadline_ms)
        return self.inner.get(key, deadline_ms=20_000)

    def missing(self, keys: list[str], *, deadline_ms: float) -> list[str]:
        self.wait("missing", keys[0], deadline_ms)
        return self.inner.missing(keys, deadline_ms=20_000)

    def wait(self, call: str, key: str, deadline_ms: float) -> None:
        self.calls.append(call)
        if self.stalls(call, key):
            self.clock.ms += deadline_ms
            raise TransportTimeout("no answer")
        self.clock.ms += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(interface, "time", clock)
    return clock


STALLS = {
    "looking": lambda call, key, newest: call == "missing",
    "the newest package": lambda call, key, newest: call == "get" and key == newest,
    "all that it builds on": lambda call, key, newest: call == "get" and key != newest,
    "all reads": lambda call, key, newest: call == "get",
    "publishing": lambda call, key, newest: call == "put",
    "everything": lambda call, key, newest: True,
}


@pytest.mark.parametrize("named", [0, 32])
@pytest.mark.parametrize("stalls", STALLS.values(), ids=STALLS)
def test_a_turn_waits_one_deadline_whatever_stalls_and_then_there_is_a_pause(
    stalls: Callable[..., bool], named: int, folder: Path, clock: Clock
) -> None:
    a, b, c = open_host(), open_host(), open_host()
    messages = [TASK]
    for turn in range(4):
        say((a, b)[turn % 2], NAMES[turn % 2], messages)
    newest = max(ShmTransport().files(), key=lambda file: file.expires_s).key
    if named:  # a package that names more parts than there are
        package = read(ShmTransport().get(newest))
        parts = " ".join(f"{number:032x}" for number in range(named))
        steps = tuple(replace(step, page=None) if step.sealed else step for step in package.steps)
        package = replace(package, id="0" * 32, steps=steps, metadata={**package.metadata, "parts": parts})
        ShmTransport().delete(newest)
        ShmTransport().put(newest, Payload([b"".join(package.write().pieces)]))
    slow = c._transport = c._courier._transport = Stalling(
        ShmTransport(), clock, lambda call, key: stalls(call, key, newest)
    )
    clock.ms = 0.0
    say(c, "c", messages)
    assert clock.ms <= SharingHost.deadline_ms and len(slow.calls) <= 40
    assert c.reports[0].mode.value == "KV" or c.reports[0].reasons
    calls = len(slow.calls)
    say(c, "c", [TASK, Message("assistant", "Something else.", "a"), Message("user", "Go on.", "user")])
    assert len(slow.calls) == calls, "in the pause nothing is asked of the store"


def test_the_deadline_is_the_transports_alone(clock: Clock) -> None:
    deadline = interface.TurnDeadline(500)

    def takes(ms: float) -> Callable[[float], float]:
        def call(left_ms: float) -> float:
            clock.ms += ms
            return left_ms

        return call

    assert deadline.run(takes(200)) == 500
    clock.ms += 10_000  # what the turn computes
    assert deadline.run(takes(300)) == pytest.approx(300) and not deadline.failed
    with pytest.raises(TransportTimeout, match="500 ms"):
        deadline.run(takes(1))
    assert deadline.failed


def test_a_directory_of_others_is_text_with_a_reason_until_it_is_gone(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        a, b = open_host(), open_host()
    assert len(caplog.records) == 2 and "chmod 700" in caplog.text
    messages = [TASK]
    say(a, "a", messages)
    say(b, "b", messages)
    assert modes(b) == ["TEXT"] and any("chmod 700" in reason for reason in b.reports[0].reasons)
    folder.rmdir()
    for host, name in ((a, "a"), (b, "b"), (a, "a")):
        host._paused_until = 0.0
        say(host, name, messages)
    assert modes(a)[-1] == "KV" and a.reports[-1].transfer_ms
    for host in (a, b):
        host.close()
