"""Ways to store a KV cache, ours and others, behind one interface, so that one run measures them all alike.

The others are written for fidelity and honest bytes, not for speed: their times are an upper bound.
"""

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import QuantizedCache

from qkvshare_agents.errors import UnsupportedModel
from qkvshare_agents.eval import plain
from qkvshare_agents.eval.packing import ROOM_TOKENS, bring, seal_all
from qkvshare_agents.kv import codec, page
from qkvshare_agents.kv.page import Precision
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.model.key_calibration import settle

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


def all_schemes(engine: Engine, extra: Mapping[str, Precision] | None = None, *, widths: bool = True) -> list[Scheme]:
    """Controls, presets, `extra`, the sweep over widths if wanted, and the competitors."""
    ours = {name: settle(precision, engine) for name, precision in {**page.PRESETS, **(extra or {})}.items()}
    for name, precision in sweep(settle(Precision(), engine)) if widths else ():
        if precision not in ours.values():
            ours[name] = precision
    native = page.PRESETS["native"]
    return [
        paged("native", ours.pop("native"), group="control"),
        Scheme("no_context", "control", _nothing),
        Scheme("wrong_context", "control", paged("", native).seal, of_other_text=True),
        *(paged(name, precision) for name, precision in ours.items()),
        Scheme("compact, deflated", "ours", partial(_deflated, ours["compact"])),
        Scheme("float16", "other", partial(_layerwise, plain.cast)),
        *(
            Scheme(f"int{bits} per {group}", "other", partial(_layerwise, partial(encode, bits=bits)))
            for bits in (8, 4)
            for group, encode in (("token", plain.per_token), ("tensor", plain.per_tensor))
        ),
        Scheme("nf4 per token", "other", partial(_layerwise, plain.normal_float)),
        Scheme("float8 per token", "other", partial(_layerwise, plain.float8)),
        *(
            Scheme(
                f"{backend} {bits or ''}".strip(),
                "other",
                partial(_quantized_cache, engine.config, backend, bits),
                optional=True,
            )
            for backend, bits in (("quanto", 4), ("quanto", 2), ("hqq", 4), ("fp8", None))
        ),
    ]


def sweep(probed: Precision) -> Iterator[tuple[str, Precision]]:
    """Uniform precisions (every layer alike): all widths with keys at least as wide as values, keys as `probed` has
    them; then equal widths with keys in other ways, and narrow keys in smaller groups."""
    for key_bits, value_bits in itertools.combinations_with_replacement(sorted(codec.WIDTHS, reverse=True), 2):
        yield f"k{key_bits}v{value_bits}", replace(probed, key_bits=key_bits, value_bits=value_bits)
    for bits in codec.WIDTHS:
        yield f"k{bits}v{bits} plain", Precision(bits, bits, rotate_keys=False)
        yield f"k{bits}v{bits} rotated", Precision(bits, bits, rotate_keys=True)
    for key_bits, value_bits in ((4, 4), (2, 2)):
        precision = replace(probed, key_bits=key_bits, value_bits=value_bits, key_group_size=32)
        yield f"k{key_bits}v{value_bits} g32", precision


def paged(name: str, precision: Precision, *, group: Group = "ours") -> Scheme:
    """Our pages, as a host stores them."""
    return Scheme(name, group, partial(_paged, precision))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, a shared one counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _paged(precision: Precision, kv: KVCache) -> Stored:
    ids = tuple(range(kv.tokens))  # the store compares ids and nothing else
    store = seal_all(kv, ids, precision, whole=True)  # as the others store it
    tensors: list[Tensor] = []
    packed: list[Tensor] = []
    values = 0
    for node in store.match(ids).nodes:
        for part in node.page.parts:
            tensors += () if part.native is None else (part.native,)
            if part.packed:
                packed += part.packed.tensors()
                values += part.packed.codes[..., 0].numel() * part.packed.dim
    return Stored(tensors + packed, packed, values, lambda target: bring(store, ids, target))


def _deflated(precision: Precision, kv: KVCache) -> Stored:
    """Pages with all that is packed entropy-coded by zlib (Huffman only: codes do not repeat, but are not uniform)."""
    stored = _paged(precision, kv)
    coded = [zlib.compress(t.contiguous().view(torch.uint8).numpy().tobytes(), 1) for t in stored.packed]
    kept = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in coded]
    packed = {id(t) for t in stored.packed}

    def open_into(target: KVCache) -> None:
        for part, tensor in zip(coded, stored.packed, strict=True):
            raw = bytearray(zlib.decompress(part))
            tensor.copy_(torch.frombuffer(raw, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape))
        stored.open_into(target)

    return Stored([*(t for t in stored.tensors if id(t) not in packed), *kept], kept, stored.packed_values, open_into)


def _nothing(kv: KVCache) -> Stored:
    return Stored([], [], 0, lambda target: target.clear(ROOM_TOKENS))


def _layerwise(encode: plain.Encode, kv: KVCache) -> Stored:
    """Keys and values [H, T, D] of each layer by themselves, all tokens alike: one layer stays in the CPU's cache."""
    layers = [(encode(k), encode(v)) for _, k, v in kv.span(0, kv.tokens).layers()]
    tensors = [tensor for pair in layers for kept, _ in pair for tensor in kept]
    tokens = kv.tokens

    def open_into(target: KVCache) -> None:
        target.clear(tokens + ROOM_TOKENS)
        for index, ((_, k), (_, v)) in enumerate(layers):
            target.append(index, k(), v())

    return Stored(tensors, tensors, tokens * kv.shape.values_per_token, open_into)


def _quantized_cache(config: Any, backend: str, bits: int | None, kv: KVCache) -> Stored:
    """transformers' QuantizedCache with its defaults: the first `update` quantizes everything it gets."""
    if kv.shape.windows or kv.state:
        raise UnsupportedModel("transformers quantizes layers of full attention only")
    cache = QuantizedCache(backend, config, **({"nbits": bits} if bits else {}))
    native = [(k[None], v[None]) for _, k, v in kv.span(0, kv.tokens).layers()]
    layers: list[Any] = cache.layers
    for layer, pair in zip(layers, native, strict=True):
        layer.update(*pair)
    tensors = [tensor for layer in layers for tensor in _tensors_in(vars(layer))]
    tokens = kv.tokens

    def open_into(target: KVCache) -> None:
        target.clear(tokens + ROOM_TOKENS)
        for index, layer in enumerate(layers):
            empty = (x[..., :0, :] for x in native[index])
            k, v = layer.update(*empty)  # with nothing new, it returns what it holds
            target.append(index, k[0], v[0])

    return Stored(tensors, tensors, tokens * kv.shape.values_per_token, open_into)


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
