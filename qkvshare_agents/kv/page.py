"""Consecutive tokens of all layers, encoded once.

A page holds its keys and its values in *parts*: the layers of one shape and one width, stacked (`[L, H, T, D]`). It
is immutable: whoever forwards it forwards the same bytes, so that quantization error does not grow with the number
of hops. The first tokens of a sequence (*sinks*: most attention goes there, and their outlying range would spoil a
group's scale; StreamingLLM, arXiv 2309.17453) stay in native precision.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from qkvshare_agents.errors import CodecError, InvalidSetting
from qkvshare_agents.kv import codec
from qkvshare_agents.kv.balance import Balance
from qkvshare_agents.kv.codec import Encoded
from qkvshare_agents.kv.part import Part, Stored, fill
from qkvshare_agents.kv.span import Span

# How far below 8 bits scales go from the range of a group towards the least squares fit. Keys only half of the way:
# the outlying ones that a whole fit clamps are those which attention looks for.
_KEY_FIT, _VALUE_FIT = 0.5, 1.0


@dataclass(frozen=True)
class Precision:
    """How sealed pages are stored.

    key_bits, value_bits: width of the codes; both None keeps pages native (exact). widths: (key bits, value bits) of
    every layer that has KV, in order, where layers differ; None in it keeps that layer's keys or values native.
    page_size: tokens in a sealed page. num_sink_tokens: first tokens of a sequence that stay native.
    residual_length: newest tokens that stay native (the unfilled page always does). rotate_keys: spread outlying
    channels over the head dimension before quantizing; that helps some models and harms others, and None leaves it
    to a probe of the model (`rotation`). rotate_values: the same for values; None does so below 8 bits.
    key_group_size: tokens that share a key channel's scale and minimum (None: the page). value_group_size:
    neighbouring values of a token's head that share a scale (None: the head). wide_from: layers from this one on, what
    indexers keep, get at least 8 bits: which tokens are attended to hangs on small differences there. balance: factors
    of key channels, for keys that are rotated (None leaves it to the same probe if `rotate_keys` is None).
    """

    key_bits: int | None = 8
    value_bits: int | None = 8
    page_size: int = 64
    num_sink_tokens: int = 4
    residual_length: int = 0
    rotate_keys: bool | None = None
    rotate_values: bool | None = None
    key_group_size: int | None = None
    value_group_size: int | None = 64
    widths: tuple[tuple[int | None, int | None], ...] | None = None
    wide_from: int | None = None
    balance: Balance | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        widths = (*codec.WIDTHS, None)
        if self.key_bits not in widths or self.value_bits not in widths:
            raise InvalidSetting(f"key_bits={self.key_bits}, value_bits={self.value_bits}: choose from {widths}")
        for layer, pair in enumerate(self.widths or ()):
            if len(pair) != 2 or any(bits not in widths for bits in pair):
                raise InvalidSetting(f"widths of layer {layer} are {pair}: choose (key bits, value bits) from {widths}")
        if (self.key_bits is None) != (self.value_bits is None):
            raise InvalidSetting("key_bits and value_bits must both be set or both be None")
        if not 0 <= self.num_sink_tokens < self.page_size or self.residual_length < 0:
            raise InvalidSetting(
                f"need 0 <= num_sink_tokens ({self.num_sink_tokens}) < page_size ({self.page_size}) "
                f"and residual_length ({self.residual_length}) >= 0"
            )
        if self.key_group_size and self.page_size % self.key_group_size:
            raise InvalidSetting(f"page_size {self.page_size} is no multiple of key_group_size {self.key_group_size}")

    @property
    def is_native(self) -> bool:
        return all(bits is None for pair in self.widths or ((self.key_bits, self.value_bits),) for bits in pair)

    def bits(self, layer: int) -> tuple[int | None, int | None]:
        """Width of keys and of values of a layer. Raises InvalidSetting for one that `widths` does not name."""
        if self.wide_from is not None and layer >= self.wide_from and not self.is_native:
            return 8, 8
        if self.widths is None:
            return self.key_bits, self.value_bits
        if layer >= len(self.widths):
            raise InvalidSetting(f"widths are given for {len(self.widths)} layers; the model has a layer {layer}")
        return self.widths[layer]


PRESETS = {
    "safe": Precision(8, 8),
    "compact": Precision(4, 4),
    "small": Precision(4, 2),
    "tiny": Precision(3, 2),
    "native": Precision(None, None),
}


RENAMED = {"default": "compact"}  # an old name goes on working


def current_name(name: str) -> str:
    """The name that a preset has today; an old one is said to be old (FutureWarning, shown once)."""
    if name not in RENAMED:
        return name
    warnings.warn(
        f'the preset "{name}" is called "{RENAMED[name]}" now: write precision="{RENAMED[name]}" '
        '(what you get without a precision is "safe")',
        FutureWarning,
        stacklevel=2,
    )
    return RENAMED[name]


def preset(name: str) -> Precision:
    """The named precision, also by an old name. Raises InvalidSetting with the valid names."""
    name = current_name(name)
    if name not in PRESETS:
        raise InvalidSetting(f"no preset {name!r}; the presets are {', '.join(PRESETS)}")
    return PRESETS[name]


@dataclass(frozen=True)
class Page:
    """`tokens` tokens of keys and values in parts, whose layers do not overlap.

    hops: how many handoffs lie between the text and this KV: those behind the KV that it was computed behind, and one
    for each move of its own to another process.
    """

    tokens: int
    keys: tuple[Part, ...]
    values: tuple[Part, ...]
    hops: int = 0

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts, in the order in which they are written."""
        return self.keys + self.values

    def holds(self, layers: frozenset[int]) -> bool:
        return layers <= {layer for part in self.keys for layer in part.layers}

    def without(self, layers: frozenset[int]) -> "Page":
        """The same parts but those of `layers`."""
        keys, values = (tuple(p for p in parts if layers.isdisjoint(p.layers)) for parts in (self.keys, self.values))
        return self if len(keys) == len(self.keys) else Page(self.tokens, keys, values, self.hops)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the storages behind the page: codes, scales, minima, native tokens."""
        return sum(tensor.untyped_storage().nbytes() for part in self.parts for tensor in part.tensors())

    def open_into(self, span: Span) -> None:
        """Write the first `span.tokens` tokens, in the reader's precision, into its views.

        Raises CodecError if the page holds fewer tokens, or nothing of a layer.
        """
        if span.tokens > self.tokens:
            raise CodecError(f"the page holds {self.tokens} tokens, not {span.tokens}")
        for block in span.blocks:
            fill(block.keys, block.layers, self.keys)
            fill(block.values, block.layers, self.values)

    def layer(self, layer: int, tokens: int) -> "tuple[Stored, Stored]":
        """The first `tokens` tokens of a layer's keys and of its values as they are stored, by reference."""
        keys, values = (
            next((part.layer(layer, tokens) for part in parts if layer in part.layers), None)
            for parts in (self.keys, self.values)
        )
        if keys is None or values is None:
            raise CodecError(f"the page holds nothing of layer {layer}")
        return keys, values


EMPTY_PAGE = Page(0, (), ())


def crop(page: Page, tokens: int) -> Page:
    """The first `tokens` tokens of a page as views of the same bytes, without groups that only later tokens use."""
    if tokens == page.tokens:
        return page
    keys, values = (tuple(_crop(part, tokens) for part in parts) for parts in (page.keys, page.values))
    return Page(tokens, keys, values, page.hops)


def keep_native(span: Span) -> Page:
    """A page that copies the tokens as they are: the unfilled page, the residual window, or all of it."""
    return Page(
        span.tokens,
        tuple(Part(block.layers, _copy(block.keys), None) for block in span.blocks),
        tuple(Part(block.layers, _copy(block.values), None) for block in span.blocks),
    )


def seal(span: Span, precision: Precision, *, starts_sequence: bool) -> Page:
    """Encode a full page for good. Raises CodecError on NaN or Inf, InvalidSetting for too few `widths`.

    Keys have scale and minimum, values a scale only. A `rotate_keys` that was left to a probe counts as True here.
    """
    sinks = precision.num_sink_tokens if starts_sequence else 0
    balance = None if precision.rotate_keys is False else precision.balance  # each channel has a scale of its own then
    keys: list[Part] = []
    values: list[Part] = []
    for block in span.blocks:
        pairs = [precision.bits(layer) for layer in block.layers]
        for bits, layers, tensor in _by_width(block.layers, [pair[0] for pair in pairs], block.keys):
            keys.append(_sealed(layers, tensor, sinks, _pack_keys, bits, precision, balance))
        for bits, layers, tensor in _by_width(block.layers, [pair[1] for pair in pairs], block.values):
            values.append(_sealed(layers, tensor, sinks, _pack_values, bits, precision))
    return Page(span.tokens, tuple(keys), tuple(values))


def _crop(part: Part, tokens: int) -> Part:
    head = part.head(tokens)
    return replace(head, packed=_used_groups(head.packed)) if head.packed else head


def _used_groups(encoded: Encoded) -> Encoded:
    """Without the groups along tokens that no token of it is in."""
    e = encoded
    if e.group != "channel" or e.group_size is None:
        return e
    groups = -(-e.tokens // min(e.group_size, e.tokens))
    minimum = e.minimum if e.minimum is None else e.minimum[..., :groups, :]
    return Encoded(e.codes, e.scale[..., :groups, :], minimum, e.bits, e.group, e.dim, e.group_size, e.rotated)


def _by_width(
    layers: tuple[int, ...], widths: Sequence[int | None], tensor: Tensor
) -> Iterator[tuple[int | None, tuple[int, ...], Tensor]]:
    """(bits, layers, their rows of `tensor` [L, H, T, D]) for each width that occurs."""
    if len(set(widths)) == 1:
        yield widths[0], layers, tensor
        return
    for bits in dict.fromkeys(widths):
        rows = [row for row, width in enumerate(widths) if width == bits]
        yield bits, tuple(layers[row] for row in rows), tensor[rows]


def _sealed(
    layers: tuple[int, ...],
    tensor: Tensor,
    sinks: int,
    pack: Callable[[Tensor, int, Precision], Encoded],
    bits: int | None,
    precision: Precision,
    balance: Balance | None = None,
) -> Part:
    if bits is None or sinks >= tensor.shape[-2]:
        return Part(layers, _copy(tensor), None)
    native, rest = _copy(tensor[..., :sinks, :]) if sinks else None, tensor[..., sinks:, :]
    if balance:
        factors = balance.factors(layers, rest.shape[-3], rest.device)
        rest = rest.float() * factors[..., None, :]
    return Part(layers, native, pack(rest, bits, precision), balance)


def _pack_keys(keys: Tensor, bits: int, precision: Precision) -> Encoded:
    return codec.encode(
        keys,
        bits,
        "channel",
        group_size=precision.key_group_size,
        rotate=precision.rotate_keys is not False,
        fit=_KEY_FIT if bits < 8 else 0.0,
    )


def _pack_values(values: Tensor, bits: int, precision: Precision) -> Encoded:
    narrow = bits < 8
    return codec.encode(
        values,
        bits,
        "token",
        group_size=precision.value_group_size,
        symmetric=True,
        rotate=narrow if precision.rotate_values is None else precision.rotate_values,
        fit=_VALUE_FIT if narrow else 0.0,
    )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
