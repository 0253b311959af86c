"""The answer as it grows: chooses ids, passes finished text on, knows when to end."""

from collections.abc import Callable, Sequence

from torch import Tensor

from qkvshare_agents.detokenizer import Detokenizer, ids_of, speakable
from qkvshare_agents.engine import Engine
from qkvshare_agents.grammar import Grammar
from qkvshare_agents.sampling import Sampler
from qkvshare_agents.toolcall import ToolCall, parse_tool_calls, split_thought
from qkvshare_agents.turn import Turn


class Speech:
    """The answer as it grows: chooses ids, passes finished text on, and knows when to end."""

    def __init__(self, engine: Engine, turn: Turn, longest: int, on_text: Callable[[str], None]) -> None:
        grammar = _grammar(engine, turn)
        self._engine, self._turn, self._longest, self._on_text = engine, turn, longest, on_text
        self._sampler = Sampler(turn.sampling)
        self._text = Detokenizer(engine.template.encoder, turn.sampling.stop)
        self._matcher = grammar.start() if grammar else None
        self._held = ""
        self.finish_reason = "stop"
        self.spoken_ids: Sequence[int] = ()

    @property
    def ids(self) -> list[int]:
        return self._text.ids

    @property
    def left(self) -> int:
        """Tokens that may come yet."""
        return self._longest - len(self.ids)

    def choose(self, logits: Tensor) -> int | None:
        """As `add`; returns the token, or None when the answer has ended."""
        return self.ids[-1] if self.add(logits) else None

    def add(self, logits: Tensor) -> bool:
        """Choose the next token; True if the answer goes on behind it."""
        if self._matcher:
            logits = self._matcher.mask(logits)
        token = self._sampler.choose(logits, self.ids)
        if token in self._engine.stop_ids:
            return False
        if self._matcher:
            self._matcher.accept(token)
        self._say(self._text.push(token))
        if self._text.stopped or (self._matcher and self._matcher.finished):
            return False
        if len(self.ids) >= self._longest:
            self.finish_reason = "length"
            return False
        return True

    def finish(self) -> tuple[str, str | None, tuple[ToolCall, ...]]:
        """(text, thought, calls) of the whole answer."""
        self._say(self._text.finish())
        encoder, template = self._engine.template.encoder, self._engine.template
        thought, text = split_thought(self._text.text, opened=template.opens_thought)
        self.spoken_ids = ids_of(encoder, speakable(encoder, self.ids), text)
        calls: tuple[ToolCall, ...] = ()
        if self._turn.tools and not self._text.stopped:
            names = {tool["function"]["name"] for tool in self._turn.tools}
            raw = split_thought(encoder.decode(self.ids, keep_special=True), opened=template.opens_thought)[1]
            beside, calls = parse_tool_calls(raw, names)
            if calls:
                text, self.finish_reason = beside, "tool_calls"
        if not calls and self._held:
            self._on_text(self._held)
        return text, thought, calls

    def _say(self, piece: str) -> None:
        """Pass text on. What may be a tool call is held back until it is known."""
        if self._turn.tools and (self._held or self._text.text.lstrip()[:1] in ("<", "[", "{", "")):
            self._held += piece
        elif piece:
            self._on_text(piece)


def _grammar(engine: Engine, turn: Turn) -> Grammar | None:
    """What the answer has to follow, if anything."""
    stop = sorted(engine.stop_ids)
    if turn.tools and (turn.must_call or turn.schema is not None):
        instead = None if turn.must_call else turn.schema
        return Grammar.tool_calls(engine.tokenizer, turn.tools, stop_ids=stop, instead=instead)
    return Grammar.json_schema(engine.tokenizer, turn.schema, stop) if turn.schema is not None else None
