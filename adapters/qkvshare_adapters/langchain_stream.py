"""The pieces of an answer as they may be shown: without thoughts and tool calls, which come with the whole."""

from langchain_core.messages import AIMessageChunk
from langchain_core.messages.tool import ToolCallChunk
from langchain_core.outputs import ChatGenerationChunk

from qkvshare_adapters.langchain_messages import answer_fields
from qkvshare_agents.turn import Answer

_MARKERS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
_THINK, _THOUGHT = "<think>", "</think>"


class ShownText:
    """Collects pieces of generated text and passes on what is surely part of the answer's text.

    thinking: the prompt has opened a thought. tools: the answer may hold calls. What was passed on can't be
    taken back, so that whatever may be the beginning of a marker waits for the next piece.
    """

    def __init__(self, *, thinking: bool, tools: bool) -> None:
        self._raw = ""
        self._thinking: bool | None = True if thinking else None  # None: not known yet
        self._tools = tools
        self.shown = ""

    def push(self, piece: str) -> str:
        """What can be shown now, behind all that was shown before."""
        self._raw += piece
        text = self._answer()
        if self._tools:
            text = text[: _calls_begin(text)].rstrip()
        return self._show(text)

    def finish(self, text: str) -> str:
        """The rest of the whole answer's `text`."""
        return self._show(text)

    def _show(self, text: str) -> str:
        if not text.startswith(self.shown):
            return ""
        new = text[len(self.shown) :]
        self.shown = text
        return new

    def _answer(self) -> str:
        """The text behind a thought; nothing while that is open."""
        begins = self._raw.lstrip()
        if self._thinking is None and not _THINK.startswith(begins[: len(_THINK)]):
            self._thinking = False
        if self._thinking is False:
            return self._raw
        if self._thinking is None and begins.startswith(_THINK):
            self._thinking = True
        _, ended, rest = begins.partition(_THOUGHT)
        return rest.lstrip("\r\n") if self._thinking and ended else ""


def to_chunk(piece: str | Answer, shown: ShownText, model: str) -> ChatGenerationChunk | None:
    """A piece of text as far as it can be shown, if at all; or the rest, all calls and the usage."""
    if isinstance(piece, Answer):
        return _last_chunk(shown.finish(piece.text), piece, model)
    text = shown.push(piece)
    return ChatGenerationChunk(message=AIMessageChunk(content=text)) if text else None


def _last_chunk(text: str, answer: Answer, model: str) -> ChatGenerationChunk:
    """The rest of the text, all calls, and what is known only at the end."""
    calls = [
        ToolCallChunk(name=c.name, args=c.arguments, id=c.id, index=i, type="tool_call_chunk")
        for i, c in enumerate(answer.calls)
    ]
    fields = answer_fields(answer, model)
    message = AIMessageChunk(content=text, tool_call_chunks=calls, chunk_position="last", **fields)
    return ChatGenerationChunk(message=message)


def _calls_begin(text: str) -> int:
    """Where calls begin or may begin in `text`; its length if nowhere."""
    if text.lstrip()[:1] in ("{", "["):
        return 0
    found = [text.find(marker) for marker in _MARKERS if marker in text]
    partial = [
        len(text) - size
        for marker in _MARKERS
        for size in range(1, min(len(marker), len(text) + 1))
        if text.endswith(marker[:size])
    ]
    return min([*found, *partial, len(text)])
