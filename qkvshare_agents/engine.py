"""The only file that knows transformers' cache.

`[B, H, T, D]` exists only here (B = 1); everything else sees `[H, T, D]` per layer or `[L, H, T, D]`.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from qkvshare_agents import checkpoint, probe, probed
from qkvshare_agents.configuration import eos_ids, narrowed, rope_switch_tokens
from qkvshare_agents.errors import ContextOverflow, QKVShareError
from qkvshare_agents.fingerprint import Fingerprint
from qkvshare_agents.identity import Identity, invocation
from qkvshare_agents.kv_cache import KVCache, KVShape
from qkvshare_agents.layers import cache_over, snapshot_of, windows_of
from qkvshare_agents.observation import Observer
from qkvshare_agents.probed import Replay
from qkvshare_agents.run import Run
from qkvshare_agents.snapshot import Snapshot
from qkvshare_agents.template import Template
from qkvshare_agents.weights import input_device, is_quantized

PREFILL_CHUNK_TOKENS = 512  # cancellation is looked at in between, and attention masks stay small


class Engine:
    """One loaded model: feeds tokens, captures and injects KV, knows whether that is exact.

    refusal: why KV can't be handed over (then every turn is text replay), or None.
    kv_limit_tokens: beyond this length the model's rotary frequencies change, and with them all keys.
    has_state: some layers fold all tokens into a state that can't be cut.
    cache_argument: what the model's forward calls its cache. takes_positions: it can be told positions.
    observer: looks on while the last part of a prompt is read; None by default.
    tolerance: how far logits of one text may be off each other, relatively, when it is read in other calls. noisy: more
    than rounding to the model's dtype, since its weights are quantized.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, *, name: str = "", thinking: bool = False, remember: bool = False
    ) -> None:
        """remember: take what an earlier probe of this very model found, and keep what this one finds."""
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.name = name or getattr(model.config, "_name_or_path", "") or model.config.model_type
        self.config = model.config.get_text_config()
        self.template = Template(tokenizer, thinking=thinking)
        inner: Any = getattr(model, "get_base_model", lambda: model)()  # inside of what `peft` wraps around it
        accepted = inspect.signature(inner.forward).parameters
        self.cache_argument = "cache" if "cache" in accepted else "past_key_values"  # renamed in transformers 5.2x
        self._keeps_logits = "logits_to_keep" in accepted
        self.takes_positions = "position_ids" in accepted
        self.context_tokens: int = getattr(self.config, "max_position_embeddings", None) or 2**31
        self.kv_limit_tokens = rope_switch_tokens(self.config)
        self.stop_ids = self.template.stop_ids(eos_ids(model, tokenizer))
        self.observer: Observer | None = None
        self.shape: KVShape | None = None
        self.has_state = False
        self.replay: Replay = "chunks"
        self.noisy = is_quantized(model)  # many compute in 16 bits, whatever their dtype
        self.tolerance = probe.tolerance_of(model.dtype)
        self._identity = Identity(model, tokenizer)
        if self.noisy:
            probe.settle(self)
        self.refusal = None if remember and self._recall() else probe.find(self)
        if not self.refusal and remember and self.shape:
            probed.keep(self.fingerprint, self.model, (self.shape, self.has_state, self.replay, self.tolerance))

    @classmethod
    def load(cls, model: str, *, thinking: bool = False, **placing: Any) -> "Engine":
        """As `checkpoint.load`, whose options these are."""
        loaded, tokenizer = checkpoint.load(model, **placing)
        return cls(loaded, tokenizer, name=model, thinking=thinking, remember=True)

    @property
    def fingerprint(self) -> Fingerprint:
        """Of the weights as they are now: taken again when a parameter was changed, or other adapters are in effect."""
        return self._identity.fingerprint

    @property
    def devices(self) -> frozenset[torch.device]:
        """Where KV lies: with the layers that it belongs to."""
        return frozenset(self.shape.places) if self.shape else frozenset()

    @property
    def reads_in_steps(self) -> bool:
        """Behind what was read before, only token by token is exact (a fault of some state space models)."""
        return self.replay == "steps"

    def begin(self, kv: KVCache | None) -> Run:
        """Start a turn on what `kv` holds, or (None) on an empty cache of transformers' own."""
        if kv is None:
            return Run(DynamicCache(config=self.config), None, 0)
        return Run(cache_over(kv, self.config), kv, kv.tokens)

    def snapshot(self, run: Run) -> Snapshot | None:
        """Copy of the recurrent state behind what was fed; None for models without any."""
        return snapshot_of(run.cache, run.tokens) if run.cache and self.has_state else None

    @torch.inference_mode()
    def feed(self, run: Run, ids: Sequence[int], cancelled: Callable[[], bool] = lambda: False) -> Tensor | None:
        """Append `ids` (at least one) to the run; returns the logits [V] in float32 behind the last.

        None if cancelled in between. Raises ContextOverflow before anything is fed.
        """
        if run.tokens + len(ids) > self.context_tokens:
            raise ContextOverflow(f"context length exceeded: {run.tokens + len(ids)} > {self.context_tokens} tokens")
        if not ids:
            raise QKVShareError("nothing to feed: at least one token must be run")
        logits, size = None, self._chunk_tokens(run, len(ids))
        for start in range(0, len(ids), size):
            if cancelled():
                return None
            chunk = ids[start : start + size]
            left = len(ids) - start - len(chunk)
            with self.observer.watching(len(chunk), left) if self.observer and run.kv else nullcontext():
                logits = self.forward(run, chunk)
        return logits

    def _chunk_tokens(self, run: Run, count: int) -> int:
        if self.kv_limit_tokens and run.tokens + count > self.kv_limit_tokens:
            return count  # one forward gives all keys the same rotary frequencies
        if self.replay == "chunks":
            return PREFILL_CHUNK_TOKENS
        return 1 if self.replay == "steps" and run.tokens else count

    @torch.inference_mode()
    def logits(self, kv: KVCache, ids: Sequence[int], count: int, gap: int = 0) -> Tensor:
        """Logits [count, V] in float32 behind each of the last `count` of `ids`, read behind `kv` and then forgotten.

        One forward for all of `ids`: for measurements, where the ids are known beforehand. gap: positions between.
        """
        before, run = kv.tokens, self.begin(kv)
        run.tokens += gap
        try:
            if self.replay == "chunks" or not before:
                return self.read(run, ids, count)
            return torch.cat([self.read(run, [i], 1) for i in ids])[-count:]
        finally:
            kv.crop(before)

    def forward(self, run: Run, ids: Sequence[int]) -> Tensor:
        """As `feed`, in one call, and without its checks."""
        if run.kv is None:
            run.ids += ids
        if run.kv is None and self.replay == "whole":
            run.cache, run.tokens, ids = None, 0, run.ids
        logits = self.read(run, ids, 1)[0]
        if len(ids) > 1:
            run.expected.clear()  # behind tokens in between nothing was computed
        run.expected.append(logits)
        return logits

    def read(self, run: Run, ids: Sequence[int], count: int) -> Tensor:
        """One call of the model: logits [count, V] in float32 behind the last `count` of `ids`; run.expected stays."""
        device = input_device(self.model)
        arguments: dict[str, Any] = {"use_cache": run.cache is not None}
        if run.cache is not None:
            arguments[self.cache_argument] = run.cache
        if self.takes_positions:  # always explicit: some models forget the cache's length without them
            arguments["position_ids"] = torch.arange(run.tokens, run.tokens + len(ids), device=device)[None]
        if invocation(self.model):  # else `peft` looks for the tokens in these ids alone
            active = 0 if run.active_from is None else max(0, run.tokens + len(ids) - run.active_from)
            arguments["alora_offsets"] = [active]
        if self._keeps_logits:
            arguments["logits_to_keep"] = count
        output = self.model(input_ids=torch.tensor([list(ids)], device=device), **arguments)
        run.tokens += len(ids)
        return output.logits[0, -count:].float()

    def _recall(self) -> bool:
        known = probed.recall(self.fingerprint, self.model)
        if known:
            self.shape, self.has_state, self.replay, self.tolerance = known
        return known is not None

    @contextmanager
    def narrowed(self) -> Iterator[None]:
        """Inside, the model looks back over short windows, for probes whose text is beyond any of them."""
        shape = self.shape
        with narrowed(self.model, probe.WINDOW_TOKENS):
            self.shape = shape and self.with_windows(shape)
            try:
                yield
            finally:
                self.shape = shape or self.shape

    def with_windows(self, shape: KVShape) -> KVShape:
        """The same with windows as wide as they are now."""
        return replace(shape, windows=windows_of(DynamicCache(config=self.config), len(shape.indexed)))

    def probe_ids(self, count: int) -> list[int]:
        """Ids of no meaning."""
        return [(7 * i + 3) % min(1000, self.config.vocab_size) for i in range(count)]
