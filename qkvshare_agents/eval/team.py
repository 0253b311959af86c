"""Agents with conversations that differ: what is stored of each, and what is read behind it."""

from dataclasses import dataclass

from qkvshare_agents.eval import corpus, humaneval, needles
from qkvshare_agents.eval.cases import CUE, Block
from qkvshare_agents.ids import Ids
from qkvshare_agents.model.engine import Engine


@dataclass(frozen=True)
class Agent:
    """A conversation. ids: what is stored. blocks: what is read behind it. problems: what is asked behind it."""

    name: str
    ids: Ids
    blocks: tuple[Block, ...]
    problems: tuple[Ids, ...] = ()


def agents_that_differ(engine: Engine, tokens: int, positions: int, problems: int) -> list[Agent]:
    """Prose, code and a dialogue of `tokens` tokens, and facts to be found in twice as many.

    Text goes on for `positions` tokens, and half as many are repeated. Code is HumanEval's solved problems, and
    `problems` others are asked behind them; with 0, it is source of Python's library.
    """
    found = []
    for sample in corpus.samples(engine.template, tokens + positions + 1, 3):
        if sample.kind == "code" and problems:
            ids, asked = humaneval.solved_then_open(engine.template, tokens + positions + 1, problems)
            sample = corpus.Sample("code", ids, len(engine.template.head("")))
        else:
            asked = []
        found.append(Agent(sample.kind, sample.ids[:tokens], _blocks(engine, sample, tokens, positions), tuple(asked)))
    ids, hidden = needles.haystack(engine.template, 2 * tokens, max(1, min(8, tokens // 128)), seed=tokens)
    questions = tuple(Block("needle", needle.question + needle.answer[:-1], needle.answer) for needle in hidden)
    return [*found, Agent("retrieval", ids, questions)]


def _blocks(engine: Engine, sample: corpus.Sample, tokens: int, positions: int) -> tuple[Block, ...]:
    rest, told = sample.ids[tokens:], sample.ids[sample.opening_tokens : tokens][: positions // 2]
    cue = engine.template.encoder.text(CUE)
    return Block("continue", rest[:-1], rest[1:]), Block("repeat", cue + told[:-1], told)
