"""The canaries of what is stored, by the tokens before them."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence

from qkvshare_agents.model.canary import Canary

_KEPT = 4096


class Canaries:
    """What turns expected, by the ids that they ended with; the oldest go. Thread-safe."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, Canary] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, ids: Sequence[int], canary: Canary) -> None:
        """`ids`: all tokens up to the canary's last row."""
        with self._lock:
            self._kept[_name(ids)] = canary
            self._kept.move_to_end(_name(ids))
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)

    def find(self, ids: Sequence[int]) -> Canary | None:
        with self._lock:
            return self._kept.get(_name(ids))

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()


def _name(ids: Sequence[int]) -> bytes:
    return hashlib.sha256(b"".join(i.to_bytes(8, "little") for i in ids)).digest()
