"""Consecutive tokens of all layers, encoded once.

A page holds the layers stacked (`[L, H, T, D]`), since one call for 30 layers takes a third of the time of
30 calls. It is immutable: whoever forwards it forwards the same bytes, so that quantization error does not
grow with the number of hops. The first tokens of a sequence (*sinks*: most attention goes there, and their
outlying range would spoil a group's scale; StreamingLLM, arXiv 2309.17453) stay in native precision.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from qkvshare_agents import codec
from qkvshare_agents.codec import Encoded
from qkvshare_agents.errors import CodecError, InvalidSetting

# How far below 8 bits scales go from the range of a group towards the least squares fit. Keys only half of the way:
# the outlying ones that a whole fit clamps are those which attention looks for.
_KEY_FIT, _VALUE_FIT = 0.5, 1.0


@dataclass(frozen=True)
class Precision:
    """How sealed pages are stored.

    key_bits, value_bits: width of the codes; both None keeps pages native (exact).
    page_size: tokens in a sealed page. num_sink_tokens: first tokens of a sequence that stay native.
    residual_length: newest tokens that stay native (the unfilled page always does). rotate_keys: spread outlying
    channels over the head dimension before quantizing; that helps some models and harms others, and None leaves it
    to a probe of the model (`rotation`). rotate_values: the same for values; None does so below 8 bits.
    key_group_size: tokens that share a key channel's scale and minimum (None: the page). value_group_size:
    neighbouring values of a token's head that share a scale (None: the head).
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

    def __post_init__(self) -> None:
        widths = (*codec.WIDTHS, None)
        if self.key_bits not in widths or self.value_bits not in widths:
            raise InvalidSetting(f"key_bits={self.key_bits}, value_bits={self.value_bits}: choose from {widths}")
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
        return self.key_bits is None


PRESETS = {
    "safe": Precision(8, 8),
    "default": Precision(4, 4),
    "small": Precision(4, 2),
    "tiny": Precision(3, 2),
    "native": Precision(None, None),
}


def preset(name: str) -> Precision:
    """The named precision. Raises InvalidSetting with the valid names."""
    if name not in PRESETS:
        raise InvalidSetting(f"no preset {name!r}; the presets are {', '.join(PRESETS)}")
    return PRESETS[name]


@dataclass(frozen=True)
class Page:
    """`tokens` tokens of keys [L, H, T, Dk] and values [L, H, T, Dv]: first `native`, then `packed`.

    hops: how many times it came from another process, unchanged.
    """

    native: tuple[Tensor, Tensor] | None
    packed: tuple[Encoded, Encoded] | None
    hops: int = 0

    @cached_property
    def tokens(self) -> int:
        native = self.native[0].shape[-2] if self.native else 0
        return native + (self.packed[0].tokens if self.packed else 0)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the storages behind the page: codes, scales, minima, native tokens."""
        tensors = list(self.native or ())
        for encoded in self.packed or ():
            tensors.extend(encoded.tensors())
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    def open_into(self, keys: Tensor, values: Tensor) -> None:
        """Write the first `keys.shape[-2]` tokens, in the reader's precision, into views [L, H, t, D]."""
        wanted, split = keys.shape[-2], 0
        if wanted > self.tokens:
            raise CodecError(f"the page holds {self.tokens} tokens, not {wanted}")
        if self.native:
            split = min(wanted, self.native[0].shape[-2])
            keys[..., :split, :].copy_(self.native[0][..., :split, :])
            values[..., :split, :].copy_(self.native[1][..., :split, :])
        if self.packed and wanted > split:
            for encoded, out in zip(self.packed, (keys, values), strict=True):
                codec.decode_into(encoded.head(wanted - split), out[..., split:, :])

    def parts(self, layer: int, tokens: int) -> tuple[tuple[Tensor, Tensor] | None, tuple[Encoded, Encoded] | None]:
        """The first `tokens` tokens of one layer as they are stored: native [H, t, D], then packed, by reference."""
        split = min(tokens, self.native[0].shape[-2]) if self.native else 0
        native = (self.native[0][layer, :, :split], self.native[1][layer, :, :split]) if self.native and split else None
        if not self.packed or tokens == split:
            return native, None
        keys, values = (encoded.layer(layer).head(tokens - split) for encoded in self.packed)
        return native, (keys, values)

    def open_layer_into(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """`open_into` for one layer: views [H, t, D]."""
        native, packed = self.parts(layer, keys.shape[-2])
        split = native[0].shape[-2] if native else 0
        for out, exact, encoded in zip((keys, values), native or (None,) * 2, packed or (None,) * 2, strict=True):
            if exact is not None:
                out[..., :split, :].copy_(exact)
            if encoded is not None:
                codec.decode_into(encoded, out[..., split:, :])


def keep_native(keys: Tensor, values: Tensor) -> Page:
    """A page that copies the tokens as they are: the unfilled page, the residual window, or all of it."""
    return Page((_copy(keys), _copy(values)), None)


def seal(keys: Tensor, values: Tensor, precision: Precision, *, starts_sequence: bool) -> Page:
    """Encode a full page for good. keys [L, H, S, Dk], values [L, H, S, Dv]. Raises CodecError on NaN or Inf.

    Keys have scale and minimum, values a scale only. A `rotate_keys` that was left to a probe counts as True here.
    """
    if precision.key_bits is None or precision.value_bits is None:
        return keep_native(keys, values)
    sinks = precision.num_sink_tokens if starts_sequence else 0
    native = keep_native(keys[..., :sinks, :], values[..., :sinks, :]).native if sinks else None
    narrow = precision.value_bits < 8
    packed_keys = codec.encode(
        keys[..., sinks:, :],
        precision.key_bits,
        "channel",
        group_size=precision.key_group_size,
        rotate=precision.rotate_keys is not False,
        fit=_KEY_FIT if precision.key_bits < 8 else 0.0,
    )
    packed_values = codec.encode(
        values[..., sinks:, :],
        precision.value_bits,
        "token",
        group_size=precision.value_group_size,
        symmetric=True,
        rotate=narrow if precision.rotate_values is None else precision.rotate_values,
        fit=_VALUE_FIT if narrow else 0.0,
    )
    return Page(native, (packed_keys, packed_values))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
