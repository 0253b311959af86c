"""Constrained decoding: which tokens may come next, so that the answer is JSON, a tool call or a choice.

A thin layer over llguidance (https://github.com/guidance-ai/llguidance), which the extra `autogen` brings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from qkvshare_agents.errors import InvalidSetting, MissingDependency, UnsupportedModel

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# No free whitespace: tiny models that may write a space tend to write nothing else. Answers are spaced like
# pydantic's `model_dump_json`, calls like chat templates do it: written again they stay what was generated.
_COMPACT = {"whitespace_flexible": False}
_SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# Reading a vocabulary takes up to a second. The inner key is what can change about a tokenizer.
_known: WeakKeyDictionary[Any, dict[tuple[int, ...], LLTokenizer]] = WeakKeyDictionary()


class Grammar:
    """What a turn may consist of; built once, started once per turn.

    `tokenizer`: a fast Hugging Face tokenizer. `stop_ids`: the tokens that end a turn, by default its
    `eos_token_id`. Raises InvalidSetting for what can't be enforced, with the reason, UnsupportedModel for a
    tokenizer that llguidance can't read, MissingDependency without llguidance.
    """

    def __init__(self, tokenizer: Any, rule: str, stop_ids: Sequence[int] = ()) -> None:
        """`rule` is in llguidance's notation; the constructors below write it."""
        vocabulary = _vocabulary(tokenizer, stop_ids)
        from llguidance import LLMatcher

        self._root = LLMatcher(vocabulary, "%llguidance {}\nstart: " + rule, log_level=0)
        _check(self._root)

    @classmethod
    def json_object(cls, tokenizer: Any, stop_ids: Sequence[int] = ()) -> Grammar:
        """Any JSON object. Nothing but the caller's limit on new tokens bounds its length."""
        return cls.json_schema(tokenizer, {"type": "object"}, stop_ids)

    @classmethod
    def json_schema(cls, tokenizer: Any, schema: Mapping, stop_ids: Sequence[int] = ()) -> Grammar:
        """Compact JSON that follows `schema`, keys in its order."""
        return cls(tokenizer, _json(schema, _COMPACT), stop_ids)

    @classmethod
    def tool_calls(
        cls,
        tokenizer: Any,
        tools: Sequence[Mapping],
        begin: str = "<tool_call>\n",
        end: str = "\n</tool_call>",
        stop_ids: Sequence[int] = (),
        instead: Mapping | None = None,
    ) -> Grammar:
        """Exactly one call of one of `tools` (OpenAI function dicts), readable by `parse_tool_calls`.

        `instead`: a schema that the answer may follow rather than call a tool.

        Special tokens in `begin` and `end` must come as tokens; their letters don't count.
        """
        functions = [tool.get("function") or {} for tool in tools]
        if not functions or not all(isinstance(function.get("name"), str) for function in functions):
            form = '{"type": "function", "function": {"name": …}}'
            raise InvalidSetting(f"{tools!r}: a call needs at least one tool, each of the form {form}")
        calls = []
        for function in functions:
            head = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
            schema = {"type": "object", **(function.get("parameters") or {"properties": {}})}
            calls.append(f'{_literal(head)} {_json(schema, _SPACED)} "}}"')
        first, last = _marker(begin, tokenizer), _marker(end, tokenizer)
        first = first if instead is None else f"{_json(instead, _COMPACT)} | {first}"
        return cls(tokenizer, f"{first} call {last}\ncall: " + "\n    | ".join(calls), stop_ids)

    @classmethod
    def choice(cls, tokenizer: Any, options: Sequence[str], stop_ids: Sequence[int] = ()) -> Grammar:
        """One of `options`, letter by letter."""
        if isinstance(options, str) or not options or not all(options):
            raise InvalidSetting(f"{options!r}: a choice needs a list of texts, none of them empty")
        return cls(tokenizer, " | ".join(map(_literal, options)), stop_ids)

    def start(self) -> Matcher:
        """A matcher at the beginning of a turn; matchers share no state."""
        return Matcher(self._root.deep_copy())


class Matcher:
    """Where one turn stands in its grammar. For one thread at a time."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def finished(self) -> bool:
        """The grammar is complete and nothing but the end of the turn may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def mask(self, logits: Tensor) -> Tensor:
        """A copy of `logits` [V], -inf where a token may not come next; V may exceed the vocabulary.

        The end of the turn is allowed exactly when the text so far is complete.
        """
        # A byte for each token. In numpy: torch would wake its thread pool for each of these steps.
        bias = np.frombuffer(self._matcher.compute_logit_bias(), dtype=np.uint8)
        _check(self._matcher)
        forbidden = np.ones(logits.shape[-1], dtype=bool)
        forbidden[: bias.size] = bias[: forbidden.size] == 0
        return logits.masked_fill(torch.from_numpy(forbidden).to(logits.device), float("-inf"))

    def accept(self, token_id: int) -> None:
        """Move on by one token. Raises InvalidSetting for a token that the mask forbids."""
        self._matcher.consume_token(token_id)
        _check(self._matcher)


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        reason = matcher.get_error().strip().split("\n")[0]
        raise InvalidSetting(f"this can't be enforced: {reason}. Simplify the schema or ask for plain text.")


def _vocabulary(tokenizer: Any, stop_ids: Sequence[int]) -> LLTokenizer:
    """llguidance's view of `tokenizer`, kept as long as that one lives."""
    try:
        from llguidance.hf import from_tokenizer
    except ImportError as error:
        text = 'constrained decoding needs llguidance: pip install "qkvshare-agents[autogen]"'
        raise MissingDependency(text) from error
    stops = list(stop_ids) or [tokenizer.eos_token_id]
    views, key = _known.setdefault(tokenizer, {}), (len(tokenizer), *stops)
    if key not in views:
        try:
            views[key] = from_tokenizer(tokenizer, eos_token=stops)
        except (TypeError, ValueError) as error:
            text = "constrained decoding needs a fast tokenizer with an eos_token, or stop_ids"
            raise UnsupportedModel(f"{text}; this one can't be read: {error}") from error
    return views[key]


def _literal(text: str) -> str:
    """llguidance writes literals like JSON does, but its lexer refuses a bare DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _marker(text: str, tokenizer: Any) -> str:
    """`text` as literals, but its special tokens by id: their letters stand for something else."""
    special = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    pattern = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True))
    pieces = re.split(f"({pattern})", text) if special else [text]
    return " ".join(f"<[{special[piece]}]>" if piece in special else _literal(piece) for piece in pieces if piece)


def _json(schema: Mapping, options: Mapping) -> str:
    try:
        text = json.dumps(schema)
        # Fewer texts fit a closed branch: "all of" may become impossible, "exactly one" wrongly true.
        close = None if re.search('"(allOf|oneOf)"', text) else _closed
        return "%json " + json.dumps({**json.loads(text, object_hook=close), "x-guidance": options})
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidSetting(f"a JSON schema must be a dict that JSON can hold: {error}") from error


def _closed(node: dict[str, Any]) -> dict[str, Any]:
    """Take away the leave to add properties that JSON Schema gives by default: small models ramble in it."""
    elsewhere = {"$ref", "anyOf", "patternProperties"}  # other properties come from there
    if node.get("type") == "object" and "properties" in node and not node.keys() & elsewhere:
        node.setdefault("additionalProperties", False)
    return node
