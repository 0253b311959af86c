"""The text of an answer while it grows: without thoughts and tool calls, which come with the whole answer.

One rule for every adapter. What was passed on can't be taken back, so whatever may be the beginning of a call waits
until it is known.
"""

import re

from qkvshare_agents.prompt.tool_calls import MARKERS

_THINK, _THOUGHT = "<think>", "</think>"
# Where a call can't be made, these can't be written: the beginnings of markers, and a call without one
_STEMS = ("<tool", "[TOOL", "<|python")
_BARE = re.compile(r'\s*\[?\s*\{\s*"name"')


class AnswerStream:
    """Takes pieces of generated text; gives what is surely part of the answer's text.

    thinking: the prompt has opened a thought. tools: the answer may hold calls.
    """

    def __init__(self, *, thinking: bool, tools: bool) -> None:
        self._raw = ""
        self._thinking: bool | None = True if thinking else None  # None: not known yet
        self._tools = tools
        self._held_from: list[int] = []
        self.shown = ""

    def push(self, piece: str) -> str:
        """What can be shown now, behind all that was shown before."""
        self._raw += piece
        begin = self._begin()
        text = self._raw[begin:]
        if self._tools:
            marked = [at - begin for at in self._held_from if at >= begin]
            text = text[: min([*marked, _calls_begin(text)])].rstrip()
        return self._show(text)

    def hold(self, at: int) -> None:
        """A marker that text does not show, a control token, stands behind `at` characters."""
        self._held_from.append(at)

    def finish(self, text: str) -> str:
        """The rest of the whole answer's `text`."""
        return self._show(text)

    def _show(self, text: str) -> str:
        if not text.startswith(self.shown):
            return ""
        new = text[len(self.shown) :]
        self.shown = text
        return new

    def _begin(self) -> int:
        """Where the answer begins, behind a thought; at the end while that is open."""
        begins = self._raw.lstrip()
        if self._thinking is None and not _THINK.startswith(begins[: len(_THINK)]):
            self._thinking = False
        if self._thinking is False:
            return 0
        if self._thinking is None and begins.startswith(_THINK):
            self._thinking = True
        _, ended, rest = self._raw.partition(_THOUGHT)
        return len(self._raw) - (len(rest.lstrip("\r\n")) if self._thinking and ended else 0)


def begins_call(text: str) -> bool:
    """Whether a call begins in `text`, an answer so far; said early, where something else can still follow."""
    return any(stem in text for stem in _STEMS) or _BARE.match(text) is not None


def _calls_begin(text: str) -> int:
    """Where calls begin or may begin in `text`; its length if nowhere."""
    if text.lstrip()[:1] in ("{", "["):
        return 0
    found = [text.find(marker) for marker in MARKERS if marker in text]
    partial = [
        len(text) - size
        for marker in MARKERS
        for size in range(1, min(len(marker), len(text) + 1))
        if text.endswith(marker[:size])
    ]
    return min([*found, *partial, len(text)])
