"""transformers reads a `PackedCache`: a cache that gives handles instead of tensors, and attention that knows them.

An attention function of ours is registered for each of transformers' own (`qkvshare_sdpa` for `sdpa`), with the same
masks. It hands every call with tensors on to the original. For a handle it lets one new token attend to packed pages;
all else (several tokens, masks, windows, soft caps, sinks of gpt-oss) gets the layer's native keys and values, one
layer at a time, and the original does the rest.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qkvshare_agents.errors import UnsupportedModel
from qkvshare_agents.kv.packed_cache import PackedCache
from qkvshare_agents.kv.page import Precision
from qkvshare_agents.model.cache_layers import LayerKind, kinds_of
from qkvshare_agents.model.driver import PREFILL_CHUNK_TOKENS
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.model.run import Run

_PREFIX = "qkvshare_"
# What may be passed to attention without changing what one token sees
_HARMLESS = {"dropout", "is_causal", "position_ids", "cache_position", "use_cache", "logits_to_keep", "cache"}


class _Handle:
    """Stands for the keys or the values of one layer, between the cache and the attention."""

    def __init__(self, kv: PackedCache, layer: int) -> None:
        self.kv, self.layer = kv, layer


class _PackedLayer(DynamicLayer):
    """One layer of a PackedCache, as transformers' cache asks for it."""

    def __init__(self, kv: PackedCache, index: int) -> None:
        super().__init__()
        self._kv, self._index = kv, index
        self.dtype = kv.shape.dtype
        self.device = next(
            place for group, place in zip(kv.shape.groups, kv.shape.places, strict=True) if index in group.layers
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._kv.append(self._index, key_states[0], value_states[0])
        handle = _Handle(self._kv, self._index)
        return handle, handle

    def get_seq_length(self) -> int:
        return self._kv.length(self._index)


def begin(engine: Engine, kv: PackedCache) -> Run:
    """As `engine.begin`, on what `kv` holds. `engine.feed(run, ids)` appends to `kv`, `kv.seal(precision)` packs.

    The model's attention implementation becomes ours from then on, which changes nothing for caches of tensors.
    Raises UnsupportedModel for models whose attention can't be replaced, or that keep more than keys and values.
    """
    if engine.refusal:
        raise UnsupportedModel(f"{engine.name} can't hand KV over: {engine.refusal}")
    if other := set(kinds_of(DynamicCache(config=engine.config))) - {LayerKind.ATTENTION}:
        raise UnsupportedModel(f"{engine.name} has layers that are more than attention: {[k.value for k in other]}")
    _install(engine)
    cache = Cache(layers=[_PackedLayer(kv, layer) for layer in range(kv.shape.layers)])
    return Run(cache, None, kv.tokens)


def feed(
    engine: Engine,
    run: Run,
    kv: PackedCache,
    ids: Sequence[int],
    precision: Precision,
    cancelled: Callable[[], bool] = lambda: False,
) -> Tensor | None:
    """As `engine.feed`, with full pages sealed after every chunk, so that no more than a chunk of it is native."""
    logits = None
    for start in range(0, len(ids), PREFILL_CHUNK_TOKENS):
        logits = engine.feed(run, ids[start : start + PREFILL_CHUNK_TOKENS], cancelled)
        if logits is None:
            return None
        kv.seal(precision)
    return logits


def _install(engine: Engine) -> None:
    current = engine.config._attn_implementation or "eager"
    if current.startswith(_PREFIX):
        return
    name = _PREFIX + current
    settable = getattr(engine.model, "_can_set_attn_implementation", lambda: True)
    if not settable():
        raise UnsupportedModel(f"{engine.name} has attention of its own, which can't read packed pages")
    AttentionInterface.register(name, _attention_over(current))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[current])
    engine.model.set_attn_implementation(name)


def _attention_over(name: str) -> Callable[..., tuple[Tensor, Any]]:
    def attention(
        module: torch.nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, Any]:
        if isinstance(key, _Handle):
            if _alone(query, attention_mask, options):
                scaling = options.get("scaling")
                scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
                return key.kv.attend(key.layer, query[0, :, 0], scaling)[None, None], None
            key, value = (x[None] for x in key.kv.dequantized(key.layer))
        original = ALL_ATTENTION_FUNCTIONS.get_interface(name, _eager(module))
        result: tuple[Tensor, Any] = original(module, query, key, value, attention_mask, **options)
        return result

    return attention


def _alone(query: Tensor, mask: Any, options: dict[str, Any]) -> bool:
    """One token that sees everything, and nothing but a scaled dot product is asked for."""
    extra = [name for name, value in options.items() if value is not None and name not in _HARMLESS | {"scaling"}]
    return query.shape[0] == 1 and query.shape[2] == 1 and mask is None and not extra and not options.get("dropout")


def _eager(module: torch.nn.Module) -> Any:
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
