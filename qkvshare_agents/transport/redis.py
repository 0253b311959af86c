"""Between machines: Redis or Valkey.

A package goes in chunks under keys that only this put knows, then, when all of them are stored, a small record under
the package's own key names them. Everything expires by itself. One deadline holds for a whole call, connecting
included: the client's timeouts start anew with every byte, so the call runs on a thread of its own, and the socket
is shut down under it when time is up.
"""

import json
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from qkvshare_agents.errors import (
    InvalidSetting,
    MissingDependency,
    PackageNotFound,
    TransportError,
    TransportTimeout,
    printable,
)
from qkvshare_agents.transport.interface import DEADLINE_MS, LIFETIME_MS, MAX_PACKAGE_BYTES, check_key, run_within
from qkvshare_agents.transport.replies import SHORT_BYTES, Announcements, ReadAlong, UnaskedReply
from qkvshare_agents.wire.payload import Payload

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.connection import Connection, ConnectionPool, SSLConnection, parse_url
    from redis.retry import Retry
except ImportError as error:
    raise MissingDependency("the Redis transport needs redis-py: pip install 'qkvshare-agents[redis]'") from error

CHUNK_BYTES = 4 * 1024**2
_CHUNK_SIZES = range(2**16, 2**29 + 1)  # a server's values have at most 512 MB
_RECORD_BYTES = 256
_GRACE_MS = 10_000  # chunks outlive the record that names them
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
T = TypeVar("T")


class _Tapped(Connection):
    """Keeps a second handle on its socket, so that another thread can shut it down even while TLS is negotiated."""

    def __init__(self, *, taps: "list[socket.socket]", **options: Any) -> None:
        self._taps = taps
        super().__init__(**options)

    def _connect(self) -> Any:
        sock = super()._connect()
        self._taps.append(sock.dup())
        return sock


class _TappedTLS(SSLConnection, _Tapped):
    pass


class _ReadAlong:
    """Lets nothing through that no command asked for, see `replies`."""

    def __init__(self, *, announcements: Announcements, **options: Any) -> None:
        self._announcements = announcements
        super().__init__(**options)

    def _connect(self) -> Any:
        self._announcements.begin()
        return ReadAlong(super()._connect(), self._announcements)  # type: ignore[misc]


class _Plain(_ReadAlong, _Tapped):
    pass


class _TLS(_ReadAlong, _TappedTLS):
    pass


@dataclass(frozen=True)
class _Line:
    """A connection. taps: handles on its socket."""

    client: "redis.Redis"
    announcements: Announcements
    taps: list[socket.socket]

    def drop(self) -> None:
        self.client.connection_pool.disconnect()
        while self.taps:
            self.taps.pop().close()


class RedisTransport:
    """url: `redis://` or `rediss://` (TLS; certificates and host names are checked) with user, password and database.

    Options of redis-py may stand in the url's query, e.g. `?ssl_ca_certs=/path/ca.pem`. prefix: of all keys, for an
    ACL such as `~qkvshare:*`. unencrypted: accept a server beyond this machine without TLS, though KV is plaintext
    of the conversation. Nothing is connected before the first call. Raises InvalidSetting.
    """

    name = "redis"
    crosses_machines = True

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "qkvshare",
        chunk_bytes: int = CHUNK_BYTES,
        max_package_bytes: int = MAX_PACKAGE_BYTES,
        unencrypted: bool = False,
    ) -> None:
        _check_sizes(chunk_bytes, max_package_bytes)
        options = _parsed(url)
        self._tls = options.pop("connection_class", None) is not None
        self._where = f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
        if not self._tls and not unencrypted and options.get("host", "localhost") not in _LOOPBACK:
            raise InvalidSetting(
                f"KV is plaintext of the conversation and would cross the network to {self._where} unencrypted: use "
                "rediss://, or pass unencrypted=True if the network itself is encrypted"
            )
        if self._tls:
            options = {"ssl_cert_reqs": "required", "ssl_check_hostname": True, **options}
        self._options, self._prefix = options, check_key(prefix)
        self._chunk_bytes, self._max_bytes = chunk_bytes, max_package_bytes
        self._idle: list[_Line] = []
        try:
            self._line(DEADLINE_MS).client.connection_pool.make_connection()  # connects to nothing
        except (TypeError, ValueError, redis.RedisError, ssl.SSLError) as error:
            raise InvalidSetting(f"redis-py does not take the options of the url ({type(error).__name__})") from None

    def put(
        self, key: str, payload: Payload, *, deadline_ms: float = DEADLINE_MS, lifetime_ms: int = LIFETIME_MS
    ) -> None:
        name, nonce = self._name(key), secrets.token_hex(8)
        record = json.dumps({"nonce": nonce, "nbytes": payload.nbytes, "chunk_bytes": self._chunk_bytes})
        chunks = self._chunks(name, nonce, payload.nbytes, self._chunk_bytes)

        def work(line: _Line) -> bool:
            client = line.client
            try:
                pipe = client.pipeline(transaction=False)
                for chunk, data in zip(chunks, payload.chunks(self._chunk_bytes), strict=True):
                    pipe.set(chunk, data, px=lifetime_ms + _GRACE_MS)
                _run(pipe)
                if client.set(name, record, px=lifetime_ms, nx=True):
                    return True
            except redis.ResponseError:  # full, read-only, not permitted: the connection is sound, so clean up
                with suppress(redis.ResponseError):
                    client.unlink(*chunks)
                raise
            client.unlink(*chunks)
            return False

        if not self._call(work, deadline_ms):
            raise TransportError(f"key {key!r} is published already; use a new one")

    def get(self, key: str, *, deadline_ms: float = DEADLINE_MS) -> Payload:
        name = self._name(key)

        def work(line: _Line) -> Payload:
            client = line.client
            record: Any = client.getrange(name, 0, _RECORD_BYTES - 1)
            if not record:
                raise PackageNotFound(f"nothing is stored under {key!r}: never published, expired or deleted")
            nonce, nbytes, size = self._parse(key, record)
            chunks = self._chunks(name, nonce, nbytes, size)
            lengths = [min(size, nbytes - index * size) for index in range(len(chunks))]
            pipe = client.pipeline(transaction=False)
            for chunk in chunks:
                pipe.strlen(chunk)
            if _run(pipe) != lengths:  # before anything large is fetched
                raise PackageNotFound(f"a part of {key!r} is gone: evicted, expired or deleted")
            for chunk in chunks:
                pipe.get(chunk)
            line.announcements.most_bytes = max(size, SHORT_BYTES)
            pieces = _run(pipe)
            line.announcements.most_bytes = SHORT_BYTES
            if [len(piece or b"") for piece in pieces] != lengths:
                raise PackageNotFound(f"a part of {key!r} went while it was read")
            return Payload(pieces)

        return self._call(work, deadline_ms)

    def missing(self, keys: Sequence[str], *, deadline_ms: float = DEADLINE_MS) -> list[str]:
        names = [self._name(key) for key in keys]

        def work(line: _Line) -> list[Any]:
            pipe = line.client.pipeline(transaction=False)
            for name in names:
                pipe.exists(name)
            return _run(pipe)

        return [key for key, there in zip(keys, self._call(work, deadline_ms), strict=True) if not there]

    def delete(self, key: str, *, deadline_ms: float = DEADLINE_MS) -> None:
        name = self._name(key)

        def work(line: _Line) -> None:
            record: Any = line.client.getrange(name, 0, _RECORD_BYTES - 1)
            if record:
                line.client.unlink(name, *self._chunks(name, *self._parse(key, record)))

        self._call(work, deadline_ms)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().drop()

    def _name(self, key: str) -> str:
        return f"{self._prefix}:{check_key(key)}"

    def _parse(self, key: str, record: bytes) -> tuple[str, int, int]:
        try:
            fields = json.loads(record)
            nonce, nbytes, size = fields["nonce"], fields["nbytes"], fields["chunk_bytes"]
            sound = check_key(nonce) and 0 < nbytes <= self._max_bytes and size in _CHUNK_SIZES
        except (ValueError, TypeError, KeyError, RecursionError):
            sound = False
        if not sound or type(nbytes) is not int or type(size) is not int:
            raise TransportError(
                f"the record of {key!r} is not one of ours, or names more than {self._max_bytes:,} bytes"
            )
        return nonce, nbytes, size

    @staticmethod
    def _chunks(name: str, nonce: str, nbytes: int, chunk_bytes: int) -> list[str]:
        return [f"{name}:{nonce}:{index}" for index in range(-(-nbytes // chunk_bytes))]

    def _call(self, work: Callable[[_Line], T], deadline_ms: float) -> T:
        """Run `work` with a connection until the deadline, then shut the connection down under it."""
        line = self._idle.pop() if self._idle else self._line(deadline_ms)
        given_up = threading.Event()

        def guarded() -> T:
            try:
                return work(line)
            finally:
                if given_up.is_set():  # nobody waits any more
                    line.drop()

        def late() -> None:
            given_up.set()
            for tap in list(line.taps):
                _shut(tap)

        try:
            result = run_within(deadline_ms, guarded, self._where, late)
        except PackageNotFound:
            self._idle.append(line)
            raise
        except TransportTimeout:
            raise
        except Exception as error:
            line.drop()
            self.close()  # the other connections have probably met the same
            raise self._explain(error, deadline_ms) from None
        self._idle.append(line)
        return result

    def _line(self, deadline_ms: float) -> _Line:
        taps: list[socket.socket] = []
        announcements = Announcements()
        options = {
            **self._options,
            "taps": taps,
            "announcements": announcements,
            "socket_connect_timeout": deadline_ms / 1000,
            "socket_timeout": None,  # the deadline is ours
            "socket_read_size": 2**20,
            "retry": Retry(NoBackoff(), 0),
            "health_check_interval": 0,
            "protocol": 2,
            "decode_responses": False,
        }
        pool = ConnectionPool(connection_class=_TLS if self._tls else _Plain, max_connections=1, **options)
        return _Line(redis.Redis(connection_pool=pool), announcements, taps)

    def _explain(self, error: Exception, deadline_ms: float) -> Exception:
        """As an error of ours, without the url, which may hold a password."""
        if isinstance(error, TransportError | InvalidSetting):
            return error
        if isinstance(error, UnaskedReply):
            return TransportError(f"the server at {self._where} {error}")
        kinds = {
            redis.AuthenticationError: "user name or password is wrong",
            redis.exceptions.NoPermissionError: "the user may not do this (ACL)",
            redis.ReadOnlyError: "it is a read-only replica; use the primary",
            redis.exceptions.OutOfMemoryError: "it is full (maxmemory)",
            redis.exceptions.AuthorizationError: "user name or password is wrong",
            redis.TimeoutError: f"no answer within {deadline_ms:.0f} ms",
        }
        for kind, text in kinds.items():
            if isinstance(error, kind):
                made = TransportTimeout if kind is redis.TimeoutError else TransportError
                return made(f"the server at {self._where}: {text}")
        return TransportError(
            f"the server at {self._where} can't be used: {type(error).__name__}: {printable(str(error)[:120])}"
        )


def _parsed(url: str) -> dict[str, Any]:
    """redis-py's options for a url. Its own errors quote parts of it, which may be a password."""
    if not isinstance(url, str) or not url.startswith(("redis://", "rediss://")):
        raise InvalidSetting("the url must begin with redis:// or rediss:// (TLS)")
    try:
        options = dict(parse_url(url))
        int(urlsplit(url).path.strip("/") or 0)  # parse_url passes over what is no database
        return options
    except (ValueError, TypeError):
        raise InvalidSetting(
            "the url is none: redis://user:password@host:port/database?option=value, special characters in user and "
            "password percent-encoded (urllib.parse.quote(password, safe=''))"
        ) from None


def _check_sizes(chunk_bytes: int, max_package_bytes: int) -> None:
    if type(chunk_bytes) is not int or chunk_bytes not in _CHUNK_SIZES:
        raise InvalidSetting(
            f"chunk_bytes must be from {_CHUNK_SIZES[0]:,} to {_CHUNK_SIZES[-1]:,}, not {chunk_bytes!r}: "
            f"leave it out for {CHUNK_BYTES:,}"
        )
    if type(max_package_bytes) is not int or max_package_bytes <= 0:
        raise InvalidSetting(f"max_package_bytes must be a number of bytes above 0, not {max_package_bytes!r}")


def _run(pipe: Any) -> list[Any]:
    """Replies of a pipeline. redis-py's own errors of pipelines quote the command, which may be the payload."""
    replies = list(pipe.execute(raise_on_error=False))
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def _shut(tap: socket.socket) -> None:
    with suppress(OSError):  # it may not be connected any more
        tap.shutdown(socket.SHUT_RDWR)
