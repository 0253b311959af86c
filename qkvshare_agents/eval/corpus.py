"""Real text that comes with Python: the same on every machine with the same interpreter."""

import argparse
import ast
import calendar
import configparser
import csv
import dataclasses
import difflib
import fractions
import heapq
import inspect
import itertools
import pydoc_data.topics
import random
import shutil
import statistics
import tempfile
import textwrap
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.ids import Ids
from qkvshare_agents.prompt.chat_template import Template
from qkvshare_agents.prompt.encoder import Encoder

_CHAT_MODULES = (statistics, shutil, random, calendar, configparser, csv, fractions, tempfile)
_CODE_MODULES = (argparse, ast, dataclasses, difflib, heapq, textwrap, typing)
_TASKS = (
    "Summarise the text above in two sentences.",
    "List the three most important points of the text above.",
    "Write a short example that uses what the text above describes.",
    "What is the text above about? Answer for a beginner.",
)


@dataclass(frozen=True)
class Sample:
    """Ids of one text: the template's opening (`opening_tokens` of them), then `kind` prose, code or chat."""

    kind: str
    ids: Ids
    opening_tokens: int


def prose() -> list[str]:
    """The language reference's topics, by name."""
    topics = pydoc_data.topics.topics
    return [topics[name] for name in sorted(topics)]


def code() -> list[str]:
    """Source of standard library modules."""
    return [inspect.getsource(module) for module in _CODE_MODULES]


def chat() -> Iterator[tuple[str, str]]:
    """Question and answer, turn by turn: about functions of modules that `code` does not use."""
    for module in _CHAT_MODULES:
        for value in _documented(vars(module).values(), module.__name__):
            yield f"What is {value.__qualname__} in {module.__name__} for?", inspect.cleandoc(value.__doc__ or "")
            yield "Show me how it is written.", f"```python\n{textwrap.dedent(inspect.getsource(value))}```"


def _documented(values: Iterable[Any], module: str) -> Iterator[FunctionType]:
    """Functions and methods that are written in `module` and have a docstring."""
    for value in values:
        if getattr(value, "__module__", None) != module:
            continue
        if inspect.isfunction(value) and value.__doc__:
            yield value
        elif inspect.isclass(value):
            yield from _documented(vars(value).values(), module)


def samples(template: Template, size: int, count: int) -> list[Sample]:
    """`count` texts of `size` tokens in turn of prose, code and chat, none of which shares a passage with another.

    Raises InvalidSetting if there is not that much text.
    """
    kinds = {"prose": _segments(template, prose()), "code": _segments(template, code()), "chat": _turns(template)}
    opening, found = template.head(""), []
    for kind, pieces in itertools.islice(itertools.cycle(kinds.items()), count):
        ids = list(opening)
        while len(ids) < size:  # a text that is begun in one sample is not continued in the next
            piece = next(pieces, None)
            if piece is None:
                raise InvalidSetting(f"the corpus has not enough {kind} for {count} samples of {size} tokens")
            ids += piece
        found.append(Sample(kind, tuple(ids[:size]), len(opening)))
    return found


def _segments(template: Template, texts: list[str]) -> Iterator[Ids]:
    for text in texts:
        yield template.encoder.text(text + "\n\n")


def _turns(template: Template) -> Iterator[Ids]:
    for question, answer in chat():
        asked, said = template.encoder.text(question), template.encoder.text(answer)
        yield asked + template.turn + said + template.close


def tokens(encoder: Encoder, count: int) -> Ids:
    """`count` tokens of prose and code in turn. Raises InvalidSetting if there is not that much."""
    ids: list[int] = []
    texts = prose()
    sources = code()
    for index, text in enumerate(texts):
        ids += encoder.text(text)
        if index < len(sources):
            ids += encoder.text(sources[index][:4000])
        if len(ids) >= count:
            return tuple(ids[:count])
    raise InvalidSetting(f"the corpus has {len(ids)} tokens, {count} are asked for")


def tasks(count: int) -> list[tuple[str, str]]:
    """`count` (text, task) pairs, no two over the same piece of prose or code.

    Raises InvalidSetting if there is not that much text.
    """
    texts = [text for pair in zip(prose(), code() * len(prose()), strict=False) for text in pair]
    step, found = 1500, dict[str, str]()
    for i in range(len(texts) * len(_TASKS)):
        if len(found) >= count:
            break
        text = texts[i % len(texts)]
        piece = text[i // len(_CODE_MODULES) * step :][:step] or text[:step]
        found.setdefault(piece, _TASKS[i % len(_TASKS)])
    if len(found) < count:
        raise InvalidSetting(f"the corpus has {len(found)} prompts, {count} are asked for")
    return list(found.items())[:count]
