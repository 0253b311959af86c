"""The only file that knows transformers' cache.

`[B, H, T, D]` exists only here (B = 1); everything else sees `[H, T, D]` per layer or `[L, H, T, D]`.
"""

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from qkvshare_agents import models, probed
from qkvshare_agents.configuration import eos_ids, narrowed, picked_tokens, rope_switch_tokens
from qkvshare_agents.drift import WATCHED
from qkvshare_agents.errors import ContextOverflow, InvalidSetting, ModelNotFound, QKVShareError, UnsupportedModel
from qkvshare_agents.fingerprint import Fingerprint
from qkvshare_agents.identity import Identity, invocation
from qkvshare_agents.kv_cache import KVCache, KVShape
from qkvshare_agents.layers import cache_over, has_state, kinds_of, longest_window, shape_of, snapshot_of, windows_of
from qkvshare_agents.observation import Observer
from qkvshare_agents.probed import Replay
from qkvshare_agents.snapshot import Snapshot
from qkvshare_agents.template import Template

PREFILL_CHUNK_TOKENS = 512  # cancellation is looked at in between, and attention masks stay small
_PROBE_TOKENS = 12
_PROBED_WINDOW_TOKENS = 64  # wider ones are probed as if they were this wide, in seconds on a CPU


@dataclass
class Run:
    """A running turn: transformers' cache, and our KVCache behind it unless the model can't hand KV over. active_from:
    the token from which on an adapter is active that tokens of the prompt activate; None if none is."""

    cache: Cache | None
    kv: KVCache | None
    tokens: int
    ids: list[int] = field(default_factory=list)  # what was fed to an empty cache, for models that need it again
    active_from: int | None = None
    expected: deque[Tensor] = field(default_factory=lambda: deque(maxlen=WATCHED))  # logits behind the last tokens


class Engine:
    """One loaded model: feeds tokens, captures and injects KV, knows whether that is exact.

    refusal: why KV can't be handed over (then every turn is text replay), or None.
    kv_limit_tokens: beyond this length the model's rotary frequencies change, and with them all keys.
    has_state: some layers fold all tokens into a state that can't be cut.
    cache_argument: what the model's forward calls its cache. takes_positions: it can be told positions.
    observer: looks on while the last part of a prompt is read; None by default.
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
        self._replay: Replay = "chunks"
        self._identity = Identity(model, tokenizer)
        self.refusal = None if remember and self._recall() else self._probe()
        if self.refusal:
            self._replay = self._probe_replay()
        elif remember and self.shape:
            probed.keep(self.fingerprint, self.model, (self.shape, self.has_state, self._replay))

    @classmethod
    def load(
        cls,
        model: str,
        *,
        dtype: str = "auto",
        device: str | None = None,
        attn_implementation: str | None = None,
        thinking: bool = False,
    ) -> "Engine":
        """Load a local directory, a pulled model's name or a Hub id.

        Raises ModelNotFound if there is no such model or it can't be read, InvalidSetting for an unknown dtype.
        """
        source = models.resolve(model)
        options = {"attn_implementation": attn_implementation} if attn_implementation else {}
        if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise InvalidSetting(f"no dtype {dtype!r}; use auto, float32, bfloat16 or float16")
        try:
            tokenizer = AutoTokenizer.from_pretrained(source)
            loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)
        except OSError as error:  # not on the Hub, Hub out of reach, or files missing
            raise ModelNotFound(f"model {model!r} can't be loaded: {str(error).strip().splitlines()[0]}") from error
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        return cls(loaded.to(device), tokenizer, name=model, thinking=thinking, remember=True)

    @property
    def fingerprint(self) -> Fingerprint:
        """Of the weights as they are now: taken again when a parameter was changed, or other adapters are in effect."""
        return self._identity.fingerprint

    @property
    def reads_in_steps(self) -> bool:
        """Behind what was read before, only token by token is exact (a fault of some state space models)."""
        return self._replay == "steps"

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
                logits = self._forward(run, chunk)
        return logits

    def _chunk_tokens(self, run: Run, count: int) -> int:
        if self.kv_limit_tokens and run.tokens + count > self.kv_limit_tokens:
            return count  # one forward gives all keys the same rotary frequencies
        if self._replay == "chunks":
            return PREFILL_CHUNK_TOKENS
        return 1 if self._replay == "steps" and run.tokens else count

    @torch.inference_mode()
    def logits(self, kv: KVCache, ids: Sequence[int], count: int, gap: int = 0) -> Tensor:
        """Logits [count, V] in float32 behind each of the last `count` of `ids`, read behind `kv` and then forgotten.

        One forward for all of `ids`: for measurements, where the ids are known beforehand. gap: positions between.
        """
        before, run = kv.tokens, self.begin(kv)
        run.tokens += gap
        try:
            if self._replay == "chunks" or not before:
                return self._read(run, ids, count)
            return torch.cat([self._read(run, [i], 1) for i in ids])[-count:]
        finally:
            kv.crop(before)

    @torch.inference_mode()
    def read_alone(self, position: int) -> KVCache:
        """KV of a token that is read at `position` behind nothing; behind others if the model counts by itself."""
        assert self.shape is not None
        token = self._probe_ids(2)[1]
        run = self.begin(KVCache(self.shape))
        assert run.kv is not None
        if self.takes_positions:
            run.tokens = position
        elif position:
            self._read(run, [token] * position, 1)
        self._read(run, [token], 1)
        return run.kv

    def _forward(self, run: Run, ids: Sequence[int]) -> Tensor:
        if run.kv is None:
            run.ids += ids
        if run.kv is None and self._replay == "whole":
            run.cache, run.tokens, ids = None, 0, run.ids
        logits = self._read(run, ids, 1)[0]
        if len(ids) > 1:
            run.expected.clear()  # behind tokens in between nothing was computed
        run.expected.append(logits)
        return logits

    def _read(self, run: Run, ids: Sequence[int], count: int) -> Tensor:
        device = self.model.device
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
            self.shape, self.has_state, self._replay = known
        return known is not None

    @torch.inference_mode()
    def _probe(self) -> str | None:
        """Find the KV's shape and see whether continuing from injected KV is exact. Returns the refusal."""
        with self.narrowed():
            refusal = self._probe_narrowed()
        self.shape = self.shape and self._with_windows(self.shape)
        return refusal

    def _with_windows(self, shape: KVShape) -> KVShape:
        """As wide as they are now."""
        return replace(shape, windows=windows_of(DynamicCache(config=self.config), len(shape.indexed)))

    @contextmanager
    def narrowed(self) -> Iterator[None]:
        """Inside, the model looks back over short windows, for probes whose text is beyond any of them."""
        shape = self.shape
        with narrowed(self.model, _PROBED_WINDOW_TOKENS):
            self.shape = shape and self._with_windows(shape)
            try:
                yield
            finally:
                self.shape = shape or self.shape

    def _probe_narrowed(self) -> str | None:
        cache = DynamicCache(config=self.config)
        name, window = self.config.model_type, longest_window(cache)
        if window > _PROBED_WINDOW_TOKENS:
            return f"{name} has a window of {window} tokens, which can't be probed"
        ids = self._probe_ids(max(window, picked_tokens(self.config)) + _PROBE_TOKENS)  # only beyond these it shows
        try:
            self.has_state = has_state(kinds_of(cache))
            expected = self._forward(Run(cache, None, 0), ids)
            self.shape = shape_of(cache)
            ways: list[Replay] = ["chunks", "steps"] if self.has_state else ["chunks"]
            for self._replay in ways:
                if self._agree(self._continued(ids, len(ids) - _PROBE_TOKENS // 2), expected):
                    return None
        except UnsupportedModel as error:
            return f"{name} {error}"
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
            return f"{name} can't continue from injected KV: {error}"
        return f"{name} continues differently from injected KV than in one forward"

    def _continued(self, ids: list[int], split: int) -> Tensor:
        """Logits behind `ids` when those from `split` on are read in another run, behind copies of what came before."""
        assert self.shape is not None
        kv = KVCache(self.shape)
        first = self.begin(kv)
        self._forward(first, ids[:split])
        kv.state = self.snapshot(first)
        # Another conversation in between, as on a host: some models keep their state in their modules
        self._forward(self.begin(KVCache(self.shape)), ids[split:])
        second = self.begin(kv)
        logits = self.feed(second, ids[split:])
        assert logits is not None
        return logits

    @torch.inference_mode()
    def _probe_replay(self) -> Replay:
        """Find out how this model's own cache may be filled."""
        ids = self._probe_ids(_PROBE_TOKENS)
        expected = self._read(Run(None, None, 0), ids, 1)[0]
        splits: list[tuple[Replay, int]] = [("chunks", _PROBE_TOKENS // 2), ("steps", _PROBE_TOKENS - 1)]
        for way, at in splits:
            try:
                run = self.begin(None)
                self._forward(run, ids[:at])
                if self._agree(self._forward(run, ids[at:]), expected):
                    return way
            except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
                continue
        return "whole"

    def _probe_ids(self, count: int) -> list[int]:
        return [(7 * i + 3) % min(1000, self.config.vocab_size) for i in range(count)]

    def _agree(self, a: Tensor, b: Tensor) -> bool:
        tolerance = 1e-4 if self.model.dtype == torch.float32 else 3e-2
        return float((a - b).norm() / b.norm()) <= tolerance  # False for NaN
