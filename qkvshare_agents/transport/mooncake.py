"""For scale-out: Mooncake Store, over TCP (RDMA where the machines have it).

Its traps, met here so that callers don't: a put on an existing key keeps the old value and says nothing; a missing
key reads as `b""`; objects have no lifetime, only eviction. So data goes under keys that only this put knows, and a
record under the package's own key, which is read back, says which data is meant and when it expires.
It has no authentication, and every client listens on all interfaces: who reaches the network can read and write.
"""

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from qkvshare_agents.errors import InvalidSetting, MissingDependency, PackageNotFound, TransportError
from qkvshare_agents.transport.interface import DEADLINE_MS, LIFETIME_MS, MAX_PACKAGE_BYTES, check_key, run_within
from qkvshare_agents.wire.payload import Payload

try:
    from mooncake.store import MooncakeDistributedStore
except ImportError as error:
    raise MissingDependency(
        f"the Mooncake transport needs mooncake-transfer-engine-non-cuda (pip install 'qkvshare-agents[mooncake]') and "
        f"the system's libibverbs (Debian: apt-get install libibverbs1): {error}"
    ) from error

_MOST_PIECES = 1024  # of one put


class MooncakeTransport:
    """master: `host:port` of a running mooncake_master. hostname: how other clients reach this machine.

    segment_bytes: memory that this process lends to the store; what is put may live in any process' segment, and is
    lost with it. accept_open_ports: must be True, as acknowledgement that everybody on the network can read the
    conversations that are moved, and write others; see SECURITY.md. Raises InvalidSetting, TransportError.
    """

    name = "mooncake"
    crosses_machines = True

    def __init__(
        self,
        master: str,
        *,
        hostname: str = "127.0.0.1",
        metadata_server: str = "P2PHANDSHAKE",
        segment_bytes: int = 1024**3,
        buffer_bytes: int = 256 * 1024**2,
        protocol: str = "tcp",
        devices: str = "",
        prefix: str = "qkvshare",
        max_package_bytes: int = MAX_PACKAGE_BYTES,
        accept_open_ports: bool = False,
    ) -> None:
        if not accept_open_ports:
            raise InvalidSetting(
                "Mooncake has no authentication and listens on all interfaces: whoever reaches the network can read "
                "the conversations. If the network is private to these machines, pass accept_open_ports=True"
            )
        self._prefix, self._where, self._max_bytes = check_key(prefix), master, max_package_bytes
        self._store: Any = MooncakeDistributedStore()
        code = self._store.setup(hostname, metadata_server, segment_bytes, buffer_bytes, protocol, devices, master)
        if code:
            raise TransportError(f"no Mooncake master can be used at {master} (code {code})")

    def put(
        self, key: str, payload: Payload, *, deadline_ms: float = DEADLINE_MS, lifetime_ms: int = LIFETIME_MS
    ) -> None:
        name, nonce = self._name(key), secrets.token_hex(8)
        pieces = (
            payload.pieces if payload.nbytes and len(payload.pieces) <= _MOST_PIECES else [b"".join(payload.pieces)]
        )
        fields = {"nonce": nonce, "nbytes": payload.nbytes, "expires_ms": int(time.time() * 1000) + lifetime_ms}
        record = json.dumps(fields).encode()

        def work() -> None:
            store = self._opened()
            self._check(store.put_parts(f"{name}:{nonce}", *pieces), key)
            self._forget_expired(name)
            self._check(store.put(name, record), key)
            if bytes(store.get(name)) != record:  # there was one already, and it stayed
                store.remove(f"{name}:{nonce}", True)
                raise TransportError(f"key {key!r} is published already; use a new one")

        run_within(deadline_ms, work, self._where)

    def get(self, key: str, *, deadline_ms: float = DEADLINE_MS) -> Payload:
        name = self._name(key)

        def work() -> Payload:
            store = self._opened()
            nonce, nbytes = self._record(name)
            if nonce is None:
                raise PackageNotFound(f"nothing is stored under {key!r}: never published, expired, evicted or deleted")
            if nbytes > self._max_bytes:
                raise TransportError(f"{key!r} has {nbytes:,} bytes; the limit is {self._max_bytes:,}")
            if store.get_size(f"{name}:{nonce}") != nbytes:
                raise PackageNotFound(f"the data of {key!r} is gone: evicted, or lost with the process that held it")
            data = store.get(f"{name}:{nonce}")
            if len(data) != nbytes:
                raise PackageNotFound(f"the data of {key!r} went while it was read")
            return Payload([data])

        return run_within(deadline_ms, work, self._where)

    def missing(self, keys: Sequence[str], *, deadline_ms: float = DEADLINE_MS) -> list[str]:
        names = {key: self._name(key) for key in keys}

        def work() -> list[str]:
            self._opened()
            return [key for key, name in names.items() if self._record(name)[0] is None]

        return run_within(deadline_ms, work, self._where)

    def delete(self, key: str, *, deadline_ms: float = DEADLINE_MS) -> None:
        name = self._name(key)
        run_within(deadline_ms, lambda: self._remove(name), self._where)

    def close(self) -> None:
        """Leave the store; what this process held is lost. Takes a second or two."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def _name(self, key: str) -> str:
        return f"{self._prefix}:{check_key(key)}"

    def _opened(self) -> Any:
        if self._store is None:
            raise TransportError("the transport is closed")
        return self._store

    def _check(self, code: int, key: str) -> None:
        if code:
            raise TransportError(f"Mooncake at {self._where} did not take {key!r} (code {code}): full, or unreachable")

    def _record(self, name: str, *, expired: bool = False) -> tuple[str | None, int]:
        """(nonce, nbytes) of what is published; None if nothing is, or if it has expired and `expired` is not said."""
        data = bytes(self._opened().get(name))
        if not data:
            return None, 0
        try:
            fields = json.loads(data[:256])
            nonce, nbytes, expires_ms = check_key(fields["nonce"]), fields["nbytes"], fields["expires_ms"]
            sound = type(nbytes) is int and nbytes >= 0 and type(expires_ms) is int
        except (ValueError, TypeError, KeyError, RecursionError):
            sound = False
        if not sound:
            raise TransportError(f"the record {name!r} is not one of ours")
        return (nonce, nbytes) if expired or expires_ms > time.time() * 1000 else (None, 0)

    def _forget_expired(self, name: str) -> None:
        if self._record(name)[0] is None:
            self._remove(name)

    def _remove(self, name: str) -> None:
        store = self._opened()
        nonce, _ = self._record(name, expired=True)
        if nonce is not None:
            store.remove(name, True)
            store.remove(f"{name}:{nonce}", True)
