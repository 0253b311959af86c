"""What every transport does, how long it may take, and which keys it takes.

A key is written once: a second `put` fails, so that no reader ever sees half of one package and half of another.
Whatever goes wrong is a TransportError within the deadline; the caller can always replay the text.
"""

import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from qkvshare_agents.errors import InvalidSetting, PackageNotFound, TransportError, TransportTimeout
from qkvshare_agents.wire.payload import Payload

DEADLINE_MS = 500.0
LIFETIME_MS = 600_000
MAX_PACKAGE_BYTES = 4 * 1024**3
T = TypeVar("T")
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")


class Transport(Protocol):
    """name: for reports. crosses_machines: whether others than this user of this machine may reach what is stored.

    put: publish under a new key, for `lifetime_ms`. get: raises PackageNotFound if there is none. missing: those of
    `keys` that are not stored. delete: a key that is not stored is fine. All raise InvalidSetting for a key that is
    not one, TransportTimeout when the deadline passes, and TransportError.
    """

    name: str
    crosses_machines: bool

    def put(
        self, key: str, payload: Payload, *, deadline_ms: float = DEADLINE_MS, lifetime_ms: int = LIFETIME_MS
    ) -> None: ...

    def get(self, key: str, *, deadline_ms: float = DEADLINE_MS) -> Payload: ...

    def missing(self, keys: Sequence[str], *, deadline_ms: float = DEADLINE_MS) -> list[str]: ...

    def delete(self, key: str, *, deadline_ms: float = DEADLINE_MS) -> None: ...

    def close(self) -> None: ...


class Deadline:
    """One span of time for a whole call, however many steps it takes."""

    def __init__(self, limit_ms: float) -> None:
        self.limit_ms = check_deadline(limit_ms)
        self._end = time.monotonic() + limit_ms / 1000

    @property
    def left_ms(self) -> float:
        """Milliseconds that are left; raises TransportTimeout when none are."""
        left = (self._end - time.monotonic()) * 1000
        if left <= 0:
            raise TransportTimeout(f"the deadline of {self.limit_ms:.0f} ms passed")
        return left


class TurnDeadline:
    """One span of time for all that is moved for a turn, however many calls that takes.

    Its clock runs only while one of them does: what the turn computes in between is not the transport's. failed:
    whether a call ended otherwise than with what was asked for, or that it is not there.
    """

    def __init__(self, limit_ms: float) -> None:
        self.limit_ms = self._left_ms = check_deadline(limit_ms)
        self.failed = False

    def run(self, call: Callable[[float], T]) -> T:
        """What `call` returns, which is told how many milliseconds are left. Raises TransportTimeout when none are."""
        started = time.monotonic()
        try:
            if self._left_ms <= 0:
                raise TransportTimeout(f"the {self.limit_ms:.0f} ms in which a turn may move KV have passed")
            return call(self._left_ms)
        except TransportError as error:
            self.failed |= not isinstance(error, PackageNotFound)
            raise
        finally:
            self._left_ms -= (time.monotonic() - started) * 1000


def check_deadline(limit_ms: float) -> float:
    """The limit itself. Raises InvalidSetting unless it is a positive and finite number of milliseconds."""
    if not isinstance(limit_ms, int | float) or not 0 < limit_ms < float("inf"):
        raise InvalidSetting(f"deadline_ms must be positive and finite, not {limit_ms!r}")
    return float(limit_ms)


def run_within(limit_ms: float, work: Callable[[], T], where: str, late: Callable[[], None] = lambda: None) -> T:
    """Run `work` on a thread of its own, for calls that can't be told how long they may take.

    When time is up, `late` is called, which should make `work` end, and TransportTimeout is raised.
    """
    deadline, results, errors = Deadline(limit_ms), list[T](), list[Exception]()

    def target() -> None:
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=target, name="qkvshare-transport", daemon=True)
    thread.start()
    thread.join(deadline.left_ms / 1000)
    if errors:
        raise errors[0]
    if not results:
        late()
        raise TransportTimeout(f"no answer from {where} within {limit_ms:.0f} ms")
    return results[0]


def check_key(key: str) -> str:
    """The key itself. Raises InvalidSetting unless it is safe as a file name and in a server's key."""
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise InvalidSetting(
            f"{str(key)[:40]!r} is no key: use 1 to 128 letters, digits, - and _, beginning with a letter or digit"
        )
    return key
