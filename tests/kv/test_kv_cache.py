"""The working cache holds what was put in, however it was put in, and survives growing."""

import pytest
import torch
from support import stacked
from torch import Tensor

from qkvshare_agents.kv.page import Precision, keep_native, seal
from qkvshare_agents.kv.shape import KVShape, LayerGroup
from qkvshare_agents.kv.working_cache import KVCache

SHAPE = KVShape((LayerGroup((0, 1, 2), heads=2, key_dim=16, value_dim=8),), torch.float32, torch.device("cpu"))


def noise(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys [L, H, T, Dk] and values [L, H, T, Dv]."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(3, 2, tokens, size, generator=generator) for size in (16, 8))


def append(kv: KVCache, keys: Tensor, values: Tensor) -> None:
    for layer in range(SHAPE.layers):
        kv.append(layer, keys[layer], values[layer])


def assert_holds(kv: KVCache, keys: Tensor, values: Tensor) -> None:
    assert kv.tokens == keys.shape[2]
    (block,) = kv.span(0, kv.tokens).blocks
    got_keys, got_values = block.keys, block.values
    assert torch.equal(got_keys, keys) and torch.equal(got_values, values)


@pytest.mark.parametrize("steps", [[1] * 600, [255, 1, 1, 300, 43], [600]])
def test_appending_in_steps_equals_appending_at_once(steps: list[int]) -> None:
    keys, values = noise(600)
    kv, start = KVCache(SHAPE), 0
    for step in steps:
        append(kv, keys[:, :, start : start + step], values[:, :, start : start + step])
        start += step
    assert_holds(kv, keys, values)


def test_layers_of_differing_shape_are_held_beside_each_other() -> None:
    groups = LayerGroup((0, 2), 2, 16, 8), LayerGroup((1,), 1, 4, 4)
    kv = KVCache(KVShape(groups, torch.float32, torch.device("cpu")))
    generator = torch.Generator().manual_seed(0)
    native = [
        tuple(torch.randn(g.heads, 300, dim, generator=generator) for dim in (g.key_dim, g.value_dim))
        for g in (groups[0], groups[1], groups[0])
    ]
    for start, stop in ((0, 200), (200, 201), (201, 300)):
        for layer, (keys, values) in enumerate(native):
            kv.append(layer, keys[:, start:stop], values[:, start:stop])
    assert (kv.tokens, kv.shape.layers, kv.shape.values_per_token) == (300, 3, 2 * 2 * 24 + 8)
    assert kv.nbytes == 4 * kv.shape.values_per_token * 512
    reader = KVCache(kv.shape)
    reader.load([(keep_native(kv.span(0, 300)), 290)])
    for held in (kv.span(0, 290), reader.span(0, 290)):
        for (_, keys, values), expected in zip(held.layers(), native, strict=True):
            assert torch.equal(keys, expected[0][:, :290]) and torch.equal(values, expected[1][:, :290])


def test_append_returns_all_tokens_of_its_layer() -> None:
    keys, values = noise(300)
    kv = KVCache(SHAPE)
    append(kv, keys[:, :, :250], values[:, :, :250])
    for layer in range(SHAPE.layers):
        got_keys, got_values = kv.append(layer, keys[layer, :, 250:], values[layer, :, 250:])
        assert torch.equal(got_keys, keys[layer]) and torch.equal(got_values, values[layer])


def test_tokens_are_those_that_every_layer_holds() -> None:
    keys, values = noise(5)
    kv = KVCache(SHAPE)
    kv.append(0, keys[0], values[0])
    assert kv.tokens == 0
    kv.append(1, keys[1], values[1])
    kv.append(2, keys[2, :, :3], values[2, :, :3])
    assert kv.tokens == 3


def test_reserved_room_is_not_allocated_again() -> None:
    keys, values = noise(400)
    kv = KVCache(SHAPE)
    kv.clear(400)
    place, size = kv.span(0, 1).blocks[0].keys.data_ptr(), kv.nbytes
    append(kv, keys, values)
    kv.clear(300)
    assert (kv.span(0, 1).blocks[0].keys.data_ptr(), kv.nbytes, kv.tokens) == (place, size, 0)


def test_growing_token_by_token_copies_rarely() -> None:
    keys, values = noise(1)
    kv, places = KVCache(SHAPE), set()
    for _ in range(3000):
        append(kv, keys, values)
        places.add(kv.nbytes)
    assert len(places) <= 10


def test_bytes_are_those_of_the_storages() -> None:
    kv = KVCache(SHAPE)
    assert kv.nbytes == 0
    kv.clear(256)
    assert kv.nbytes == 3 * 2 * 256 * (16 + 8) * 4


def test_clear_starts_over() -> None:
    first, second = noise(40), noise(30, seed=1)
    kv = KVCache(SHAPE)
    append(kv, *first)
    kv.clear(0)
    append(kv, *second)
    assert_holds(kv, *second)


def test_crop_forgets_the_end_and_appending_goes_on_there() -> None:
    first, second = noise(40), noise(10, seed=1)
    kv = KVCache(SHAPE)
    append(kv, *first)
    kv.crop(25)
    assert_holds(kv, *(tensor[:, :, :25] for tensor in first))
    append(kv, *second)
    assert_holds(kv, *(torch.cat([a[:, :, :25], b], dim=2) for a, b in zip(first, second, strict=True)))
    kv.crop(1000)
    assert kv.tokens == 35


def test_page_runs_load_in_order_as_far_as_asked() -> None:
    keys, values = noise(600)
    spans = [(0, 64, 64), (64, 128, 50), (300, 600, 300)]
    kv = KVCache(SHAPE)
    kv.load((keep_native(stacked(keys[:, :, a:b], values[:, :, a:b])), tokens) for a, b, tokens in spans)
    index = torch.cat([torch.arange(a, a + tokens) for a, _, tokens in spans])
    assert_holds(kv, keys[:, :, index], values[:, :, index])


def test_packed_pages_load_close_to_what_was_sealed() -> None:
    keys, values = noise(128)
    precision = Precision(page_size=64)
    span = stacked(keys, values)
    pages = [seal(span.cut(a, a + 64), precision, starts_sequence=a == 0) for a in (0, 64)]
    kv = KVCache(SHAPE)
    kv.load([(pages[0], 64), (pages[1], 33)])
    (block,) = kv.span(0, 97).blocks
    for got, expected in zip((block.keys, block.values), (keys, values), strict=True):
        assert torch.equal(got[:, :, :4], expected[:, :, :4]), "sinks are native"
        assert (got - expected[:, :, :97]).abs().max() < 0.03
    assert kv.tokens == 97


def test_loading_nothing_leaves_an_empty_cache() -> None:
    kv = KVCache(SHAPE)
    kv.clear(64)
    kv.load([])
    assert kv.tokens == 0


def test_the_source_can_change_after_it_was_appended() -> None:
    keys, values = noise(10)
    kept = keys.clone(), values.clone()
    kv = KVCache(SHAPE)
    append(kv, keys, values)
    keys.zero_()
    values.zero_()
    assert_holds(kv, *kept)


def test_the_yardstick_is_two_bytes_a_value() -> None:
    assert SHAPE.fp16_bytes(10) == sum(t.numel() * 2 for t in noise(10))
