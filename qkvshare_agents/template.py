"""Turn delimiters, probed from the chat template.

Rendering a whole conversation with `apply_chat_template` is not append-only: Llama-2 puts spaces around
answers, Llama-3 and Gemma trim them, Qwen3 drops earlier thoughts, dates change at midnight, and text that is
encoded again gives other ids than were generated. So the template is rendered with placeholders, once, the
delimiters between them are kept as ids, and prompts are put together from delimiters and segments.
"""

import datetime
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jinja2
from tokenizers import Tokenizer

from qkvshare_agents.errors import UnsupportedModel

Ids = tuple[int, ...]
_SYSTEM, _USER, _ANSWER, _NEXT = "Qzsystem7Qz", "Qzuser7Qz", "Qzanswer7Qz", "Qznext7Qz"
_TOOL = {
    "type": "function",
    "function": {
        "name": "Qztool7Qz",
        "description": "Qzdescription7Qz",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}


class Encoder:
    """Text to ids and back on copies of the tokenizer's backend, without shared switches: thread-safe."""

    def __init__(self, backend: Tokenizer) -> None:
        self._markup = Tokenizer.from_str(backend.to_str())
        self._markup.no_truncation()
        self._markup.no_padding()
        self._text = Tokenizer.from_str(self._markup.to_str())
        self._text.encode_special_tokens = True
        self._anchor: str = ""
        self._anchor_ids: list[int] = []

    def markup(self, text: str) -> Ids:
        """Ids of delimiters: special tokens are recognised."""
        return tuple(self._markup.encode(text, add_special_tokens=False).ids)

    def text(self, text: str) -> Ids:
        """Ids of what somebody wrote: `<|im_end|>` in a message is plain text and can't end its turn."""
        if not text:
            return ()
        if self._anchor:
            ids = self._text.encode(self._anchor + text, add_special_tokens=False).ids
            if ids[: len(self._anchor_ids)] == self._anchor_ids:
                return tuple(ids[len(self._anchor_ids) :])
        return tuple(self._text.encode(text, add_special_tokens=False).ids)

    def anchor(self, anchor: str) -> None:
        """Encode text as it would be behind `anchor` (tokenizers that put a space before a string's first word)."""
        self._anchor, self._anchor_ids = anchor, self._text.encode(anchor, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        return self._markup.decode(list(ids), skip_special_tokens=not keep_special)

    def special_id(self, token: str) -> int | None:
        return self._markup.token_to_id(token)


@dataclass(frozen=True)
class Delimiters:
    """Markup between the parts of a conversation, as text.

    head: before the first user text, with the system text's placeholder in it unless `folds_system`.
    turn: ends a user text and opens the answer. close: ends an answer and opens the next user text;
    end: its first half, which ends the answer.
    """

    head: str
    turn: str
    close: str
    end: str
    folds_system: bool


class Template:
    """The markup of one model's chat template, and the ids that segments of a prompt become.

    Raises UnsupportedModel when the tokenizer has no chat template, or one that can't hold a conversation of
    user and assistant turns.
    """

    def __init__(self, tokenizer: Any, *, thinking: bool = False, date: datetime.date | None = None) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UnsupportedModel(f"{type(tokenizer).__name__} has no fast tokenizer; convert it to tokenizer.json")
        if not getattr(tokenizer, "chat_template", None):
            raise UnsupportedModel("the tokenizer has no chat template; set tokenizer.chat_template")
        self._tokenizer = tokenizer
        day = date or datetime.date.today()
        # frozen, since a prefix with today's date would die at midnight
        self._options = {
            "enable_thinking": thinking,
            "date_string": day.strftime("%d %b %Y"),
            "strftime_now": lambda form: datetime.datetime.combine(day, datetime.time()).strftime(form),
        }
        self.encoder = Encoder(tokenizer.backend_tokenizer)
        self.delimiters = self._probe()
        self.supports_tools = _TOOL["function"]["name"] in (self._try_head([_TOOL]) or "")  # type: ignore[index]
        self._fit_encoder()
        self.turn = self.encoder.markup(self.delimiters.turn)
        self.close = self.encoder.markup(self.delimiters.close)
        self.end = self.encoder.markup(self.delimiters.end)
        self.opens_thought = self.delimiters.turn.rstrip().endswith("<think>")
        self._head = lru_cache(maxsize=64)(self._head_parts)

    @property
    def folds_system(self) -> bool:
        """Whether the system text has no place of its own and goes in front of the first user text."""
        return self.delimiters.folds_system

    def head(self, system: str, tools: Sequence[dict[str, Any]] = ()) -> Ids:
        """Ids before the first user text. With `folds_system`, `system` must be empty."""
        before, after = self._head(bool(system), json.dumps(list(tools), sort_keys=True))
        return (*before, *self.encoder.text(system), *after) if system else before

    def stop_ids(self, eos: Sequence[int]) -> frozenset[int]:
        """Ids that end a turn: the configured ones and the token that closes an answer in the template."""
        own = self.end[:1] if self.end and self._is_special(self.end[0]) else ()
        return frozenset((*eos, *own))

    def tool_results(self, results: Sequence[tuple[str, str, str]]) -> Ids | None:
        """Ids between an answer that called tools and the next answer, in the template's own form.

        results: (call id, tool name, content). None if the template has no such form.
        """
        holders = [f"Qzresult{i}Qz" for i in range(len(results))]
        calls = [
            {"id": call_id[-9:], "type": "function", "function": {"name": name, "arguments": {}}}
            for call_id, name, _ in results
        ]
        asked = [
            {"role": "user", "content": _USER},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ]
        told = [
            {"role": "tool", "tool_call_id": call_id[-9:], "name": name, "content": holder}
            for (call_id, name, _), holder in zip(results, holders, strict=True)
        ]
        if not self.supports_tools:
            return None
        try:
            before = self._render(asked, tools=[_TOOL])
            rendered = self._render(asked + told, tools=[_TOOL], generate=True)
        except UnsupportedModel:
            return None
        if not rendered.startswith(before) or not before.endswith(self.delimiters.end):
            return None
        pieces = re.split("|".join(holders), rendered[len(before) :])
        if len(pieces) != len(results) + 1:
            return None
        ids = self.end + self.encoder.markup(pieces[0])
        for (_, _, content), piece in zip(results, pieces[1:], strict=True):
            ids += self.encoder.text(content) + self.encoder.markup(piece)
        return ids

    def _probe(self) -> Delimiters:
        chat = [_message("user", _USER), _message("assistant", _ANSWER), _message("user", _NEXT)]
        head = self._try_head([])
        if folds := head is None or _SYSTEM not in head:
            head, _, _, _ = _split(self._render(chat, generate=True), _USER, _ANSWER, _NEXT)
        _, _, close, turn = _split(self._render(chat, generate=True), _USER, _ANSWER, _NEXT)
        _, end = _split(self._render(chat[:2]), _ANSWER)
        # Spaces beside an answer belong to the template's rendering, not to what a model generates.
        end, close = end.strip(" "), close.lstrip(" ")
        shared = _common(close, end)
        assert head is not None
        return Delimiters(head, turn, close, close[: len(shared)], folds)

    def _try_head(self, tools: list[dict[str, Any]]) -> str | None:
        """What stands before the first user text when there is a system text; None if that is refused."""
        try:
            text = self._render([_message("system", _SYSTEM), _message("user", _USER)], tools=tools, generate=True)
        except UnsupportedModel:
            return None
        return _split(text, _USER)[0]

    def _head_parts(self, with_system: bool, tools_json: str) -> tuple[Ids, Ids]:
        tools = json.loads(tools_json)
        if with_system:
            before, after = _split(self._try_head(tools) or "", _SYSTEM)
            return self.encoder.markup(before), self.encoder.markup(self._trim(after))
        text = self._render([_message("user", _USER)], tools=tools, generate=True)
        return self.encoder.markup(self._trim(_split(text, _USER)[0])), ()

    def _fit_encoder(self) -> None:
        """Choose how text is encoded behind a delimiter so that it gives the ids of the whole rendering."""
        words = "Name two colours."
        chat = [_message("user", words)]
        native = self.encoder.markup(self._render(chat, generate=True))
        head, tail = _split(self._render([_message("user", _USER)], generate=True), _USER)
        for anchor, trims in (("", False), ("\n", False), ("", True), ("\n", True)):
            self.encoder.anchor(anchor)
            opened = self.encoder.markup(head.rstrip(" ") if trims else head)
            if opened + self.encoder.text(words) + self.encoder.markup(tail) == native:
                break
        else:
            self.encoder.anchor("")
            trims = False
        self._trims = trims
        if trims:
            d = self.delimiters
            self.delimiters = Delimiters(d.head, d.turn, d.close.rstrip(" "), d.end, d.folds_system)

    def _trim(self, text: str) -> str:
        return text.rstrip(" ") if self._trims else text

    def _render(self, chat: list[dict[str, Any]], *, tools: Any = None, generate: bool = False) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                chat, tools=tools or None, tokenize=False, add_generation_prompt=generate, **self._options
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise UnsupportedModel(f"the chat template refuses {[m['role'] for m in chat]}: {error}") from error

    def _is_special(self, token_id: int) -> bool:
        return not self.encoder.decode([token_id])


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _split(text: str, *holders: str) -> list[str]:
    """The pieces around each placeholder, which must occur once and in order."""
    pieces = re.split("|".join(holders), text)
    if len(pieces) != len(holders) + 1 or re.findall("|".join(holders), text) != list(holders):
        raise UnsupportedModel("the chat template drops, repeats or reorders user and assistant turns")
    return pieces


def _common(a: str, b: str) -> str:
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length]
