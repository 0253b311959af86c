"""A lock whose next holder is not the last one again while another thread waits."""

import threading
from types import TracebackType


class Turnstile:
    """A context manager. Who lets go of it and wants it back at once stands behind whoever was waiting at the gate.

    A plain lock goes back to the thread that is running, so that work in small steps would starve all others.
    """

    def __init__(self) -> None:
        self._gate, self._lock = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._gate:
            self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lock.release()

    def is_awaited(self) -> bool:
        """Whether a thread waits for its turn."""
        return self._gate.locked()
