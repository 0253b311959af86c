"""The answer as it grows: chooses ids, passes finished text on, knows when to end."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qkvshare_agents.model.engine import Engine
from qkvshare_agents.prompt.answer_stream import AnswerStream, begins_call
from qkvshare_agents.prompt.detokenizer import Detokenizer, ids_of, speakable
from qkvshare_agents.prompt.grammar import Grammar
from qkvshare_agents.prompt.sampling import Sampler
from qkvshare_agents.prompt.tool_calls import CLOSE, MARKERS, OPEN, ToolCall, parse_tool_calls, split_thought
from qkvshare_agents.turns.request import Turn


class Speech:
    """The answer as it grows: chooses ids, passes finished text on, and knows when to end."""

    def __init__(self, engine: Engine, turn: Turn, longest: int, on_text: Callable[[str], None]) -> None:
        grammar = _grammar(engine, turn)
        self._engine, self._turn, self._longest, self._on_text = engine, turn, longest, on_text
        self._sampler = Sampler(turn.sampling)
        self._text = Detokenizer(engine.template.encoder, turn.sampling.stop)
        self._matcher = grammar.start() if grammar else None
        self._shown = AnswerStream(thinking=engine.template.opens_thought, tools=bool(turn.tools))
        control = engine.template.encoder.control
        self._marker_ids = {control[marker] for marker in MARKERS if marker in control}
        # Who knows tools and may call none is tempted to: calls can't begin then
        self._calls_barred = not turn.tools and turn.schema is None and _knows_tools(turn)
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
        token = self._choose(logits)
        if token in self._engine.stop_ids:
            return False
        if self._matcher:
            self._matcher.accept(token)
        if token in self._marker_ids:
            self._shown.hold(len(self._text.text))
        self._say(self._text.push(token))
        if self._text.stopped or (self._matcher and self._matcher.finished) or self._has_its_call(token):
            return False
        if len(self.ids) >= self._longest:
            self.finish_reason = "length"
            return False
        return True

    def finish(self) -> tuple[str, str | None, tuple[ToolCall, ...]]:
        """(text, thought, calls) of the whole answer."""
        self._say(self._text.finish(cut=self.finish_reason == "length"))
        encoder, template = self._engine.template.encoder, self._engine.template
        thought, text = split_thought(self._text.text, opened=template.opens_thought)
        self.spoken_ids = ids_of(encoder, speakable(encoder, self.ids), text)
        calls: tuple[ToolCall, ...] = ()
        if self._turn.tools and not self._text.stopped:
            beside, calls = self._calls()
            if calls:
                text = beside
                self.finish_reason = "length" if self.finish_reason == "length" else "tool_calls"
        if len(calls) > 1 and not self._turn.parallel_calls:  # of one list, which ends with the last of them
            calls, self.spoken_ids = calls[:1], ()
        if rest := self._shown.finish(text):
            self._on_text(rest)
        return text, thought, calls

    def _choose(self, logits: Tensor) -> int:
        """The next token; where calls are barred, the next best one that begins none."""
        token = self._sampler.choose(logits, self.ids)
        if self._calls_barred:
            encoder, logits = self._engine.template.encoder, logits.clone()
            said = self._text.text
            while token not in self._engine.stop_ids and (
                token in self._marker_ids or (begins_call(said + encoder.decode([token])) and not begins_call(said))
            ):
                logits[token] = -torch.inf
                token = self._sampler.choose(logits, self.ids)
        return token

    def _calls(self) -> tuple[str, tuple[ToolCall, ...]]:
        """(text beside the calls, the calls) so far. Some markers are control tokens, so those are kept."""
        raw = self._engine.template.encoder.decode(self.ids, keep_special=True)
        raw = split_thought(raw, opened=self._engine.template.opens_thought)[1]
        return parse_tool_calls(raw, {tool["function"]["name"] for tool in self._turn.tools})

    def _has_its_call(self, token: int) -> bool:
        """Whether the one call of a turn without parallel calls is complete behind `token`."""
        if self._turn.parallel_calls or not self._turn.tools:
            return False
        encoder = self._engine.template.encoder
        if not set("}>]") & set(encoder.decode([token], keep_special=True)) or not self._calls()[1]:
            return False
        raw = encoder.decode(self.ids, keep_special=True)
        return OPEN not in raw or raw.rstrip().endswith(CLOSE)

    def _say(self, piece: str) -> None:
        if text := self._shown.push(piece):
            self._on_text(text)


def _knows_tools(turn: Turn) -> bool:
    return bool(turn.speaker.tools) or any(message.calls for message in turn.messages)


def _grammar(engine: Engine, turn: Turn) -> Grammar | None:
    """What the answer has to follow, if anything."""
    stop = sorted(engine.stop_ids)
    if turn.tools and (turn.must_call or turn.schema is not None):
        instead = None if turn.must_call else turn.schema
        return Grammar.tool_calls(engine.tokenizer, turn.tools, stop_ids=stop, instead=instead)
    return Grammar.json_schema(engine.tokenizer, turn.schema, stop) if turn.schema is not None else None
