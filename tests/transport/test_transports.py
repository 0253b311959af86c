"""What every transport promises, in the same tests for all of them."""

import itertools
import threading
import time
from collections.abc import Iterator

import pytest
from packages import PRECISIONS, SECRET, package, pages
from servers import mooncake_master, valkey  # noqa: F401

from qkvshare_agents.errors import InvalidSetting, PackageNotFound, TransportError, TransportTimeout
from qkvshare_agents.transport.interface import Transport, check_key
from qkvshare_agents.transport.local import LocalTransport
from qkvshare_agents.transport.redis import RedisTransport
from qkvshare_agents.transport.shm import ShmTransport
from qkvshare_agents.wire import package as package_module
from qkvshare_agents.wire.payload import Payload

_names = itertools.count()
LONG_MS = 20_000


@pytest.fixture(params=["local", "shm", "shm mapped", "redis", "mooncake"])
def transport(request, tmp_path) -> Iterator[Transport]:
    if request.param == "local":
        made: Transport = LocalTransport()
    elif request.param.startswith("shm"):
        made = ShmTransport(tmp_path / "packages", mapped="mapped" in request.param)
    elif request.param == "mooncake":
        made = request.getfixturevalue("mooncake")
        made._prefix = f"t{next(_names)}"
        yield made
        return
    else:
        url = request.getfixturevalue("valkey")
        made = RedisTransport(url, prefix=f"t{next(_names)}", chunk_bytes=2**16)
    yield made
    made.close()


@pytest.fixture(scope="module")
def mooncake(mooncake_master: str) -> Iterator[Transport]:  # noqa: F811
    """One client for all tests: setting one up takes a while, and leaving takes seconds."""
    from qkvshare_agents.transport.mooncake import MooncakeTransport

    sizes = {"segment_bytes": 256 * 2**20, "buffer_bytes": 64 * 2**20}
    made = MooncakeTransport(mooncake_master, accept_open_ports=True, **sizes)
    yield made
    made.close()
    with pytest.raises(TransportError, match="closed"):
        made.get("a")


def flat(payload: Payload) -> bytes:
    return b"".join(payload.pieces)


def big(count: int = 300_000, first: int = 0) -> Payload:
    """Pieces of several sizes, none of them a divisor of a chunk."""
    data = bytes((i + first) % 251 for i in range(1000)) * (count // 1000)
    return Payload([data[:7], data[7:100_001], data[100_001:]])


def test_what_is_put_is_got(transport: Transport) -> None:
    transport.put("a", big(), deadline_ms=LONG_MS)
    assert flat(transport.get("a", deadline_ms=LONG_MS)) == flat(big())
    assert flat(transport.get("a", deadline_ms=LONG_MS)) == flat(big()), "reading takes nothing away"


def test_packages_survive_the_way(transport: Transport) -> None:
    sent = package(pages(PRECISIONS[1]))
    transport.put("p", sent.write(secret=SECRET), deadline_ms=LONG_MS)
    got = package_module.read(transport.get("p", deadline_ms=LONG_MS), secret=SECRET)
    assert (got.id, got.ids, got.ledger) == (sent.id, sent.ids, sent.ledger)


def test_a_key_is_written_once(transport: Transport) -> None:
    transport.put("a", big(first=1), deadline_ms=LONG_MS)
    with pytest.raises(TransportError, match="published already"):
        transport.put("a", big(first=2), deadline_ms=LONG_MS)
    assert flat(transport.get("a", deadline_ms=LONG_MS)) == flat(big(first=1))


def test_what_is_missing(transport: Transport) -> None:
    transport.put("a", big(), deadline_ms=LONG_MS)
    transport.put("c", big(), deadline_ms=LONG_MS)
    assert transport.missing(["a", "b", "c", "d"]) == ["b", "d"]
    assert transport.missing([]) == []
    with pytest.raises(PackageNotFound, match="'b'"):
        transport.get("b")


def test_what_is_deleted_is_gone(transport: Transport) -> None:
    transport.put("a", big(), deadline_ms=LONG_MS)
    transport.delete("a")
    transport.delete("a")
    assert transport.missing(["a"]) == ["a"]
    with pytest.raises(PackageNotFound):
        transport.get("a")
    transport.put("a", big(), deadline_ms=LONG_MS)


def test_what_expires_is_gone(transport: Transport) -> None:
    transport.put("a", big(), deadline_ms=LONG_MS, lifetime_ms=150)
    transport.get("a", deadline_ms=LONG_MS)
    time.sleep(0.25)
    assert transport.missing(["a"]) == ["a"]
    with pytest.raises(PackageNotFound):
        transport.get("a")


BAD_KEYS = [
    "",
    "../../x",
    "a/b",
    "a\0b",
    "*",
    "a*",
    "x" * 129,
    "x" * 1_000_000,
    "ключ",
    ".hidden",
    "-x",
    "a.b",
    "a b",
    "a\n",
    7,
    None,
]


@pytest.mark.parametrize("key", BAD_KEYS, ids=lambda key: repr(key)[:12])
def test_bad_keys_are_refused(transport: Transport, key: object) -> None:
    for call in (
        lambda: transport.put(key, big()),
        lambda: transport.get(key),
        lambda: transport.missing([key]),
        lambda: transport.delete(key),
    ):
        with pytest.raises(InvalidSetting, match="is no key") as error:
            call()
        assert len(str(error.value)) < 300


@pytest.mark.parametrize("deadline_ms", [0, -1, float("nan"), float("inf")])
def test_bad_deadlines_are_refused(transport: Transport, deadline_ms: float) -> None:
    with pytest.raises(InvalidSetting, match="deadline_ms"):
        transport.get("a", deadline_ms=deadline_ms)


def test_a_deadline_that_is_too_short(transport: Transport) -> None:
    if transport.name == "local":
        pytest.skip("a reference takes no time")
    with pytest.raises(TransportTimeout):
        transport.put("a", big(50_000_000), deadline_ms=0.001)
    assert transport.missing(["a"], deadline_ms=LONG_MS) == ["a"]
    transport.put("a", big(), deadline_ms=LONG_MS)


def test_two_writers_and_many_readers_see_whole_packages(transport: Transport) -> None:
    """Whoever is first wins; nobody reads a mixture, also while it is deleted."""
    candidates = {flat(big(first=i)) for i in range(2)}
    seen, errors = [], []

    def write(which: int) -> None:
        for _ in range(8):
            try:
                transport.put("a", big(first=which), deadline_ms=LONG_MS)
                transport.delete("a", deadline_ms=LONG_MS)
            except TransportError as error:
                errors.append(str(error))

    def read() -> None:
        for _ in range(25):
            try:
                seen.append(flat(transport.get("a", deadline_ms=LONG_MS)))
            except PackageNotFound:
                continue

    threads = [threading.Thread(target=write, args=(i,)) for i in range(2)]
    threads += [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert set(seen) <= candidates
    assert all("published already" in error for error in errors)
    transport.delete("a", deadline_ms=LONG_MS)
    transport.put("a", big(), deadline_ms=LONG_MS)
    assert flat(transport.get("a", deadline_ms=LONG_MS)) == flat(big())


def test_keys_that_are_fine() -> None:
    assert [check_key(key) for key in ("a", "A-1_b", "0" * 128)] == ["a", "A-1_b", "0" * 128]


def test_local_moves_nothing() -> None:
    memory = bytearray(b"abc")
    transport = LocalTransport()
    transport.put("a", Payload([memory]))
    memory[0] = 0x78
    assert flat(transport.get("a")) == b"xbc"


def test_mooncake_is_refused_without_acknowledgement(mooncake_master: str) -> None:  # noqa: F811
    from qkvshare_agents.transport.mooncake import MooncakeTransport

    with pytest.raises(InvalidSetting, match="no authentication"):
        MooncakeTransport(mooncake_master)


def test_what_is_forged_or_gone_in_mooncake(mooncake: Transport) -> None:
    store = mooncake._store
    for index, record in enumerate((b"x", b"[]", b'{"nonce":"*","nbytes":1,"expires_ms":99999999999999}')):
        store.put(f"{mooncake._prefix}:forged{index}", record)
        with pytest.raises(TransportError, match="not one of ours"):
            mooncake.get(f"forged{index}", deadline_ms=LONG_MS)
    mooncake.put("gone", big(), deadline_ms=LONG_MS)
    nonce, _ = mooncake._record(f"{mooncake._prefix}:gone")
    store.remove(f"{mooncake._prefix}:gone:{nonce}", True)
    with pytest.raises(PackageNotFound, match="evicted"):
        mooncake.get("gone", deadline_ms=LONG_MS)
    with pytest.raises(TransportError, match="full"):
        mooncake.put("large", Payload([bytes(300 * 2**20)]), deadline_ms=LONG_MS)
