"""A loaded model and what was found out about it: feeds tokens, captures and injects KV."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qkvshare_agents.kv.shape import KVShape
from qkvshare_agents.kv.state import Snapshot
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model import loading, probe, probed
from qkvshare_agents.model.adapters import Identity
from qkvshare_agents.model.cache_layers import snapshot_of
from qkvshare_agents.model.config import eos_ids, narrowed
from qkvshare_agents.model.driver import Driver, Feeding
from qkvshare_agents.model.fingerprint import Fingerprint
from qkvshare_agents.model.probe import Verdict
from qkvshare_agents.model.run import Run
from qkvshare_agents.prompt.chat_template import Template


class Watcher(Protocol):
    """Looks on while prompts are read. refusal: why it can't, or None."""

    refusal: str | None

    def watching(self, tokens: int, left: int = 0) -> AbstractContextManager[None]:
        """Around a forward that reads `tokens` tokens; `left` of the prompt come after it."""

    def take(self) -> list[Any] | None:
        """What was seen since the last call; None if nothing."""


class Engine:
    """One loaded model, its tokenizer and template, and the verdict of its probe.

    observer: looks on while the last part of a prompt is read; None by default.
    """

    def __init__(self, driver: Driver, verdict: Verdict, identity: Identity, template: Template) -> None:
        """`Engine.load` and `Engine.of` make these parts of a model."""
        self.driver, self.verdict, self._identity, self.template = driver, verdict, identity, template
        self.model, self.config, self.name = driver.model, driver.config, driver.name
        self.tokenizer = template.tokenizer
        self.stop_ids = template.stop_ids(eos_ids(self.model, self.tokenizer))
        self.observer: Watcher | None = None

    @classmethod
    def load(cls, model: str, *, thinking: bool = False, **placing: Any) -> "Engine":
        """As `checkpoint.load`, whose options these are. What a probe found at an earlier load is taken from there."""
        loaded, tokenizer = loading.load(model, **placing)
        return cls.of(loaded, tokenizer, name=model, thinking=thinking, remember=True)

    @classmethod
    def of(
        cls, model: PreTrainedModel, tokenizer: Any, *, name: str = "", thinking: bool = False, remember: bool = False
    ) -> "Engine":
        """On a loaded model, which is probed. remember: take what an earlier probe of this very model found, and keep
        what this one finds. Raises UnsupportedModel for quantized weights that can't be used here."""
        driver, identity = Driver(model, name=name), Identity(model, tokenizer)
        if driver.noisy:
            probe.warm_up(driver)
        verdict = probed.recall(identity.fingerprint, model) if remember else None
        if verdict is None:
            verdict = probe.find(driver)
            if remember:
                probed.keep(identity.fingerprint, model, verdict)
        return cls(driver, verdict, identity, Template(tokenizer, thinking=thinking))

    @property
    def refusal(self) -> str | None:
        """Why KV can't be handed over (then every turn is text replay), or None."""
        return self.verdict.refusal

    @property
    def shape(self) -> KVShape | None:
        """Of the model's KV; None where it can't be stored."""
        return self.verdict.shape

    @property
    def has_state(self) -> bool:
        """Some layers fold all tokens into a state that can't be cut."""
        return self.verdict.has_state

    @property
    def feeding(self) -> Feeding:
        """How prompts may be fed."""
        return self.verdict.feeding

    @property
    def tolerance(self) -> float:
        """How far logits of one text may be off each other, relatively, when it is fed in other calls."""
        return self.verdict.tolerance

    @property
    def noisy(self) -> bool:
        """Logits vary by more than rounding to the model's dtype, since its weights are quantized."""
        return self.driver.noisy

    @property
    def context_tokens(self) -> int:
        """The model's."""
        return self.driver.context_tokens

    @property
    def kv_limit_tokens(self) -> int | None:
        """Beyond this length the model's rotary frequencies change, and with them all keys."""
        return self.driver.kv_limit_tokens

    @property
    def fingerprint(self) -> Fingerprint:
        """Of the weights as they are now: taken again when a parameter was changed, or other adapters are in effect."""
        return self._identity.fingerprint

    @property
    def devices(self) -> frozenset[torch.device]:
        """Where KV lies: with the layers that it belongs to."""
        return frozenset(self.shape.places) if self.shape else frozenset()

    def begin(self, kv: KVCache | None) -> Run:
        """Start a turn on what `kv` holds, or (None) on an empty cache of transformers' own."""
        return self.driver.begin(kv)

    def snapshot(self, run: Run) -> Snapshot | None:
        """Copy of the recurrent state after what was fed; None for models without any."""
        return snapshot_of(run.cache, run.tokens) if run.cache and self.has_state else None

    def feed(self, run: Run, ids: Sequence[int], cancelled: Callable[[], bool] = lambda: False) -> Tensor | None:
        """Append `ids` (at least one) to the run; returns the logits [V] in float32 after the last.

        None if cancelled in between. Raises ContextOverflow before anything is fed.
        """
        observer = self.observer if run.kv else None
        watching = observer.watching if observer else lambda _count, _left: nullcontext()
        return self.driver.feed(run, ids, self.feeding, cancelled=cancelled, watching=watching)

    @torch.inference_mode()
    def logits(self, kv: KVCache, ids: Sequence[int], count: int, gap: int = 0) -> Tensor:
        """Logits [count, V] in float32 after each of the last `count` of `ids`, read after `kv` and then forgotten.

        One forward for all of `ids`: for measurements, where the ids are known beforehand. gap: positions between.
        """
        before, run = kv.tokens, self.begin(kv)
        run.tokens += gap
        try:
            if self.feeding == "chunks" or not before:
                return self.driver.read(run, ids, count)
            return torch.cat([self.driver.read(run, [i], 1) for i in ids])[-count:]
        finally:
            kv.crop(before)

    @contextmanager
    def narrowed(self) -> Iterator[None]:
        """Inside, the model looks back over short windows, for probes whose text is beyond any of them."""
        before = self.verdict
        with narrowed(self.model, probe.WINDOW_TOKENS):
            if self.shape:
                self.verdict = replace(before, shape=self.driver.with_windows(self.shape))
            try:
                yield
            finally:
                self.verdict = before
