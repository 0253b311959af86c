"""Ways to store a KV cache, ours and others, behind one interface, so that one run measures them all alike.

The others are written for fidelity and honest bytes, not for speed: their times are an upper bound.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import QuantizedCache

from qkvshare_agents import codec, page
from qkvshare_agents.eval.packing import ROOM_TOKENS, bring, seal_all
from qkvshare_agents.kv_cache import KVCache
from qkvshare_agents.page import Precision

GROUP_SIZE = 64  # head values per scale in the plain per-token schemes
_FLOAT8 = torch.float8_e4m3fn
Group = Literal["control", "ours", "other"]


@dataclass(frozen=True)
class Stored:
    """A cache as a scheme stores it.

    tensors: all that is kept. packed: those of them that hold codes, scales and minima, of `packed_values` values.
    open_into: fill a working cache with what was stored.
    """

    tensors: list[Tensor]
    packed: list[Tensor]
    packed_values: int
    open_into: Callable[[KVCache], object]


@dataclass(frozen=True)
class Scheme:
    """seal: from a native cache to its stored form. of_other_text: seal another text's cache (a control).

    optional: needs a package that may be missing or may refuse this model; then the row says so.
    """

    name: str
    group: Group
    seal: Callable[[KVCache], Stored]
    of_other_text: bool = False
    optional: bool = False


def all_schemes(config: Any, extra: Mapping[str, Precision] | None = None) -> list[Scheme]:
    """Controls, presets, `extra`, the sweep over widths and the competitors; `config` is the model's."""
    ours: dict[str, Precision] = {**page.PRESETS, **(extra or {})}
    for name, precision in sweep():
        if precision not in ours.values():
            ours[name] = precision
    native = page.PRESETS["native"]
    return [
        paged("native", ours.pop("native"), group="control"),
        Scheme("no_context", "control", _nothing),
        Scheme("wrong_context", "control", paged("", native).seal, of_other_text=True),
        *(paged(name, precision) for name, precision in ours.items()),
        Scheme("float16", "other", partial(_layerwise, _cast)),
        Scheme("int8 per token", "other", partial(_layerwise, partial(_integers, bits=8))),
        Scheme("int4 per token", "other", partial(_layerwise, partial(_integers, bits=4))),
        Scheme("float8 per token", "other", partial(_layerwise, _float8)),
        *(
            Scheme(
                f"{backend} {bits or ''}".strip(),
                "other",
                partial(_quantized_cache, config, backend, bits),
                optional=True,
            )
            for backend, bits in (("quanto", 4), ("quanto", 2), ("hqq", 4), ("fp8", None))
        ),
    ]


def sweep() -> Iterator[tuple[str, Precision]]:
    """Uniform precisions (every layer alike): all widths with keys at least as wide as values.

    `plain` keys are not rotated before grouping.
    """
    for key_bits, value_bits in itertools.combinations_with_replacement(sorted(codec.WIDTHS, reverse=True), 2):
        yield f"k{key_bits}v{value_bits}", Precision(key_bits=key_bits, value_bits=value_bits)
    for bits in codec.WIDTHS:
        yield f"k{bits}v{bits} plain", Precision(key_bits=bits, value_bits=bits, rotate_keys=False)


def paged(name: str, precision: Precision, *, group: Group = "ours") -> Scheme:
    """Our pages, as a host stores them."""
    return Scheme(name, group, partial(_paged, precision))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, a shared one counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _paged(precision: Precision, kv: KVCache) -> Stored:
    ids = tuple(range(kv.tokens))  # the store compares ids and nothing else
    store = seal_all(kv, ids, precision)
    tensors: list[Tensor] = []
    packed: list[Tensor] = []
    values = 0
    for node in store.match(ids).nodes:
        tensors += node.page.native or ()
        for encoded in node.page.packed or ():
            packed += encoded.tensors()
            values += encoded.codes[..., 0].numel() * encoded.dim
    return Stored(tensors + packed, packed, values, lambda target: bring(store, ids, target))


def _nothing(kv: KVCache) -> Stored:
    return Stored([], [], 0, lambda target: target.clear(ROOM_TOKENS))


# An encoder of [H, T, D] returns the tensors it keeps and how to get the values back.
Encode = Callable[[Tensor], tuple[list[Tensor], Callable[[], Tensor]]]


def _layerwise(encode: Encode, kv: KVCache) -> Stored:
    """Keys and values [H, T, D] of each layer by themselves, all tokens alike: one layer stays in the CPU's cache."""
    keys, values = kv.span(0, kv.tokens)
    layers = [(encode(k), encode(v)) for k, v in zip(keys, values, strict=True)]
    tensors = [tensor for pair in layers for kept, _ in pair for tensor in kept]
    tokens = kv.tokens

    def open_into(target: KVCache) -> None:
        target.clear(tokens + ROOM_TOKENS)
        for index, ((_, k), (_, v)) in enumerate(layers):
            target.append(index, k(), v())

    return Stored(tensors, tensors, keys.numel() + values.numel(), open_into)


def _cast(x: Tensor) -> tuple[list[Tensor], Callable[[], Tensor]]:
    half = x.to(torch.float16, copy=True)
    return [half], lambda: half


def _integers(x: Tensor, *, bits: int) -> tuple[list[Tensor], Callable[[], Tensor]]:
    """Groups of GROUP_SIZE values of a token's head (the whole head if that does not divide), scale and minimum."""
    size = GROUP_SIZE if x.shape[-1] % GROUP_SIZE == 0 else x.shape[-1]
    groups = x.float().unflatten(-1, (-1, size))  # [H, T, G, size]
    minimum = groups.amin(-1, keepdim=True).half()
    spread = (groups - minimum.float()).amax(-1, keepdim=True)
    scale = (spread / (2**bits - 1)).clamp_min(2.0**-14).half()
    codes = ((groups - minimum.float()) / scale.float()).round().clamp(0, 2**bits - 1).to(torch.uint8)
    if bits == 4:
        low, high = codes.chunk(2, -1)
        codes = low | high << 4

    def decode() -> Tensor:
        whole = torch.cat([codes & 15, codes >> 4], -1) if bits == 4 else codes
        return (whole * scale.float() + minimum.float()).flatten(-2)

    return [codes, scale, minimum], decode


def _float8(x: Tensor) -> tuple[list[Tensor], Callable[[], Tensor]]:
    """float8_e4m3fn with one fp16 scale for each token's head."""
    largest = x.float().abs().amax(-1, keepdim=True)
    scale = (largest / torch.finfo(_FLOAT8).max * (1 + 2.0**-10)).clamp_min(2.0**-14).half()
    codes = (x.float() / scale.float()).to(_FLOAT8)
    return [codes, scale], lambda: codes.float() * scale.float()


def _quantized_cache(config: Any, backend: str, bits: int | None, kv: KVCache) -> Stored:
    """transformers' QuantizedCache with its defaults: the first `update` quantizes everything it gets."""
    cache = QuantizedCache(backend, config, **({"nbits": bits} if bits else {}))
    keys, values = kv.span(0, kv.tokens)
    layers: list[Any] = cache.layers
    for layer, k, v in zip(layers, keys, values, strict=True):
        layer.update(k[None], v[None])
    tensors = [tensor for layer in layers for tensor in _tensors_in(vars(layer))]
    tokens = kv.tokens

    def open_into(target: KVCache) -> None:
        target.clear(tokens + ROOM_TOKENS)
        for index, layer in enumerate(layers):
            empty = keys[index, None, :, :0], values[index, None, :, :0]
            k, v = layer.update(*empty)  # with nothing new, it returns what it holds
            target.append(index, k[0], v[0])

    return Stored(tensors, tensors, keys.numel() + values.numel(), open_into)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Plain tensors in nested containers and inside tensor subclasses (quanto's)."""
    if isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__"):
            yield from _tensors_in([getattr(value, name) for name in value.__tensor_flatten__()[0]])
        else:
            yield value
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors_in(part)
