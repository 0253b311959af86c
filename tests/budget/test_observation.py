"""Observing changes nothing, sees what attention computed, and says when it can't."""

import pytest
import torch
from support import tiny_engine

from qkvshare_agents.budget import observer as observation
from qkvshare_agents.budget import sensitivity
from qkvshare_agents.budget.observer import FEWEST_TOKENS, Observer
from qkvshare_agents.kv import page
from qkvshare_agents.kv.page import Precision
from qkvshare_agents.kv.span import Block, Span
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model.engine import Engine

IDS = [(7 * i + i // 11) % 600 for i in range(400)]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observation, "TOKENS_BETWEEN", 1)


def observe(engine: Engine, **options) -> Observer:
    assert engine.shape
    engine.observer = Observer(engine.model, engine.shape.layers, Precision(**{"rotate_keys": False} | options))
    return engine.observer


def read(engine: Engine, ids=IDS, split: int = 0):
    kv = KVCache(engine.shape)
    run = engine.begin(kv)
    if split:
        engine.feed(run, ids[:split])
    return engine.feed(run, ids[split:]), kv


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2", "gemma3_text", "mistral", "olmo2"])
def test_results_are_the_same_bit_by_bit(kind: str, attention: str) -> None:
    overrides = {"sliding_window": 150} if kind in ("mistral", "gemma3_text") else {}
    engine = tiny_engine(kind, **overrides)
    engine.model.set_attn_implementation(attention)
    expected, native = read(engine, split=130)
    observer = observe(engine)
    before = engine.fingerprint
    got, seen = read(engine, split=130)
    assert torch.equal(got, expected)
    for (_, *ours), (_, *theirs) in zip(seen.span(0, 400).layers(), native.span(0, 400).layers(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert engine.model.config._attn_implementation == attention and engine.fingerprint == before
    assert observer.refusal is None and observer.calls == 2
    units = observer.take()
    assert units and len(units) == 3
    assert all(unit.keys > 0 and unit.values > 0 for unit in units)
    assert observer.take() is None


@pytest.mark.usefixtures("always")
def test_it_sees_the_attention_that_was_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the sampled rows: weights times values is what the model's own attention gave, also in a window."""
    engine = tiny_engine("mistral", sliding_window=60)
    shown, computed = [], []
    real = Observer.original

    def original(self, module):
        attend = real(self, module)

        def noted(*args, **options):
            output = attend(*args, **options)
            computed.append(output[0])
            return output

        return noted

    monkeypatch.setattr(Observer, "original", original)
    measured = sensitivity.measure
    monkeypatch.setattr(
        "qkvshare_agents.budget.observer.measure",
        lambda seen, *a, **k: (shown.append(seen), measured(seen, *a, **k))[1],
    )
    observe(engine)
    read(engine, split=200)
    assert len(shown) == len(computed) == 6
    for seen, output in zip(shown, computed, strict=True):
        new = output.shape[1]
        rows = seen.positions - (seen.keys.shape[1] - new)
        expected = output[0, rows].transpose(0, 1)  # [HQ, N, D]
        got = (seen.weights() @ seen.values).reshape(expected.shape)
        assert torch.allclose(got, expected, atol=1e-5)
    assert shown[-1].visible.sum(-1).max() == 60


def test_short_reads_and_decoding_are_not_observed() -> None:
    engine = tiny_engine()
    observer = observe(engine)
    read(engine, IDS[: FEWEST_TOKENS - 1])
    assert observer.calls == 0 and observer.take() is None
    kv = KVCache(engine.shape)
    run = engine.begin(kv)
    engine.feed(run, IDS[:FEWEST_TOKENS])
    assert observer.calls == 1
    for i in range(5):
        engine.feed(run, [i])
    assert observer.calls == 1


def test_the_last_long_part_of_a_prompt_is_observed() -> None:
    engine = tiny_engine()
    observer = observe(engine)
    kv = KVCache(engine.shape)
    engine.feed(engine.begin(kv), IDS * 2 + IDS[:240])  # 512 + 512 + 16: the second part
    assert observer.calls == 1


def test_observations_keep_their_distance() -> None:
    engine = tiny_engine()
    observer = observe(engine)
    for calls in (1, 1, 2, 2):  # 400 tokens each: the first at once, then one in 768
        read(engine)
        assert observer.calls == calls


def test_what_it_can_not_observe_is_refused_with_the_reason() -> None:
    engine = tiny_engine("gpt_oss", num_local_experts=2, num_experts_per_tok=1)
    expected, _ = read(engine)
    observer = observe(engine)
    got, _ = read(engine)
    assert torch.equal(got, expected)
    assert observer.refusal == "attention with s_aux is not observed" and observer.take() is None
    read(engine)
    assert observer.calls == 0
    bloom = tiny_engine("bloom")  # computes attention itself
    expected, _ = read(bloom)
    observer = observe(bloom)
    got, _ = read(bloom)
    assert torch.equal(got, expected)
    assert observer.refusal == "attention of 0 of 3 layers was seen"


def test_an_error_in_the_forward_leaves_the_model_as_it_was() -> None:
    engine = tiny_engine()
    observer = observe(engine)
    with pytest.raises(RuntimeError, match="in between"), observer.watching(200):
        raise RuntimeError("in between")
    assert engine.model.config._attn_implementation == "sdpa"
    assert not engine.model.model.layers[0]._forward_pre_hooks
    read(engine)
    assert observer.refusal is None and observer.calls == 1


def test_bounds_hold_on_the_demo_model(demo_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real queries, keys and values of SmolLM2, pages of every width: no output moves further than its bound."""
    shown: list[sensitivity.Seen] = []
    measured = sensitivity.measure
    monkeypatch.setattr(
        "qkvshare_agents.budget.observer.measure",
        lambda seen, *a, **k: (shown.append(seen), measured(seen, *a, **k))[1],
    )
    ids = demo_engine.template.encoder.text(page.__doc__ * 4 + sensitivity.__doc__)[:320]
    try:
        observe(demo_engine, rotate_keys=True)
        read(demo_engine, ids)
    finally:
        demo_engine.observer = None
    assert len(shown) == 30
    tightness = []
    for layer in range(0, 30, 3):
        seen = shown[layer]
        exact = seen.weights() @ seen.values
        for bits in (8, 4, 3, 2):
            keys, values = seen.keys.clone(), seen.values.clone()
            whole = Span(320, (Block((0,), keys[None], values[None]),))
            for start in range(0, 320, 64):
                span = whole.cut(start, start + 64)
                precision = Precision(bits, bits, rotate_keys=True)
                page.seal(span, precision, starts_sequence=start == 0).open_into(span)
            turned = [sensitivity._turned(x, True) for x in (keys, seen.keys)]
            bound = sensitivity.key_bound(seen, (turned[0] - turned[1]).abs(), rotated=True).reshape(exact.shape[:2])
            got = sensitivity.Seen(seen.query, keys, seen.values, seen.visible, seen.positions, seen.scaling).weights()
            moved = (got @ seen.values - exact).norm(dim=-1)
            assert bool((moved <= bound * (1 + 1e-3) + 1e-4).all()), (layer, bits, "keys")
            bound_v = sensitivity.value_bound(seen, (values - seen.values).norm(dim=-1)).reshape(exact.shape[:2])
            moved_v = (seen.weights() @ (values - seen.values)).norm(dim=-1)
            assert bool((moved_v <= bound_v * (1 + 1e-3) + 1e-4).all()), (layer, bits, "values")
            tightness.append((bits, float((moved / bound).mean()), float((moved_v / bound_v).mean())))
    keys, values = (sum(row[kind] for row in tightness) / len(tightness) for kind in (1, 2))
    assert 0.01 < keys < 1 and 0.1 < values < 1, "what errors do, as a share of the bounds"
