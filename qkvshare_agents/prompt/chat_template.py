"""Turn delimiters, probed from the chat template.

Rendering a whole conversation with `apply_chat_template` is not append-only: Llama-2 puts spaces around
answers, Llama-3 and Gemma trim them, Qwen3 drops earlier thoughts, dates change at midnight, and text that is
encoded again gives other ids than were generated. So the template is rendered with placeholders, once, and
prompts are put together from the markup between them and from segments of text, each encoded on its own.
"""

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2

from qkvshare_agents.errors import UnsupportedModel
from qkvshare_agents.ids import Ids
from qkvshare_agents.prompt.encoder import ANCHOR, Encoder

__all__ = ["Encoder", "Ids", "Template"]

# Takes the place of transformers' clock. A prefix with today's date would die at midnight.
_CLOCK = (
    "{%- macro strftime_now(format) -%}{%- set told = namespace(text=format) -%}"
    "{%- for directive, value in frozen_date.items() -%}"
    "{%- set told.text = told.text.replace(directive, value) -%}"
    "{%- endfor -%}{{- told.text -}}{%- endmacro -%}{{- '' }}"
)
_DIRECTIVES = [f"%{flag}{letter}" for letter in "aAbBcCdDeFgGhHIjklmMnpPrRsStTuUVwWxXyYzZf" for flag in ("-", "")]
_SYSTEM, _USER, _ANSWER, _NEXT = "Qzsystem7Qz", "Qzuser7Qz", "Qzanswer7Qz", "Qznext7Qz"
_TOOL_NAME = "Qztool7Qz"
_TOOL = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "Qzdescription7Qz",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}


class Template:
    """The markup of one model's chat template, and the ids that segments of a prompt become.

    turn: ids that end a user text and open the answer, complete with a thought that the template opens.
    thought: that opening, usually none. past_turn: `turn` without it, as it stands before an earlier answer,
    whose thoughts are not shown again. close: ids that end an answer and open the next user text; end: its
    first half. folds_system: the system text has no place of its own and goes in front of the first user text.
    supports_tools: the template renders tool schemas.

    Raises UnsupportedModel when the tokenizer has no chat template, or one that can't hold a conversation of
    user and assistant turns.
    """

    def __init__(self, tokenizer: Any, *, thinking: bool = False, date: datetime.date | None = None) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UnsupportedModel(f"{type(tokenizer).__name__} has no fast tokenizer; convert it to tokenizer.json")
        if not getattr(tokenizer, "chat_template", None):
            raise UnsupportedModel(
                "the tokenizer has no chat template; use an instruct or chat model, or set tokenizer.chat_template"
            )
        self.tokenizer = tokenizer
        self._date = date or datetime.date.today()
        self._options: dict[str, Any] = {
            "enable_thinking": thinking,
            "date_string": self._date.strftime("%d %b %Y"),
            "frozen_date": {"%%": "\0", **{d: self._date.strftime(d) for d in _DIRECTIVES}, "\0": "%"},
        }
        chat = [_message("user", _USER), _message("assistant", _ANSWER), _message("user", _NEXT)]
        head, opened, close, turn = _split(self._render(chat, generate=True), _USER, _ANSWER, _NEXT)
        ended = _split(self._render(chat[:2]), _ANSWER)[1]
        # Spaces beside an answer belong to the template's rendering, not to what a model generates.
        bare = opened.rstrip(" ")
        self._answer_spaces = opened[len(bare) :]
        turn = bare if bare.startswith(turn) else turn  # a template may ignore add_generation_prompt
        self._close, self._turn = close.lstrip(" "), turn
        self.encoder = Encoder(tokenizer.backend_tokenizer, head + self._close + turn)

        self.opens_thought = turn.rstrip().endswith("<think>")
        at = turn.rindex("<think>") if self.opens_thought else len(turn)
        self._thought = turn[at:]
        self.past_turn, self.thought = self._fill(turn[:at]), self._fill(turn[at:])
        self.turn = self.past_turn + self.thought
        self.close = self._fill(self._close)
        self.end = _common(self.close, self._fill(ended.lstrip(" ")))

        self._head = lru_cache(maxsize=64)(self._head_form)
        self._results = lru_cache(maxsize=64)(self._results_form)
        self.folds_system = _SYSTEM not in self._try_head(True, [])
        self.supports_tools = _TOOL_NAME in self._try_head(not self.folds_system, [_TOOL])

    def head(self, system: str, tools: Sequence[Mapping[str, Any]] = (), user: str = "") -> Ids:
        """Ids up to and with the first user text. With `folds_system`, `system` must be empty."""
        form, texts = self._head(bool(system), json.dumps(list(tools), ensure_ascii=False))
        return self._fill(form, {**texts, _SYSTEM: system, _USER: user}, begins=True)

    def user(self, text: str) -> Ids:
        """Ids that end an answer, and the user text behind it."""
        return self._fill(self._close + _USER, {_USER: text})

    def answer(self, text: str) -> Ids:
        """Ids of an answer of which the generated ids are not known."""
        spaces = "" if text.startswith(" ") else self._answer_spaces
        return self.encoder.text(spaces + text if text else "", self.encoder.context(self._turn))

    def stop_ids(self, eos: Sequence[int]) -> frozenset[int]:
        """Ids that end a turn: the configured ones and the first control token behind an answer."""
        own = [i for i in self.close if i in self.encoder.control_ids]
        return frozenset((*eos, *own[:1]))

    def tool_results(self, results: Sequence[tuple[str, str, str]]) -> Ids | None:
        """Ids between an answer that called tools and the next answer, in the template's own form.

        results: (call id, tool name, content). None if the template has no such form. As with `past_turn`,
        an opened thought is left to the caller.
        """
        form = self._results(len(results)) if self.supports_tools else None
        if form is None:
            return None
        texts: dict[str, str] = {}
        for holders, (call_id, name, content) in zip(map(_result_holders, range(len(results))), results, strict=True):
            if f'"{holders[2]}"' in form:  # the template writes results as JSON strings
                content = json.dumps(content, ensure_ascii=False)[1:-1]
            texts |= zip(holders, (call_id[-9:], name, content), strict=True)
        return self._fill(form, texts)

    def _fill(self, form: str, texts: Mapping[str, str] | None = None, *, begins: bool = False) -> Ids:
        """Ids of markup with texts in place of their holders. begins: nothing stands before it."""
        texts = texts or {}
        pieces = re.split(f"({'|'.join(texts)})", form) if texts else [form]
        ids: Ids = ()
        before, spaces = "" if begins else ANCHOR, ""
        for index, piece in enumerate(pieces):
            if index % 2:
                text = texts[piece]
                ids += self.encoder.text(spaces + text if text else "", before)
                before, spaces = ANCHOR, ""
                continue
            # A space in front of a word is part of the word's token.
            markup = piece.rstrip(" ") if index + 1 < len(pieces) else piece
            spaces = piece[len(markup) :]
            if markup:
                ids += self.encoder.markup(markup, before)
                before = self.encoder.context(markup)
        return ids

    def _try_head(self, with_system: bool, tools: list[dict[str, Any]]) -> str:
        try:
            return self._head(with_system, json.dumps(tools))[0]
        except UnsupportedModel:
            return ""

    def _head_form(self, with_system: bool, tools_json: str) -> tuple[str, dict[str, str]]:
        """Markup up to the first user text, and what else to fill in: strings in tool schemas that would become
        control tokens there."""
        found = sorted((token for token in self.encoder.control if token in tools_json), key=len, reverse=True)
        texts = {f"Qzcontrol{i}Qz": token for i, token in enumerate(found)}
        for holder, token in texts.items():
            tools_json = tools_json.replace(token, holder)
        chat = [_message("system", _SYSTEM)] * with_system + [_message("user", _USER)]
        return _split(self._render(chat, tools=json.loads(tools_json), generate=True), _USER)[0] + _USER, texts

    def _results_form(self, count: int) -> str | None:
        """Markup from the end of an answer with `count` calls to the next answer, with holders."""
        holders = [_result_holders(i) for i in range(count)]
        told = [{"role": "tool", "tool_call_id": c, "name": n, "content": text} for c, n, text in holders]
        empty: tuple[Any, ...] = ({}, "{}")
        for arguments in empty:  # templates differ in what they expect
            functions = [{"name": name, "arguments": arguments} for _, name, _ in holders]
            calls = [{"id": h[0], "type": "function", "function": f} for h, f in zip(holders, functions, strict=True)]
            chat = [_message("user", _USER), {**_message("assistant", ""), "tool_calls": calls}, *told]
            try:
                rendered = self._render(chat, tools=[_TOOL], generate=True)
                _split(rendered, *(text for _, _, text in holders))
            except UnsupportedModel:
                continue
            end = self.encoder.decode(self.end, keep_special=True)
            start = rendered.rfind(end, 0, rendered.index(holders[0][2])) if end else -1
            return rendered[start:].removesuffix(self._thought) if start >= 0 else None
        return None

    def _render(self, chat: Sequence[dict[str, Any]], *, tools: Any = None, generate: bool = False) -> str:
        try:
            source = self.tokenizer.get_chat_template(tools=tools or None)
            return self.tokenizer.apply_chat_template(
                chat,
                tools=tools or None,
                chat_template=(_CLOCK if "strftime_now" in source else "") + source,
                tokenize=False,
                add_generation_prompt=generate,
                **self._options,
            )
        except (jinja2.TemplateError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise UnsupportedModel(f"the chat template refuses {[m['role'] for m in chat]}: {error}") from error


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _result_holders(index: int) -> tuple[str, str, str]:
    """Placeholders of a call's id (Mistral insists on 9 characters), its tool's name and its result."""
    return f"Qzid{index:03}Qz", f"Qzname{index}Qz", f"Qzresult{index}Qz"


def _split(text: str, *holders: str) -> list[str]:
    """The pieces around each placeholder, which must occur once and in order."""
    if re.findall("|".join(holders), text) != list(holders):
        raise UnsupportedModel("the chat template drops, repeats or reorders user and assistant turns")
    return re.split("|".join(holders), text)


def _common(a: Ids, b: Ids) -> Ids:
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length]
