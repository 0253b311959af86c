"""What is read behind a stored cache: real text that goes on, the stored text again, questions, problems to solve."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.eval import corpus, humaneval, needles
from qkvshare_agents.ids import Ids
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model.engine import Engine

CUE = "\n\nRepeat the text above:\n"
Kind = Literal["continue", "repeat", "needle", "code"]


@dataclass(frozen=True)
class Plan:
    """tokens: cached per sample. samples: in turn prose, code and chat. positions, repeat_positions: of each sample.

    needles: lengths of the texts with hidden facts, `questions` in each. problems: of HumanEval, behind `tokens`
    tokens of solved ones, each answered with at most `answer_tokens` tokens. sweep: also all widths, not presets only.
    """

    tokens: int = 2048
    samples: int = 6
    positions: int = 704
    repeat_positions: int = 192
    needles: tuple[int, ...] = ()
    questions: int = 8
    problems: int = 0
    answer_tokens: int = 96
    sweep: bool = True

    def __post_init__(self) -> None:
        if self.tokens < 16 or self.samples < 2 or self.positions < 1 or not 1 <= self.repeat_positions < self.tokens:
            raise InvalidSetting(
                f"need tokens >= 16, samples >= 2, positions >= 1 and repeat_positions below tokens, not {self}"
            )

    @property
    def longest(self) -> int:
        """Tokens in the longest sequence. Cues and questions are short, but their ids are the tokenizer's."""
        asked = max(self.positions, self.repeat_positions + 32, (self.answer_tokens + 512) if self.problems else 0)
        return max(self.tokens + asked, max(self.needles, default=0) + 128)


FULL = Plan(needles=(1024, 2048, 4096), problems=24)
# REDUCED answers within two minutes on two cores
REDUCED = Plan(
    tokens=320, samples=3, positions=40, repeat_positions=40, needles=(320,), questions=2, problems=1, answer_tokens=24,
    sweep=False,
)  # fmt: skip


@dataclass(frozen=True)
class Block:
    """Ids fed behind the cache at once, and the `targets` that the last positions should have predicted."""

    kind: Kind
    fed: Ids
    targets: Ids


@dataclass(frozen=True)
class Case:
    """ids: what is cached and stored. blocks: what is read behind the native cache of `ids`, which they may use."""

    ids: Ids
    blocks: Callable[[Engine, KVCache], list[Block]]
    is_sample: bool = False  # of the plan's length: bytes and times are taken from these only


def cases(engine: Engine, plan: Plan) -> Iterator[Case]:
    """In an order that never changes: the samples, then haystacks, then HumanEval."""
    for sample in corpus.samples(engine.template, plan.tokens + plan.positions + 1, plan.samples):
        found = _text_blocks(engine, sample, plan)
        yield Case(sample.ids[: plan.tokens], lambda engine, kv, found=found: found, is_sample=True)  # type: ignore[misc]
    for tokens in plan.needles:
        ids, hidden = needles.haystack(engine.template, tokens, plan.questions, seed=tokens)
        asked = [Block("needle", needle.question + needle.answer[:-1], needle.answer) for needle in hidden]
        yield Case(ids, lambda engine, kv, asked=asked: asked)  # type: ignore[misc]
    if plan.problems:
        solved, prompts = humaneval.solved_then_open(engine.template, plan.tokens, plan.problems)
        yield Case(solved, lambda engine, kv: code_blocks(engine, kv, prompts, plan.answer_tokens))


def _text_blocks(engine: Engine, sample: corpus.Sample, plan: Plan) -> list[Block]:
    """Continuation of the sample's text, and repetition of its beginning."""
    rest = sample.ids[plan.tokens :]
    text = sample.ids[sample.opening_tokens : plan.tokens][: plan.repeat_positions]
    cue = engine.template.encoder.text(CUE)
    return [Block("continue", rest[:-1], rest[1:]), Block("repeat", cue + text[:-1], text)]


def code_blocks(engine: Engine, kv: KVCache, prompts: Sequence[Ids], tokens: int) -> list[Block]:
    """The native cache's greedy answers. A scheme whose likeliest token is the same all along gives the same answer."""
    blocks: list[Block] = []
    start = kv.tokens
    for prompt in prompts:
        run, answer = engine.begin(kv), list[int]()
        logits = engine.feed(run, prompt)
        while logits is not None and len(answer) < tokens:
            answer.append(int(logits.argmax()))
            logits = None if answer[-1] in engine.stop_ids else engine.feed(run, answer[-1:])
        kv.crop(start)
        blocks.append(Block("code", (*prompt, *answer[:-1]), tuple(answer)))
    return blocks
