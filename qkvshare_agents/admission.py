"""What of a package may come in, besides its KV, which its canary speaks for."""

import heapq

from qkvshare_agents.package import CLOCK_SKEW_MS, Package

_REMEMBERED = 100_000  # about 20 MB


class Admitted:
    """Packages that came in, remembered until they expire: none comes in twice. For one thread."""

    def __init__(self, most: int = _REMEMBERED) -> None:
        self._most = most
        self._ids: set[str] = set()
        self._ends: list[tuple[int, str]] = []  # a heap: when each may be forgotten

    def refusal(self, package: Package, now_ms: int) -> str | None:
        """Why a package does not come in: it did before, or there is no room to remember it."""
        while self._ends and self._ends[0][0] < now_ms:
            self._ids.discard(heapq.heappop(self._ends)[1])
        if package.id in self._ids:
            return "the package came in before; its pages are here, or were evicted since"
        if len(self._ids) >= self._most:
            return f"{self._most:,} packages that have not expired came in, and this host remembers no more of them"
        return None

    def note(self, package: Package) -> None:
        """It came in."""
        self._ids.add(package.id)
        heapq.heappush(self._ends, (package.expires_ms + CLOCK_SKEW_MS, package.id))  # a clock may be set back a little
