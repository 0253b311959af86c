"""How an answer goes on behind its first token: by our own loop, or by transformers' `generate`.

Both choose tokens in the same place (`Speech`), so that sampling, grammars, stop strings, tools, streaming and
cancellation are the same. `generate` is for models that prepare their inputs themselves, for static caches that
torch.compile needs (`generation_config.cache_implementation = "static"`), and for models whose cache only it can fill.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from qkvshare_agents.errors import Cancelled, UnsupportedModel
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model.cache_layers import static_over
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.model.probe import off
from qkvshare_agents.model.run import Run
from qkvshare_agents.model.weights import input_device

Decoding = Literal["auto", "loop", "generate"]
# Takes the logits [V] behind the last token; returns the next one, or None when the answer has ended
Choose = Callable[[Tensor], int | None]
# (engine, run, ids of the prompt and the first token, tokens to come at most, choose, cancelled)
Decode = Callable[[Engine, Run, Sequence[int], int, Choose, Callable[[], bool]], None]
_TRIED_TOKENS, _PROMPT_TOKENS = 3, 12


def by_loop(
    engine: Engine, run: Run, ids: Sequence[int], most: int, choose: Choose, cancelled: Callable[[], bool]
) -> None:
    """Feed the last of `ids`, which the run has not read, and whatever is chosen next, until there is nothing.

    Raises Cancelled.
    """
    token: int | None = ids[-1]
    for answered in itertools.count(1):
        if token is None:
            return
        logits = engine.feed(run, [token], cancelled)
        if logits is None:
            raise Cancelled(f"the turn was cancelled after {answered} tokens")
        token = choose(logits)


@torch.inference_mode()
def by_generate(
    engine: Engine, run: Run, ids: Sequence[int], most: int, choose: Choose, cancelled: Callable[[], bool]
) -> None:
    """The same by `generate`, on the run's own cache; on none of ours where only the model can fill one."""
    if run.active_from is not None:  # it would look for the tokens that activate the adapter in the last one alone
        return by_loop(engine, run, ids, most, choose, cancelled)
    static = _static(engine, run, most)
    given = list(ids)
    if run.cache is not None and engine.feeding != "whole":
        # What is in the cache is cut off by `generate`, but for caches without attention
        linear = getattr(run.cache, "is_linear", ())
        given = given[-1:] if linear and all(linear) else given[-run.tokens - 1 :]
    cache = static or (run.cache if engine.feeding != "whole" else None)
    steps = _Steps(run, len(given), choose, cancelled)
    inputs = torch.tensor([given], device=input_device(engine.model))
    with _plain(engine.model):
        engine.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),  # else it takes some tokens for padding
            generation_config=GenerationConfig(do_sample=False, max_new_tokens=most, pad_token_id=0, use_cache=True),
            logits_processor=LogitsProcessorList([steps]),
            stopping_criteria=StoppingCriteriaList([_End(steps)]),
            **({engine.driver.cache_argument: cache} if cache is not None else {}),
        )
    if static and run.kv is not None:
        run.kv.advance(run.tokens)


def chosen(decoding: Decoding, engine: Engine) -> Decode:
    """What this setting comes to for this model. `auto` takes `generate` where our loop would read the whole text anew
    for every token. Raises UnsupportedModel if `generate` was asked for and says something else than our loop."""
    if decoding == "loop" or (decoding == "auto" and engine.feeding != "whole"):
        return by_loop
    reason = _refusal(engine)
    if reason and decoding == "generate":
        raise UnsupportedModel(f"{engine.name} can't be decoded by generate: {reason}")
    return by_loop if reason else by_generate


def _refusal(engine: Engine) -> str | None:
    """Why `generate` can't be used: whether it says what our loop says is found out by doing it."""
    if not callable(getattr(engine.model, "generate", None)):
        return "it has no generate"
    heard: list[list[Tensor]] = []
    for decode in (by_loop, by_generate):
        run = engine.begin(KVCache(engine.shape) if engine.shape and not engine.refusal else None)
        ids, said = engine.driver.probe_ids(_PROMPT_TOKENS), list[Tensor]()
        engine.feed(run, ids[:-1])

        def choose(logits: Tensor, said: list[Tensor] = said) -> int | None:
            said.append(logits.cpu())
            return 5 + len(said) if len(said) < _TRIED_TOKENS else None

        try:
            decode(engine, run, ids, _TRIED_TOKENS, choose, lambda: False)
        except Exception as error:  # whatever a model raises that generate is not made for
            return f"{type(error).__name__}: {error}"
        heard.append(said)
    if len(heard[0]) != len(heard[1]):
        return "it ends elsewhere"
    far = max(off(ours, theirs) for ours, theirs in zip(*heard, strict=True))
    return None if far <= engine.tolerance else f"its logits are {far:.1e} off those of our own loop"


def _static(engine: Engine, run: Run, most: int) -> Any:
    """A static cache over the run's KV, if the model asks for one and all of its layers are plain attention."""
    asked = getattr(engine.model.generation_config, "cache_implementation", None) == "static"
    if not asked or type(run.kv) is not KVCache or engine.has_state or engine.shape is None:
        return None
    if engine.shape.window or engine.shape.indexed:
        return None
    run.kv.reserve(run.tokens + most + 1)
    return static_over(run.kv, engine.config)


class _Steps(LogitsProcessor):
    """Between two tokens of `generate`: keeps the run's account, and lets `choose` say what comes next."""

    def __init__(self, run: Run, given: int, choose: Choose, cancelled: Callable[[], bool]) -> None:
        self._run, self._before, self._choose, self._cancelled = run, run.tokens + 1 - given, choose, cancelled
        self._given, self.ended = given, False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._cancelled():
            raise Cancelled(f"the turn was cancelled after {input_ids.shape[1] - self._given + 1} tokens")
        logits = scores[0].float()
        self._run.tokens = self._before + input_ids.shape[1]
        self._run.expected.append(logits.clone())
        token = self._choose(logits)
        self.ended = token is None
        forced = torch.full_like(scores, -torch.inf)
        forced[0, token or 0] = 0
        return forced


class _End(StoppingCriteria):
    def __init__(self, steps: _Steps) -> None:
        self._steps = steps

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        return torch.full((input_ids.shape[0],), self._steps.ended, device=input_ids.device)


@contextmanager
def _plain(model: Any) -> Iterator[None]:
    """Inside, nothing of the model's own generation settings chooses tokens, or ends the answer."""
    before = model.generation_config
    try:
        model.generation_config = GenerationConfig()
        yield
    finally:
        model.generation_config = before
