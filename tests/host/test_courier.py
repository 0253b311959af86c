"""Hosts and transports together: KV where it can be moved, text with a reason where not, never an exception."""

import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from courier_child import SECRET, TASK, open_host, turn
from servers import free_port, valkey  # noqa: F401
from support import tiny_engine

from qkvshare_agents.errors import InvalidSetting, TransportError
from qkvshare_agents.host.courier import Courier
from qkvshare_agents.host.host import Host
from qkvshare_agents.prompt.layout import Message
from qkvshare_agents.settings import HostSettings
from qkvshare_agents.transport.local import LocalTransport
from qkvshare_agents.transport.redis import RedisTransport
from qkvshare_agents.transport.shm import ShmTransport
from qkvshare_agents.turns.plan import crossover_tokens, slower_than_text
from qkvshare_agents.turns.report import Arrival, table
from qkvshare_agents.wire.payload import Payload

LONG_MS = 20_000


def spoken(host: Host, name: str, *messages: Message, arrival: Arrival | None = None) -> Message:
    answer = host.submit(turn(host, name, *messages, **({"arrival": arrival} if arrival else {}))).result()
    return Message("assistant", answer.text, name)


@pytest.fixture(params=["local", "shm", "shm mapped", "redis"])
def transport(request, tmp_path):
    if request.param == "local":
        made = LocalTransport()
    elif request.param == "redis":
        made = RedisTransport(request.getfixturevalue("valkey"), prefix="courier")
    else:
        made = ShmTransport(tmp_path / "packages", mapped="mapped" in request.param)
    yield made
    made.close()


def test_a_handoff_over_every_transport(transport) -> None:
    a, b, alone = open_host(), open_host(), open_host()
    first = spoken(a, "a", TASK)
    sent = Courier(a, transport, deadline_ms=LONG_MS).send(turn(a, "b", TASK, first), handoff="test it")
    assert sent.reasons == () and sent.ms > 0
    arrival = Courier(b, transport, deadline_ms=LONG_MS).receive(sent.key)
    assert arrival.reasons == () and arrival.moved_bytes == sent.moved_bytes
    assert transport.missing([sent.key], deadline_ms=LONG_MS) == [sent.key]
    second = spoken(b, "b", TASK, first, arrival=arrival)
    report = b.reports[0]
    assert (report.mode.value, report.source, report.transfer_ms) == ("KV", "a", arrival.transfer_ms)
    assert spoken(alone, "a", TASK) == first
    assert spoken(alone, "b", TASK, first) == second
    assert "trans" in "".join(str(column.header) for column in table(b.reports).columns)


class Broken:
    """A transport on which everything goes wrong in one way."""

    name, crosses_machines = "broken", False

    def __init__(self, inner, damage=lambda data: data, error: Exception | None = None) -> None:
        self._inner, self._damage, self._error = inner, damage, error

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def get(self, key: str, **options: object) -> Payload:
        if self._error:
            raise self._error
        return Payload([self._damage(bytearray(b"".join(self._inner.get(key, **options).pieces)))])


def flipped(data: bytearray) -> bytearray:
    data[len(data) // 2] ^= 1
    return data


@pytest.mark.parametrize("damage", [flipped, lambda d: d[:-1], lambda d: d[:9], lambda d: bytearray(), lambda d: d + d])
def test_damage_is_text_with_a_reason(damage) -> None:
    inner = LocalTransport()
    a, b, alone = open_host(), open_host(), open_host(handoff=False)
    first = spoken(a, "a", TASK)
    sent = Courier(a, inner).send(turn(a, "b", TASK, first))
    arrival = Courier(b, Broken(inner, damage)).receive(sent.key)
    assert "could not be received over broken" in arrival.reasons[0]
    assert b.store.page_count == 0, "never a partial cache"
    assert spoken(b, "b", TASK, first, arrival=arrival) == spoken(alone, "b", TASK, first)
    assert b.reports[0].mode.value == "TEXT"
    assert b.reports[0].reasons[0] == arrival.reasons[0]


def test_a_transport_that_is_down_is_text_and_one_warning(caplog) -> None:
    a = open_host()
    first = spoken(a, "a", TASK)
    courier = Courier(a, RedisTransport(f"redis://:hush@127.0.0.1:{free_port()}/0"))
    with caplog.at_level(logging.WARNING):
        sent = [courier.send(turn(a, "b", TASK, first)) for _ in range(3)]
        arrivals = [courier.receive("0" * 32) for _ in range(3)]
    assert [s.key for s in sent] == [""] * 3
    assert all("could not be sent over redis" in s.reasons[0] for s in sent)
    assert all("could not be received over redis" in a.reasons[0] for a in arrivals)
    assert len(caplog.records) == 1
    assert "hush" not in caplog.text and TASK.text not in caplog.text


@pytest.mark.parametrize("key", ["../../etc/passwd", "*", "", "x" * 10_000, "0" * 32])
def test_keys_that_a_peer_made_up(key: str, tmp_path) -> None:
    b = open_host()
    arrival = Courier(b, ShmTransport(tmp_path / "packages")).receive(key)
    assert len(arrival.reasons) == 1 and len(arrival.reasons[0]) < 400
    spoken(b, "b", TASK, arrival=arrival)
    assert b.reports[0].reasons[0] == arrival.reasons[0]


def test_secrets_are_needed_beyond_this_user_and_must_agree() -> None:
    without = open_host(secret="")
    with pytest.raises(InvalidSetting, match="must be signed"):
        Courier(without, RedisTransport("redis://localhost"))
    inner = LocalTransport()
    a, b = open_host(), open_host(secret="another secret, long enough too")
    first = spoken(a, "a", TASK)
    sent = Courier(a, inner).send(turn(a, "b", TASK, first))
    assert "another secret" in Courier(b, inner).receive(sent.key).reasons[0]
    assert SECRET not in repr(a.settings) + repr(Courier(a, inner).__dict__)


def test_a_replayed_key_is_refused() -> None:
    inner = LocalTransport()
    a, b = open_host(), open_host()
    first = spoken(a, "a", TASK)
    sent = Courier(a, inner).send(turn(a, "b", TASK, first))
    courier = Courier(b, inner)
    assert courier.receive(sent.key, keep=True).reasons == ()
    assert "came in before" in courier.receive(sent.key).reasons[0]


def test_only_what_is_missing_travels() -> None:
    inner = LocalTransport()
    a, b = open_host(), open_host()
    first = spoken(a, "a", TASK)
    sent = Courier(a, inner).send(turn(a, "b", TASK, first))
    Courier(b, inner).receive(sent.key)
    held = a.store.held(a.prompt(turn(a, "b", TASK, first)).ids)
    second = spoken(b, "b", TASK, first)
    everything, missing = (Courier(b, inner).send(turn(b, "a", TASK, first, second), have=have) for have in ((), held))
    assert missing.moved_bytes < everything.moved_bytes / 2
    assert Courier(a, inner).receive(missing.key).reasons == ()
    spoken(a, "a", TASK, first, second)
    assert a.reports[-1].mode.value == "KV"


def test_text_when_text_is_faster() -> None:
    """Both speeds are measured: a transport that is slow enough is not used any more, and the report says why."""
    inner = LocalTransport()
    a = open_host()
    first = spoken(a, "a", TASK)
    courier = Courier(a, inner)
    assert courier.send(turn(a, "b", TASK, first)).key
    courier._speeds.extend([(1000, 500.0)] * 20)  # half a second for a kilobyte
    sent = courier.send(turn(a, "b", TASK, first))
    assert sent.key == "" and "text is faster here" in sent.reasons[0]
    courier._speeds.extend([(10**9, 1.0)] * 20)
    assert courier.send(turn(a, "b", TASK, first)).key
    courier._speeds.extend([(1000, 500.0)] * 20)
    sent = [bool(courier.send(turn(a, "b", TASK, first)).key) for _ in range(30)]
    assert sent == [False] * 20 + [True] * 10, "it measures again, and finds that moving is fast now"


def test_waiting_for_a_turn_is_not_the_transports_time() -> None:
    inner = LocalTransport()
    a, b = open_host(), open_host()
    first = spoken(a, "a", TASK)
    for host in (a, b):
        host._worker.submit(time.sleep, 0.5)  # a turn that is running
    started = time.monotonic()
    sent = Courier(a, inner).send(turn(a, "b", TASK, first))
    arrival = Courier(b, inner).receive(sent.key)
    assert arrival.reasons == () and time.monotonic() - started > 0.4
    assert sent.ms < 300 and arrival.transfer_ms < 300


class Undeletable(LocalTransport):
    def delete(self, key: str, **options: object) -> None:
        raise TransportError("not now")


def test_a_package_that_can_not_be_deleted_was_received() -> None:
    inner = Undeletable()
    a, b = open_host(), open_host()
    first = spoken(a, "a", TASK)
    arrival = Courier(b, inner).receive(Courier(a, inner).send(turn(a, "b", TASK, first)).key)
    assert arrival.reasons == ()
    spoken(b, "b", TASK, first, arrival=arrival)
    assert b.reports[0].mode.value == "KV"


def test_the_planner_compares() -> None:
    assert slower_than_text(None, 5.0) is None and slower_than_text(5.0, None) is None
    assert slower_than_text(4.0, 5.0) is None
    assert slower_than_text(6.0, 5.0) == "text is faster here: moving the KV takes about 6 ms, reading it again 5 ms"
    assert crossover_tokens(10, 0.5, 1.5) == 10
    assert crossover_tokens(0, 0.5, 1.5) == 1
    assert crossover_tokens(10, 1.5, 1.5) is None


def test_models_that_differ_are_text(tmp_path) -> None:
    a = open_host()
    b = Host(replace(a.settings), tiny_engine(seed=1))
    b.roster.learn("", "b", "You are b, and you say what b says.")
    transport = ShmTransport(tmp_path / "packages")
    first = spoken(a, "a", TASK)
    arrival = Courier(b, transport).receive(Courier(a, transport).send(turn(a, "b", TASK, first)).key)
    assert arrival.reasons == ("the package is of another model: weights differ",)
    spoken(b, "b", TASK, first, arrival=arrival)
    assert b.reports[0].mode.value == "TEXT"
    assert isinstance(HostSettings("x", secret="y" * 16), HostSettings)


@pytest.mark.parametrize(
    ("task", "family"), [("send", ""), ("hang", ""), ("send", "lfm2"), ("send", "mamba2"), ("send", "falcon_h1")]
)
def test_the_sender_is_another_process_and_is_killed(tmp_path, task: str, family: str) -> None:
    """After it published: the package is whole, and is used. Before: nothing is there, and the text is read."""
    folder = tmp_path / "packages"
    here = Path(__file__).parents[1]
    child = subprocess.Popen(
        [sys.executable, str(here / "courier_child.py"), str(folder), task, family],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert child.stdout
        line = child.stdout.readline().strip()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    b, alone = open_host(family), open_host(family, handoff=False)
    first = spoken(alone, "a", TASK)
    transport = ShmTransport(folder)
    arrival = Courier(b, transport, deadline_ms=LONG_MS).receive(line if task == "send" else "0" * 32)
    second = spoken(b, "b", TASK, first, arrival=arrival)
    # without the package the receiver has the sender's text only, not its ids, as any reader of text has
    reader = alone if task == "send" else open_host(handoff=False)
    assert second == spoken(reader, "b", TASK, first)
    assert list(transport.files()) == []
    if task == "send":
        assert (folder / "answer.txt").read_text() == first.text
        assert b.reports[0].mode.value == "KV" and b.reports[0].source == "a"
    else:
        assert b.reports[0].mode.value == "TEXT" and "nothing is stored" in b.reports[0].reasons[0]
