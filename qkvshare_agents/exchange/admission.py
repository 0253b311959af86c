"""What of a package may come in, besides its KV, which its canary speaks for."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace

from qkvshare_agents.ids import Ids
from qkvshare_agents.prompt.detokenizer import unspeakable
from qkvshare_agents.prompt.encoder import Encoder
from qkvshare_agents.prompt.layout import ledger_key
from qkvshare_agents.prompt.tool_calls import parse_tool_calls
from qkvshare_agents.wire.package import CLOCK_SKEW_MS, Package

Entry = tuple[str, int, int]  # (text, start, stop): what a member said is ids[start:stop]
_REMEMBERED = 100_000  # about 20 MB
_LONGEST_ID = 256  # characters of a call's id, the one thing that its tokens do not show


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


def sound_words(encoder: Encoder, ids: Ids, covered: int, entries: Sequence[Entry]) -> Iterator[Entry]:
    """Those of a ledger's entries that a prompt may be spelt by; all, where the sender is honest.

    Their ids are the text, hold no control tokens, and lie in the tokens that the KV covers, but for the last one of an
    answer: a turn that ends by length never feeds it. No two overlap: the check costs what decoding `ids` costs.
    """
    done = 0
    for text, start, stop in sorted(entries, key=lambda entry: entry[1:]):
        if done <= start and stop <= covered + 1 and _says(encoder, ids[start:stop], text):
            done = stop
            yield text, start, stop


def unsound_words(encoder: Encoder, package: Package) -> str | None:
    """Why nothing of a package is used: a word of its ledger would put other tokens into prompts than its text."""
    sound = sum(1 for _ in sound_words(encoder, package.ids, package.covered_tokens, package.ledger))
    if lying := len(package.ledger) - sound:
        return f"{lying} of {len(package.ledger)} answers in the package are not the text that its tokens say"
    return None


def _says(encoder: Encoder, ids: Ids, key: str) -> bool:
    """Whether `key` is what an answer of these ids is filed under: its text, spaces at its ends aside, or the text
    beside its calls, and these."""
    if not unspeakable(encoder).isdisjoint(ids):
        return False
    if encoder.decode(ids).strip() == key.strip():
        return True
    parts = key.split("\0")[1:]
    call_ids = parts[::3]
    if not parts or len(parts) % 3 or max(map(len, call_ids)) > _LONGEST_ID:
        return False
    beside, calls = parse_tool_calls(encoder.decode(ids, keep_special=True), parts[1::3])
    told = [replace(call, id=call_id) for call, call_id in zip(calls, call_ids, strict=False)]
    return len(calls) == len(call_ids) and ledger_key(beside, told) == key
