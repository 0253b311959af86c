"""A model reads packed pages in place, and says what it says behind the same pages opened."""

import pytest
import torch
from support import tiny_engine

from qkvshare_agents.errors import UnsupportedModel
from qkvshare_agents.kv.packed_cache import PackedCache
from qkvshare_agents.kv.page import Precision, preset
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model import packed_attention
from qkvshare_agents.model.engine import Engine

IDS = [(7 * i + 3) % 600 for i in range(300)]
PRECISIONS = {
    "safe": preset("safe"),
    "compact": preset("compact"),
    "tiny": preset("tiny"),
    "residual": Precision(4, 4, residual_length=70),
    "groups": Precision(3, 2, key_group_size=32, value_group_size=4),
    "native": preset("native"),
    "widths": Precision(4, 4, widths=((8, 4), (3, None), (None, None))),
}


def opened(engine: Engine, kv: PackedCache) -> KVCache:
    """The same tokens in native memory."""
    assert engine.shape is not None
    native = KVCache(engine.shape)
    with torch.inference_mode():
        for layer in range(engine.shape.layers):
            native.append(layer, *kv.dequantized(layer))
    return native


def distance(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    assert a is not None and b is not None
    return float((a - b).norm() / b.norm())


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way attention went, in the order of calls."""
    ways: list[str] = []
    for name in ("attend", "dequantized"):
        original = getattr(PackedCache, name)
        monkeypatch.setattr(PackedCache, name, lambda *a, o=original, n=name: (ways.append(n), o(*a))[1])
    return ways


@pytest.mark.parametrize(
    ("kind", "name"), [*(("llama", name) for name in PRECISIONS), ("qwen3", "compact"), ("gpt2", "tiny")]
)
def test_logits_equal_those_behind_opened_pages(kind: str, name: str, counted: list[str]) -> None:
    engine = tiny_engine(kind)
    assert engine.shape is not None
    kv = PackedCache(engine.shape)
    run = packed_attention.begin(engine, kv)
    packed_attention.feed(engine, run, kv, IDS[:200], PRECISIONS[name])
    assert kv.tokens == 200
    native = opened(engine, kv)
    beside = engine.begin(native)
    counted.clear()
    for token in IDS[200:208]:
        assert distance(engine.feed(run, [token]), engine.feed(beside, [token])) < 1e-5
    if name != "widths":  # where a page packs only keys or only values, the layer is opened
        assert counted == ["attend"] * 8 * engine.shape.layers, "single tokens read codes"
    assert distance(engine.feed(run, IDS[208:220]), engine.feed(beside, IDS[208:220])) < 1e-5
    assert counted[-1] == "dequantized" and kv.tokens == run.tokens == 220


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss"])
def test_windows_and_sinks_are_the_models_own(kind: str, counted: list[str]) -> None:
    """A mask of a window, or attention with sinks: the layer's native tensors go through the original."""
    engine = tiny_engine(kind, head_dim=16, sliding_window=64)
    assert engine.shape is not None
    kv = PackedCache(engine.shape)
    run = packed_attention.begin(engine, kv)
    packed_attention.feed(engine, run, kv, IDS[:200], preset("compact"))
    beside = engine.begin(opened(engine, kv))
    counted.clear()
    for token in IDS[200:210]:
        assert distance(engine.feed(run, [token]), engine.feed(beside, [token])) < 1e-5
    assert "dequantized" in counted


def test_no_native_copy_of_the_history_is_held() -> None:
    engine = tiny_engine("llama", num_hidden_layers=6)
    assert engine.shape is not None
    precision = preset("compact")
    kv = PackedCache(engine.shape)
    run = packed_attention.begin(engine, kv)
    history = 1500
    packed_attention.feed(engine, run, kv, [i % 600 for i in range(history)], precision)
    whole = 4 * engine.shape.values_per_token
    kv.drop_scratch()
    assert kv.native_bytes <= 256 * whole, "the tail, in memory for 256 tokens"
    for token in range(70):
        engine.feed(run, [token])
        kv.seal(precision)
    assert kv.native_bytes <= 256 * whole and kv.tokens == history + 70
    assert kv.page_bytes < 0.5 * history * whole / 2, "of fp16"
    kv.dequantized(0)
    assert kv.native_bytes <= (257 + 1.25 * (history + 70) / 6) * whole, "one layer at a time"


def test_pages_of_a_store_are_read_by_reference() -> None:
    engine = tiny_engine()
    assert engine.shape is not None
    writer, reader = PackedCache(engine.shape), PackedCache(engine.shape)
    run = packed_attention.begin(engine, writer)
    packed_attention.feed(engine, run, writer, IDS[:192], preset("tiny"))
    reader.load((page, 40 if stop == 192 else stop - start) for page, start, stop in writer.runs)
    assert reader.tokens == 168
    for layer in range(engine.shape.layers):
        got, expected = reader.dequantized(layer), writer.dequantized(layer)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b[:, :168])
    second = packed_attention.begin(engine, reader)
    beside = engine.begin(opened(engine, reader))
    assert distance(engine.feed(second, [5]), engine.feed(beside, [5])) < 1e-5


def test_the_switch_changes_nothing_for_native_caches() -> None:
    engine = tiny_engine()
    before = engine.feed(engine.begin(None), IDS[:50])
    digest = engine.fingerprint.digest
    assert engine.shape is not None
    packed_attention.begin(engine, PackedCache(engine.shape))
    after = engine.feed(engine.begin(None), IDS[:50])
    assert before is not None and after is not None and torch.equal(before, after)
    assert engine.fingerprint.digest == digest


def test_models_with_attention_of_their_own_are_refused() -> None:
    for kind, text in (("bloom", "attention of its own"), ("mamba", "more than attention")):
        overrides = {"num_hidden_layers": 2} if kind == "mamba" else {}
        engine = tiny_engine(kind, **overrides)
        assert engine.shape is not None
        with pytest.raises(UnsupportedModel, match=text):
            packed_attention.begin(engine, PackedCache(engine.shape))
