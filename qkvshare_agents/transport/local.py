"""Within one process: a reference, no bytes moved. Also the plainest reading of what a transport does."""

import threading
import time
from collections.abc import Sequence

from qkvshare_agents.errors import PackageNotFound, TransportError
from qkvshare_agents.transport.interface import DEADLINE_MS, LIFETIME_MS, Deadline, check_key
from qkvshare_agents.wire.payload import Payload


class LocalTransport:
    """Payloads by key. What a reader gets is the writer's own memory, which neither may change."""

    name = "local"
    crosses_machines = False

    def __init__(self) -> None:
        self._stored: dict[str, tuple[Payload, float]] = {}
        self._lock = threading.Lock()

    def put(
        self, key: str, payload: Payload, *, deadline_ms: float = DEADLINE_MS, lifetime_ms: int = LIFETIME_MS
    ) -> None:
        Deadline(deadline_ms)
        with self._lock:
            self._sweep()
            if check_key(key) in self._stored:
                raise TransportError(f"key {key!r} is published already; use a new one")
            kept = Payload(payload.pieces, lasting=True)
            self._stored[key] = (kept, time.monotonic() + lifetime_ms / 1000)

    def get(self, key: str, *, deadline_ms: float = DEADLINE_MS) -> Payload:
        Deadline(deadline_ms)
        with self._lock:
            self._sweep()
            if check_key(key) not in self._stored:
                raise PackageNotFound(f"nothing is stored under {key!r}: never published, expired or deleted")
            return self._stored[key][0]

    def missing(self, keys: Sequence[str], *, deadline_ms: float = DEADLINE_MS) -> list[str]:
        Deadline(deadline_ms)
        with self._lock:
            self._sweep()
            return [key for key in keys if check_key(key) not in self._stored]

    def delete(self, key: str, *, deadline_ms: float = DEADLINE_MS) -> None:
        Deadline(deadline_ms)
        with self._lock:
            self._stored.pop(check_key(key), None)

    def close(self) -> None:
        with self._lock:
            self._stored.clear()

    def _sweep(self) -> None:
        now = time.monotonic()
        for key in [key for key, (_, end) in self._stored.items() if end <= now]:
            del self._stored[key]
