"""Calls a loaded model: ids go in, logits come out, KV lies in the cache that the caller chose.

`[B, H, T, D]` exists only here and in `layers` (B = 1); everything else sees `[H, T, D]` per layer or `[L, H, T, D]`.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from qkvshare_agents.errors import ContextOverflow, QKVShareError
from qkvshare_agents.kv.shape import KVShape
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model.adapters import invocation
from qkvshare_agents.model.cache_layers import cache_over, windows_of
from qkvshare_agents.model.config import rope_switch_tokens
from qkvshare_agents.model.run import Run
from qkvshare_agents.model.weights import input_device, is_quantized

PREFILL_CHUNK_TOKENS = 512  # cancellation is looked at in between, and attention masks stay small

# How a prompt may be fed to a cache: in chunks; at once and then token by token (mamba scans start anew with every
# longer call); or only as a whole, with no cache at all.
Feeding = Literal["chunks", "steps", "whole"]
# Around a forward that reads so many tokens, with so many of the prompt left to read after it
Watching = Callable[[int, int], AbstractContextManager[None]]


def _unwatched(_count: int, _left: int) -> AbstractContextManager[None]:
    return nullcontext()


class Driver:
    """One loaded model. It decides nothing: whoever calls says how the model may be fed.

    kv_limit_tokens: beyond this length the model's rotary frequencies change, and with them all keys.
    cache_argument: what the model's forward calls its cache. takes_positions: it can be told positions.
    noisy: logits vary by more than rounding to the model's dtype, since its weights are quantized.
    """

    def __init__(self, model: PreTrainedModel, *, name: str = "") -> None:
        self.model = model.eval()
        self.name = name or getattr(model.config, "_name_or_path", "") or model.config.model_type
        self.config = model.config.get_text_config()
        inner: Any = getattr(model, "get_base_model", lambda: model)()  # inside of what `peft` wraps around it
        accepted = inspect.signature(inner.forward).parameters
        self.cache_argument = "cache" if "cache" in accepted else "past_key_values"  # renamed in transformers 5.2x
        self._keeps_logits = "logits_to_keep" in accepted
        self.takes_positions = "position_ids" in accepted
        self.context_tokens: int = getattr(self.config, "max_position_embeddings", None) or 2**31
        self.kv_limit_tokens = rope_switch_tokens(self.config)
        self.noisy = is_quantized(model)  # many compute in 16 bits, whatever their dtype

    def begin(self, kv: KVCache | None) -> Run:
        """A run on what `kv` holds, or (None) on an empty cache of transformers' own."""
        if kv is None:
            return Run(DynamicCache(config=self.config), None, 0)
        return Run(cache_over(kv, self.config), kv, kv.tokens)

    @torch.inference_mode()
    def feed(
        self,
        run: Run,
        ids: Sequence[int],
        feeding: Feeding,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        watching: Watching = _unwatched,
    ) -> Tensor | None:
        """Append `ids` (at least one) to the run; returns the logits [V] in float32 after the last.

        None if cancelled in between. Raises ContextOverflow before anything is fed.
        """
        if run.tokens + len(ids) > self.context_tokens:
            raise ContextOverflow(f"context length exceeded: {run.tokens + len(ids)} > {self.context_tokens} tokens")
        if not ids:
            raise QKVShareError("nothing to feed: at least one token must be run")
        logits, size = None, self._chunk_tokens(run, len(ids), feeding)
        for start in range(0, len(ids), size):
            if cancelled():
                return None
            chunk = ids[start : start + size]
            with watching(len(chunk), len(ids) - start - len(chunk)):
                logits = self.forward(run, chunk, feeding)
        return logits

    def _chunk_tokens(self, run: Run, count: int, feeding: Feeding) -> int:
        if self.kv_limit_tokens and run.tokens + count > self.kv_limit_tokens:
            return count  # one forward gives all keys the same rotary frequencies
        if feeding == "chunks":
            return PREFILL_CHUNK_TOKENS
        return 1 if feeding == "steps" and run.tokens else count

    def forward(self, run: Run, ids: Sequence[int], feeding: Feeding) -> Tensor:
        """As `feed`, in one call, and without its checks."""
        if run.kv is None:
            run.ids += ids
        if run.kv is None and feeding == "whole":
            run.cache, run.tokens, ids = None, 0, run.ids
        logits = self.read(run, ids, 1)[0]
        if len(ids) > 1:
            run.expected.clear()  # after tokens in between nothing was computed
        run.expected.append(logits)
        return logits

    def read(self, run: Run, ids: Sequence[int], count: int) -> Tensor:
        """One call of the model: logits [count, V] in float32 after the last `count` of `ids`; run.expected stays."""
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

    def with_windows(self, shape: KVShape) -> KVShape:
        """The same with windows as wide as the model's are now."""
        return replace(shape, windows=windows_of(DynamicCache(config=self.config), len(shape.indexed)))

    def probe_ids(self, count: int) -> list[int]:
        """Ids of no meaning."""
        return [(7 * i + 3) % min(1000, self.config.vocab_size) for i in range(count)]
