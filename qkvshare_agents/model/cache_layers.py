"""Layers of transformers' cache that keep their KV in ours, by kind."""

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from qkvshare_agents.errors import UnsupportedModel
from qkvshare_agents.kv.shape import KVShape, LayerGroup
from qkvshare_agents.kv.state import Snapshot, copied
from qkvshare_agents.kv.working_cache import KVCache


class LayerKind(Enum):
    """What a layer keeps of the tokens it has read.

    ATTENTION: keys and values in pages, of every token or of those that a window shows. INDEXED: the same, and what
    an indexer keeps to pick the tokens that are attended to. RECURRENT: one state. PARALLEL: state beside attention.
    COMPRESSED: a window, and what is older pooled in strides; all of that is state here. EMPTY: nothing, as in layers
    that use another layer's KV or have no attention.
    """

    ATTENTION = "attention"
    INDEXED = "indexed"
    RECURRENT = "recurrent"
    PARALLEL = "parallel"
    COMPRESSED = "compressed"
    EMPTY = "empty"

    @property
    def has_kv(self) -> bool:
        return self in (LayerKind.ATTENTION, LayerKind.INDEXED, LayerKind.PARALLEL)

    @property
    def has_state(self) -> bool:
        return self in (LayerKind.RECURRENT, LayerKind.PARALLEL, LayerKind.COMPRESSED)


_KINDS = {
    "DynamicLayer": LayerKind.ATTENTION,
    "DynamicSlidingWindowLayer": LayerKind.ATTENTION,
    "DynamicIndexedLayer": LayerKind.INDEXED,
    "LinearAttentionLayer": LayerKind.RECURRENT,
    "LinearAttentionAndFullAttentionLayer": LayerKind.PARALLEL,
    "DeepseekV4HCACache": LayerKind.COMPRESSED,
    "DeepseekV4CSACache": LayerKind.COMPRESSED,
    "DummyLayer": LayerKind.EMPTY,
}
# Older transformers have neither; then no model has such layers in its cache.
_Linear: Any = getattr(cache_utils, "LinearAttentionLayer", object)
_Parallel: Any = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", DynamicLayer)
_STATE_FIELDS = sorted(vars(_Linear())) if _Linear is not object else []


class _KVCacheLayer(DynamicLayer):
    """Keys and values of one layer, stored into a KVCache, so that no step copies the history."""

    def __init__(self, kv: KVCache, index: int) -> None:
        super().__init__()
        _attach(self, kv, index)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return _update(self, key_states, value_states)


class _WindowLayer(_KVCacheLayer):
    """The same, showing no more than attention looks back at; the lengths are those of transformers' own layer."""

    is_sliding = True

    def __init__(self, kv: KVCache, index: int, window: int) -> None:
        self.sliding_window = window
        super().__init__(kv, index)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        shown = self.sliding_window - 1 + key_states.shape[-2]
        keys, values = _update(self, key_states, value_states)
        return keys[:, :, -shown:], values[:, :, -shown:]

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        query = (
            query_length if isinstance(query_length, int) else query_length.shape[0]
        )  # transformers < 5.2: positions
        seen = self.get_seq_length()
        hidden = max(0, seen - self.sliding_window + 1)
        return seen - hidden + query, hidden


class _IndexedLayer(_KVCacheLayer):
    """The same beside what an indexer keeps of every token [D], which lies in layer `indexer` of the KVCache, cut in
    two: the first part as keys, the rest as values. None: this layer uses an earlier one's choice."""

    def __init__(self, kv: KVCache, index: int, indexer: int | None) -> None:
        super().__init__(kv, index)
        self._indexer = indexer
        self.is_indexer_initialized = kv.tokens > 0 and indexer is not None
        positions = torch.arange(kv.tokens, device=self.device).expand(3, 1, -1)  # [axes of mrope, B, T]
        self.indexer_position_ids = positions if kv.tokens else None

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """indexer_key_states [B, t, D]; returns those of all tokens [B, T, D]."""
        if self._indexer is None:
            raise UnsupportedModel("an indexer keeps something where it kept nothing before")
        kv: KVCache = vars(self)["_kv"]
        width = kv.layer(self._indexer)[0].shape[-1]
        parts = kv.append(self._indexer, indexer_key_states[..., :width], indexer_key_states[..., width:])
        return torch.cat(parts, -1)


class _ParallelLayer(_Parallel):
    """The same beside a recurrent state, which stays transformers' own."""

    def __init__(self, kv: KVCache, index: int, states: int) -> None:
        super().__init__(number_of_states=states)
        _attach(self, kv, index)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return _update(self, key_states, value_states)


class _StaticLayer(StaticLayer):
    """Keys and values of one layer, in place in all of a KVCache's room: nothing moves, as torch.compile needs it."""

    def __init__(self, kv: KVCache, index: int) -> None:
        keys, values = kv.room(index)
        super().__init__(keys.shape[1])
        filled = kv.length(index)
        for part in (keys, values):
            part[:, filled:].zero_()  # it is masked, but NaN would get through
        self.keys, self.values = keys[None], values[None]
        self.device, self.dtype, self.batch_size, self.num_heads = keys.device, keys.dtype, 1, keys.shape[0]
        self.k_head_dim, self.v_head_dim = keys.shape[2], values.shape[2]
        self.cumulative_length = torch.tensor(filled, device=keys.device)
        for tensor in (self.keys, self.values, self.cumulative_length):
            torch._dynamo.mark_static_address(tensor)
        self.is_initialized = True


def _attach(layer: Any, kv: KVCache, index: int) -> None:
    layer._kv, layer._index = kv, index
    keys, values = kv.layer(index)
    layer.device, layer.dtype = keys.device, keys.dtype
    layer.keys, layer.values = keys[None], values[None]
    layer.is_initialized = True


def _update(layer: Any, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = layer._kv.append(layer._index, key_states[0], value_states[0])
    layer.keys, layer.values = keys[None], values[None]
    return layer.keys, layer.values


def kinds_of(cache: Cache) -> tuple[LayerKind, ...]:
    """Raises UnsupportedModel, with the names, for layers that are none of these kinds."""
    names = [type(layer).__name__ for layer in cache.layers]
    if unknown := sorted(set(names) - _KINDS.keys()):
        raise UnsupportedModel(f"has layers whose KV can't be handed over yet: {', '.join(unknown)}")
    return tuple(_KINDS[name] for name in names)


def cache_over(kv: KVCache, config: Any) -> Cache:
    """transformers' cache on what `kv` holds; its recurrent layers begin as copies of the state in `kv`."""
    layers: list[Any] = []
    states = iter(kv.state.layers if kv.state else ())
    attention, indexed = 0, kv.shape.indexed
    cache = DynamicCache(config=config)
    for template, kind in zip(cache.layers, kinds_of(cache), strict=True):
        layer: Any = template
        if kind is LayerKind.ATTENTION:
            window = getattr(template, "sliding_window", None)
            layer = _WindowLayer(kv, attention, window) if window else _KVCacheLayer(kv, attention)
        elif kind is LayerKind.INDEXED:
            behind = kv.shape.layers - len(indexed)  # of all attention layers
            layer = _IndexedLayer(kv, attention, behind + indexed.index(attention) if attention in indexed else None)
        elif kind is LayerKind.PARALLEL:
            layer = _ParallelLayer(kv, attention, getattr(template, "number_of_states", 1))
        if kind.has_state and (state := next(states, None)):
            vars(layer).update(copied(state))
        attention += kind.has_kv
        layers.append(layer)
    return Cache(layers=layers)


def static_over(kv: KVCache, config: Any) -> Cache:
    """transformers' static cache in what room `kv` has; for plain attention only. `kv.advance` tells `kv` of it."""
    attention = iter(range(kv.shape.layers))
    kinds = kinds_of(DynamicCache(config=config))
    layers = [
        _StaticLayer(kv, next(attention)) if kind is LayerKind.ATTENTION else template
        for template, kind in zip(DynamicCache(config=config).layers, kinds, strict=True)
    ]
    return Cache(layers=layers)


def snapshot_of(cache: Cache, tokens: int) -> Snapshot | None:
    """Copy of the recurrent state behind `tokens` tokens; None for a cache without any."""
    stateful = [layer for layer in cache.layers if _state_fields(layer)]
    if not stateful:
        return None
    return Snapshot(tokens, tuple({n: copied(vars(layer)[n]) for n in _state_fields(layer)} for layer in stateful))


def _state_fields(layer: Any) -> list[str]:
    """What of a layer, ours or transformers' own, is recurrent state."""
    if _KINDS.get(type(layer).__name__) is LayerKind.COMPRESSED:
        return [*vars(layer)]
    return _STATE_FIELDS if isinstance(layer, _Linear) else []


def shape_of(cache: Cache) -> KVShape:
    """The KV's shape in a cache that has read something. Raises UnsupportedModel for what can't be stored."""
    alike: dict[tuple[int, int, int, int | None, torch.device], list[int]] = {}
    dtypes: set[torch.dtype] = set()
    count = 0
    indexers: dict[int, Any] = {}
    layers: list[Any] = cache.layers
    for layer, kind in zip(layers, kinds_of(cache), strict=True):
        if not kind.has_kv:
            continue
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.dim() != 4:
            raise UnsupportedModel("a layer keeps no [B, H, T, D] keys and values; its KV can't be handed over yet")
        heads, value_heads, window = keys.shape[1], values.shape[1], getattr(layer, "sliding_window", None)
        if value_heads != heads:
            raise UnsupportedModel(f"{heads} key heads and {value_heads} value heads can't be handed over yet")
        alike.setdefault((heads, keys.shape[3], values.shape[3], window, keys.device), []).append(count)
        dtypes |= {keys.dtype, values.dtype}
        if kind is LayerKind.INDEXED and layer.indexer_keys is not None:
            indexers[count] = layer
        count += 1
    if not count:
        return _without_attention(cache)
    for place, layer in enumerate(indexers.values(), count):
        width, turned = layer.indexer_keys.shape[-1], layer.values.shape[-1]
        first = turned if turned < width else width // 2  # beside latents, as many know their position as of the values
        if layer.indexer_keys.dim() != 3 or not first:
            raise UnsupportedModel("an indexer keeps no [B, T, D]; its KV can't be handed over yet")
        alike.setdefault((1, first, width - first, None, layer.indexer_keys.device), []).append(place)
        dtypes.add(layer.indexer_keys.dtype)
    if len(dtypes) != 1:
        raise UnsupportedModel(f"layers differ in dtype {dtypes}; they can't be handed over yet")
    groups = tuple(LayerGroup(tuple(layers), *sizes[:3]) for sizes, layers in alike.items())
    devices = tuple(device for *_, device in alike)
    return KVShape(
        groups, dtypes.pop(), devices[0], windows_of(cache, len(indexers)), devices if len(set(devices)) > 1 else (),
        tuple(indexers),
    )  # fmt: skip


def _without_attention(cache: Cache) -> KVShape:
    first: Any = next((layer for layer in cache.layers if _state_fields(layer)), None)
    if first is None or first.device is None:
        raise UnsupportedModel("no layer keeps keys and values or a state")
    return KVShape((), getattr(first, "dtype", None) or first.keys.dtype, first.device)


def windows_of(cache: Cache, indexers: int = 0) -> tuple[int | None, ...]:
    """Of each layer with KV, how many tokens it looks back over (None: all), then of the indexers, which see all; empty
    if that holds for all of them."""
    kinds = kinds_of(cache)
    windows = [getattr(x, "sliding_window", None) for x, kind in zip(cache.layers, kinds, strict=True) if kind.has_kv]
    return (*windows, *[None] * indexers) if any(windows) else ()


def longest_window(cache: Cache) -> int:
    """Tokens that the widest sliding or chunked layer sees; 0 without any."""
    return max((getattr(layer, "sliding_window", None) or 0 for layer in cache.layers), default=0)


def has_state(kinds: Sequence[LayerKind]) -> bool:
    return any(kind.has_state for kind in kinds)
