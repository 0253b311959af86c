"""Ids -> text, token by token, cut at stop strings."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from qkvshare_agents.ids import Ids
from qkvshare_agents.prompt.encoder import Encoder
from qkvshare_agents.prompt.tool_calls import ALL_MARKERS

_UNFINISHED = "\ufffd"  # what incomplete UTF-8 decodes to
_CHARACTER_BYTES = 4  # at most, and as many ids


class Detokenizer:
    """Text of a growing answer. The pieces that `push` and `finish` return add up to `text`."""

    def __init__(self, encoder: Encoder, stop: Sequence[str] = ()) -> None:
        self._encoder = encoder
        self._stop = tuple(stop)
        self.ids: list[int] = []
        self.text = ""
        self.stopped = False
        self._sent = 0
        self._window = self._read = 0  # decode from a little before the new ids: some tokenizers need the context

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is final now ("" while it may still be part of a stop string)."""
        self.ids.append(token_id)
        before = self._encoder.decode(self.ids[self._window : self._read])
        after = self._encoder.decode(self.ids[self._window :])
        if after.endswith(_UNFINISHED) or len(after) <= len(before):
            return ""
        self.text += after[len(before) :]
        self._window, self._read = self._read, len(self.ids)
        self._cut()
        return self._release(0 if self.stopped else self._held())

    def finish(self, *, cut: bool = False) -> str:
        """No more tokens come: what was held back. cut: perhaps inside a character, which is left out then."""
        if not self.stopped:
            before = self._encoder.decode(self.ids[self._window : self._read])
            rest = self._encoder.decode(self.ids[self._window :])[len(before) :]
            self.text += rest.rstrip(_UNFINISHED) if cut else rest
            self._cut()
        return self._release(0)

    def _cut(self) -> None:
        found = [at for at in (self.text.find(s, self._sent) for s in self._stop) if at >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _held(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        lengths = (n for s in self._stop for n in range(min(len(s) - 1, len(self.text)), 0, -1))
        return max((n for n in lengths if any(s.startswith(self.text[-n:]) for s in self._stop)), default=0)

    def _release(self, held: int) -> str:
        end = len(self.text) - held
        piece, self._sent = self.text[self._sent : end], max(end, self._sent)
        return piece


def ids_of(encoder: Encoder, ids: Sequence[int], text: str) -> Ids:
    """Ids that stand for `text`, a part of what `ids` decode to: verbatim as far as possible, else encoded again.

    An answer loses its end to a stop string inside a token, or its beginning (the thoughts) before it is shown.
    """
    decode = encoder.decode
    whole = decode(ids)
    if whole == text:
        return tuple(ids)
    if not text:
        return ()
    # Decoded text grows with every id, so the cut is found by bisection; only parts of a character disturb that.
    if whole.endswith(text):
        near = bisect_left(range(len(ids)), -len(text), key=lambda start: -len(decode(ids[start:])))
        for start in range(max(near - _CHARACTER_BYTES, 0), near + 1):
            if decode(ids[start:]) == text:
                return tuple(ids[start:])
    shared = next((i for i, (a, b) in enumerate(zip(whole, text, strict=False)) if a != b), min(len(whole), len(text)))
    kept = bisect_right(range(len(ids)), shared, key=lambda stop: len(decode(ids[:stop])))
    kept = min(kept + _CHARACTER_BYTES, len(ids))
    while kept and not text.startswith(decode(ids[:kept])):
        kept -= 1
    return (*ids[:kept], *encoder.text(text[len(decode(ids[:kept])) :]))


def unspeakable(encoder: Encoder) -> frozenset[int]:
    """Control tokens that no earlier answer of a prompt may hold: all but those that mark calls."""
    return encoder.control_ids.difference(
        encoder.control[marker] for marker in ALL_MARKERS if marker in encoder.control
    )


def speakable(encoder: Encoder, ids: Sequence[int]) -> Ids:
    """An answer's ids as later prompts hold them. A model may generate what opens a system turn; its text does not
    show that, and no prompt repeats it."""
    dropped = unspeakable(encoder)
    return tuple(ids) if dropped.isdisjoint(ids) else tuple(i for i in ids if i not in dropped)
