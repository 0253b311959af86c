"""Pages: exact where they promise it, close elsewhere, and unchanged for good."""

import dataclasses

import pytest
import torch
from support import stacked
from torch import Tensor

from qkvshare_agents.errors import CodecError, InvalidSetting
from qkvshare_agents.kv.page import EMPTY_PAGE, PRESETS, Page, Precision, keep_native, preset, seal
from qkvshare_agents.kv.shape import KVShape, LayerGroup
from qkvshare_agents.kv.span import Block, Span
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.settings import HostSettings
from qkvshare_agents.store.page_store import PageStore

L, H, D_KEY, D_VALUE = 2, 3, 32, 24
SMALL = Precision(page_size=16, num_sink_tokens=4)
STEP = 0.05  # no group of `noise` has a larger step at 8 bits


def noise(tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys [L, H, T, Dk] and values [L, H, T, Dv]."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(L, H, tokens, size, generator=generator).to(dtype) for size in (D_KEY, D_VALUE))


def opened(page: Page, tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The first tokens, read into the middle of a cache that is full of NaN; nothing else may be written."""
    caches = [torch.full((L, H, 100, size), torch.nan, dtype=dtype) for size in (D_KEY, D_VALUE)]
    page.open_into(stacked(*(cache[:, :, 10 : 10 + tokens] for cache in caches)))
    for cache in caches:
        assert cache[:, :, :10].isnan().all() and cache[:, :, 10 + tokens :].isnan().all()
    return tuple(cache[:, :, 10 : 10 + tokens] for cache in caches)


def storage_bytes(page: Page) -> int:
    """Counted over the tensors that are reachable from the page, without asking it."""
    tensors, rest = {}, [page]
    while rest:
        thing = rest.pop()
        if isinstance(thing, Tensor):
            tensors[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, tuple):
            rest += thing
        elif dataclasses.is_dataclass(thing):
            rest += [getattr(thing, f.name) for f in dataclasses.fields(thing)]
    return sum(tensors.values())


@pytest.mark.parametrize("sinks", [0, 1, 4, 15])
def test_sinks_are_exact_and_the_rest_is_close(sinks: int) -> None:
    source = noise(16)
    page = seal(stacked(*source), dataclasses.replace(SMALL, num_sink_tokens=sinks), starts_sequence=True)
    assert page.tokens == 16
    for got, expected in zip(opened(page, 16), source, strict=True):
        assert torch.equal(got[..., :sinks, :], expected[..., :sinks, :])
        rest = (got - expected)[..., sinks:, :].abs()
        assert rest.max() <= STEP / 2 and (rest > 0).any()


def test_an_outlying_sink_does_not_spoil_the_others() -> None:
    source = noise(16)
    for tensor in source:
        tensor[..., 0, :] = 3e4
    for got, expected in zip(opened(seal(stacked(*source), SMALL, starts_sequence=True), 16), source, strict=True):
        assert (got - expected).abs().max() <= STEP / 2


def test_only_the_first_page_of_a_sequence_has_sinks() -> None:
    page = seal(stacked(*noise(16)), SMALL, starts_sequence=False)
    (keys,) = page.keys
    assert keys.native is None and keys.packed is not None and keys.packed.tokens == 16


def test_keys_have_a_minimum_and_a_scale_per_channel_and_values_a_scale_per_token() -> None:
    page = seal(stacked(*noise(16)), SMALL, starts_sequence=False)
    keys, values = page.keys[0].packed, page.values[0].packed
    assert keys is not None and values is not None
    assert keys.minimum is not None and keys.scale.shape == (L, H, 1, D_KEY)
    assert values.minimum is None and values.scale.shape == (L, H, 16, 1)


@pytest.mark.parametrize("starts_sequence", [True, False])
@pytest.mark.parametrize("precision", [SMALL, dataclasses.replace(SMALL, key_bits=None, value_bits=None)])
def test_every_prefix_of_a_page_reads_like_the_whole(precision: Precision, starts_sequence: bool) -> None:
    page = seal(stacked(*noise(16)), precision, starts_sequence=starts_sequence)
    whole = opened(page, 16)
    for tokens in range(1, 17):
        for part, full in zip(opened(page, tokens), whole, strict=True):
            # not bit for bit: rotating back is a matrix product, whose rounding depends on its shape
            torch.testing.assert_close(part, full[..., :tokens, :], msg=f"{tokens} tokens")


def test_more_tokens_than_the_page_holds_are_refused() -> None:
    for page in (seal(stacked(*noise(16)), SMALL, starts_sequence=True), keep_native(stacked(*noise(16))), EMPTY_PAGE):
        with pytest.raises(CodecError, match=f"holds {page.tokens} tokens, not 17"):
            opened(page, 17)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_native_pages_are_exact_in_every_precision(dtype: torch.dtype) -> None:
    source = noise(16, dtype)
    for page in (keep_native(stacked(*source)), seal(stacked(*source), preset("native"), starts_sequence=True)):
        assert all(part.packed is None for part in page.parts)
        for got, expected in zip(opened(page, 16, dtype), source, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_half_precision_caches_can_be_sealed_and_opened(dtype: torch.dtype) -> None:
    source = noise(16, dtype)
    for got, expected in zip(
        opened(seal(stacked(*source), SMALL, starts_sequence=True), 16, dtype), source, strict=True
    ):
        assert (got.float() - expected.float()).abs().max() <= STEP


@pytest.mark.parametrize("starts_sequence", [True, False])
def test_bytes_are_those_of_the_storages(starts_sequence: bool) -> None:
    """Spans of a large cache must not keep that cache alive, nor count as it."""
    cache = noise(1000)
    spans = [tensor[:, :, 100:116] for tensor in cache]
    sealed = seal(stacked(*spans), SMALL, starts_sequence=starts_sequence)
    assert sealed.nbytes == storage_bytes(sealed)
    rows, sinks = L * H, 4 if starts_sequence else 0
    codes = rows * (16 - sinks) * (D_KEY + D_VALUE)
    assert sealed.nbytes == codes + 2 * rows * (2 * D_KEY + 16 - sinks) + 4 * rows * sinks * (D_KEY + D_VALUE)
    native = keep_native(stacked(*spans))
    assert native.nbytes == storage_bytes(native) == 4 * rows * 16 * (D_KEY + D_VALUE)


def test_the_empty_page_has_neither_tokens_nor_bytes() -> None:
    assert (EMPTY_PAGE.tokens, EMPTY_PAGE.nbytes) == (0, 0)


@pytest.mark.parametrize("precision", [SMALL, preset("native")])
@pytest.mark.parametrize("starts_sequence", [True, False])
def test_a_page_does_not_change_with_the_cache_it_came_from(precision: Precision, starts_sequence: bool) -> None:
    source = noise(16)
    page = seal(stacked(*source), precision, starts_sequence=starts_sequence)
    before = [tensor.clone() for tensor in opened(page, 16)]
    for tensor in source:
        tensor.fill_(torch.nan)
    for now, then in zip(opened(page, 16), before, strict=True):
        assert torch.equal(now, then)


def test_a_page_does_not_change_with_what_it_was_read_into() -> None:
    page = keep_native(stacked(*noise(16)))
    first = opened(page, 16)
    kept = [tensor.clone() for tensor in first]
    for tensor in first:
        tensor.zero_()
    assert all(torch.equal(a, b) for a, b in zip(opened(page, 16), kept, strict=True))


def test_a_page_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        keep_native(stacked(*noise(16))).keys = ()  # type: ignore[misc]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
def test_keys_or_values_that_are_not_finite_are_not_sealed(which: int, bad: float) -> None:
    source = noise(16)
    source[which][-1, -1, -1, -1] = bad
    with pytest.raises(CodecError):
        seal(stacked(*source), SMALL, starts_sequence=True)


WIDTHS = ((8, 4), (4, 8), (8, 4), (None, 3), (4, 2))


def test_layers_of_differing_width_and_shape_are_sealed_each_as_if_alone() -> None:
    """A page of layers that differ holds what pages of each layer by itself would, byte for byte."""
    generator = torch.Generator().manual_seed(0)
    blocks = (
        Block((0, 2, 4), *(torch.randn(3, 2, 16, dim, generator=generator) for dim in (32, 24))),
        Block((1, 3), *(torch.randn(2, 1, 16, dim, generator=generator) for dim in (8, 8))),
    )
    precision = dataclasses.replace(SMALL, widths=WIDTHS)
    page = seal(Span(16, blocks), precision, starts_sequence=True)
    got = Span(16, tuple(Block(b.layers, *(torch.full_like(x, torch.nan) for x in (b.keys, b.values))) for b in blocks))
    page.open_into(got)
    native = list(Span(16, blocks).layers())
    alone_bytes = 0
    for layer, keys, values in got.layers():
        _, native_keys, native_values = native[layer]
        alone = seal(
            stacked(native_keys[None], native_values[None]),
            dataclasses.replace(precision, widths=WIDTHS[layer : layer + 1]),
            starts_sequence=True,
        )
        alone_bytes += alone.nbytes
        expected = torch.empty_like(native_keys)[None], torch.empty_like(native_values)[None]
        alone.open_into(stacked(*expected))
        torch.testing.assert_close(keys, expected[0][0])
        torch.testing.assert_close(values, expected[1][0])
        assert torch.equal(keys, native_keys) == (WIDTHS[layer][0] is None)
    assert page.nbytes == alone_bytes
    assert [part.layers for part in page.keys] == [(0, 2), (4,), (1,), (3,)]
    assert [part.layers for part in page.values] == [(0, 2), (4,), (1,), (3,)]


def test_equal_widths_make_one_part_as_if_none_were_given() -> None:
    source = stacked(*noise(16))
    same = seal(source, dataclasses.replace(SMALL, widths=((8, 8),) * L), starts_sequence=True)
    for mine, other in zip(same.parts, seal(source, SMALL, starts_sequence=True).parts, strict=True):
        assert mine.layers == other.layers
        assert all(torch.equal(a, b) for a, b in zip(mine.tensors(), other.tensors(), strict=True))


def test_too_few_widths_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="for 1 layers; the model has a layer 1"):
        seal(stacked(*noise(16)), dataclasses.replace(SMALL, widths=((8, 8),)), starts_sequence=True)


def test_a_reader_of_other_layers_is_refused() -> None:
    page = keep_native(stacked(*noise(16)))
    more = stacked(*(torch.cat([tensor, tensor]) for tensor in noise(16)))
    with pytest.raises(CodecError, match="2 of 4 layers"):
        page.open_into(more)
    fewer = stacked(*(tensor[:1] for tensor in noise(16)))
    with pytest.raises(CodecError, match="0 of 1 layers"):
        page.open_into(fewer)


def test_presets() -> None:
    assert list(PRESETS) == ["safe", "compact", "small", "tiny", "native"]
    with pytest.warns(FutureWarning, match='"default" is called "compact" now'):
        assert preset("default") is PRESETS["compact"]
    with pytest.warns(FutureWarning, match='without a precision is "safe"'):
        assert HostSettings("tiny", precision="default") == HostSettings("tiny", precision="compact")
    assert preset("safe") == Precision() and not preset("safe").is_native
    assert preset("native").is_native
    with pytest.raises(InvalidSetting, match="no preset 'int7'; the presets are safe, compact, small, tiny, native"):
        preset("int7")


def test_every_preset_takes_fewer_bytes_than_the_one_before() -> None:
    source = noise(64)
    sizes = [seal(stacked(*source), p, starts_sequence=True).nbytes for p in PRESETS.values()]
    assert sizes[:-1] == sorted(set(sizes[:-1]), reverse=True) and sizes[-1] == max(sizes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"key_bits": 5}, r"key_bits=5, value_bits=8: choose from \(8, 4, 3, 2, None\)"),
        ({"value_bits": 0}, "value_bits=0"),
        ({"key_bits": None}, "both"),
        ({"value_bits": None}, "both"),
        ({"page_size": 0}, r"page_size \(0\)"),
        ({"page_size": -64}, r"page_size \(-64\)"),
        ({"page_size": 4}, r"num_sink_tokens \(4\) < page_size \(4\)"),
        ({"num_sink_tokens": -1}, r"num_sink_tokens \(-1\)"),
        ({"num_sink_tokens": 64}, r"num_sink_tokens \(64\)"),
        ({"residual_length": -1}, r"residual_length \(-1\)"),
        ({"widths": ((8, 8), (8, 5))}, r"widths of layer 1 are \(8, 5\)"),
        ({"widths": ((8,),)}, r"widths of layer 0 are \(8,\)"),
        ({"key_group_size": 24}, r"page_size 64 is no multiple of key_group_size 24"),
    ],
)
def test_a_precision_that_can_not_be_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        Precision(**settings)  # type: ignore[arg-type]


def test_pages_are_the_same_however_their_tokens_came() -> None:
    """Token by token, in pieces or at once: the same native KV gives the same sealed bytes."""
    keys, values = noise(150)
    group = LayerGroup(tuple(range(L)), H, D_KEY, D_VALUE)
    shape = KVShape((group,), keys.dtype, keys.device)
    stored = []
    for steps in ([150], [1] * 150, [7, 64, 60, 19]):
        kv, store, ids, done = KVCache(shape), PageStore(b"", 2**40), tuple(range(150)), 0
        for step in steps:
            for layer in range(len(keys)):
                kv.append(layer, keys[layer, :, done : done + step], values[layer, :, done : done + step])
            done += step

            def make_page(start: int, stop: int, sealed: bool, kv: KVCache = kv) -> Page:
                span = kv.span(start, stop)
                return seal(span, Precision(), starts_sequence=start == 0) if sealed else keep_native(span)

            store.extend(ids[:done], 64, done, make_page)
        stored.append([page for page, _ in store.match(ids).runs])
    for others in stored[1:]:
        assert [p.tokens for p in others] == [64, 64, 22]
        for page, other in zip(stored[0], others, strict=True):
            for a, b in zip(tensors_of(page), tensors_of(other), strict=True):
                assert torch.equal(a, b)


def tensors_of(page: Page) -> list[torch.Tensor]:
    return [tensor for part in page.parts for tensor in part.tensors()]


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_narrow_pages_open_close_to_what_was_sealed(bits: int) -> None:
    keys, values = noise(64)
    precision = Precision(key_bits=bits, value_bits=bits, key_group_size=32)
    page = seal(stacked(keys, values), precision, starts_sequence=True)
    got = torch.full_like(keys, torch.nan), torch.full_like(values, torch.nan)
    page.open_into(stacked(*got))
    assert torch.equal(got[0][..., :4, :], keys[..., :4, :])
    limit = {4: 0.1, 3: 0.2, 2: 0.45}[bits]
    for opened_part, part in zip(got, (keys, values), strict=True):
        assert 0 < (opened_part - part).norm() / part.norm() < limit
