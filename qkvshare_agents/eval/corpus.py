"""Real text that comes with Python: the same on every machine with the same interpreter."""

import argparse
import ast
import dataclasses
import difflib
import heapq
import inspect
import pydoc_data.topics
import textwrap
import typing

from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.template import Encoder, Ids

_CODE_MODULES = (argparse, ast, dataclasses, difflib, heapq, textwrap, typing)
_TASKS = (
    "Summarise the text above in two sentences.",
    "List the three most important points of the text above.",
    "Write a short example that uses what the text above describes.",
    "What is the text above about? Answer for a beginner.",
)


def prose() -> list[str]:
    """The language reference's topics, by name."""
    topics = pydoc_data.topics.topics
    return [topics[name] for name in sorted(topics)]


def code() -> list[str]:
    """Source of standard library modules."""
    return [inspect.getsource(module) for module in _CODE_MODULES]


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
    """`count` (text, task) pairs, each over another piece of prose or code."""
    pieces = [text for pair in zip(prose(), code() * len(prose()), strict=False) for text in pair]
    step = 1500
    return [
        (
            pieces[i % len(pieces)][(i // len(_CODE_MODULES)) * step :][:step] or pieces[i][:step],
            _TASKS[i % len(_TASKS)],
        )
        for i in range(count)
    ]
