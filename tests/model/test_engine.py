"""Capture, inject, continue equals one uninterrupted forward; what can't do that is refused with a reason.

Also run against the oldest supported transformers (see .ci/run), so only `support` and the core are used here.
"""

import re
from typing import Any

import pytest
import torch
import transformers
from support import tiny_engine, tiny_model, tiny_tokenizer
from transformers import CONFIG_MAPPING, DynamicCache

from qkvshare_agents.errors import ContextOverflow, QKVShareError, UnsupportedModel
from qkvshare_agents.eval.families import tiny_model as tiny_family
from qkvshare_agents.kv import page
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model import cache_layers, probe, verdicts
from qkvshare_agents.model.driver import PREFILL_CHUNK_TOKENS, Driver
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.model.run import Run

EXACT_KINDS = ["llama", "qwen2", "qwen3", "mistral", "gpt2", "gpt_neox", "phi3"]
MAX_DIFFERENCE = 1e-4


def ids_of_length(count: int, seed: int = 1) -> list[int]:
    return torch.randint(3, 600, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def uninterrupted(engine: Engine, ids: list[int]) -> torch.Tensor:
    """Logits [V] of one forward without any cache of ours."""
    with torch.inference_mode():
        return engine.model(input_ids=torch.tensor([ids])).logits[0, -1].float()


def handed_over(engine: Engine, ids: list[int], at: int, precision: page.Precision) -> torch.Tensor:
    """Logits [V] behind `ids` when the first `at` tokens come from pages that another cache was sealed into."""
    assert engine.shape
    source, target = KVCache(engine.shape), KVCache(engine.shape)
    engine.feed(engine.begin(source), ids[:at])
    size = precision.page_size
    pages = []
    for start in range(0, at, size):
        stop = min(start + size, at)
        span = source.span(start, stop)
        full = stop - start == size
        pages.append(page.seal(span, precision, starts_sequence=start == 0) if full else page.keep_native(span))
    target.load((p, p.tokens) for p in pages)
    logits = engine.feed(engine.begin(target), ids[at:])
    assert logits is not None
    return logits


@pytest.mark.parametrize("kind", EXACT_KINDS)
@pytest.mark.parametrize(("total", "at"), [(2, 1), (100, 64), (130, 129), (200, 77), (600, 40)])
def test_native_handoff_equals_one_forward(kind: str, total: int, at: int) -> None:
    engine = tiny_engine(kind)
    assert engine.refusal is None
    ids = ids_of_length(total)
    got = handed_over(engine, ids, at, page.preset("native"))
    assert (got - uninterrupted(engine, ids)).abs().max() <= MAX_DIFFERENCE


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_decoding_step_by_step_equals_one_forward(kind: str) -> None:
    engine = tiny_engine(kind)
    assert engine.shape
    ids, kv = ids_of_length(90), KVCache(engine.shape)
    run = engine.begin(kv)
    engine.feed(run, ids[:70])
    for token in ids[70:]:
        logits = engine.feed(run, [token])
    assert (logits - uninterrupted(engine, ids)).abs().max() <= MAX_DIFFERENCE
    assert kv.tokens == run.tokens == 90


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_8_bit_handoff_stays_close(kind: str) -> None:
    engine = tiny_engine(kind)
    ids = ids_of_length(200)
    expected = uninterrupted(engine, ids)
    got = handed_over(engine, ids, 192, page.preset("safe"))
    p, q = expected.log_softmax(-1), got.log_softmax(-1)
    assert float((p.exp() * (p - q)).sum()) <= 1e-3
    assert not torch.equal(expected, got), "8 bits can't be exact: were the pages used at all?"


def test_a_wrong_cache_would_be_seen() -> None:
    """The control: another conversation's KV moves the logits by far more than the tolerance."""
    engine = tiny_engine()
    ids, others = ids_of_length(100), ids_of_length(100, seed=2)
    got = handed_over(engine, others[:64] + ids[64:], 64, page.preset("native"))
    assert (got - uninterrupted(engine, ids)).abs().max() > 100 * MAX_DIFFERENCE


def test_working_cache_and_transformers_cache_agree_over_several_chunks() -> None:
    engine = tiny_engine()
    assert engine.shape
    ids = ids_of_length(2 * PREFILL_CHUNK_TOKENS + 7)
    ours = engine.feed(engine.begin(KVCache(engine.shape)), ids)
    theirs = engine.feed(engine.begin(None), ids)
    assert (ours - theirs).abs().max() <= MAX_DIFFERENCE


SLIDING = [
    ("mistral", {"sliding_window": 24}),  # every layer
    ("gemma3_text", {"sliding_window": 24, "head_dim": 16}),  # sliding and full layers
    ("cohere2", {"sliding_window": 24}),
]


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the engines that were probed."""
    names: list[str] = []
    original = probe.find
    monkeypatch.setattr(probe, "find", lambda driver: names.append(driver.name) or original(driver))
    return names


@pytest.mark.skipif("glm_moe_dsa" not in CONFIG_MAPPING, reason="this transformers has no glm_moe_dsa")
def test_a_probe_of_indexers_is_remembered(probes: list[str]) -> None:
    indexed = [Engine.of(tiny_family("glm_moe_dsa"), tiny_tokenizer(), remember=True) for _ in range(2)]
    assert indexed[0].shape == indexed[1].shape and indexed[1].shape.indexed and probes == ["glm_moe_dsa"]


def test_a_probe_is_remembered_of_the_very_same_model_only(probes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, seed: int = 0, **overrides: object) -> Engine:
        model = tiny_model("gemma3_text", seed, sliding_window=24, head_dim=16, **overrides)
        return Engine.of(model, tiny_tokenizer(), name=name, remember=True)

    first, again = load("first"), load("again")
    assert probes == ["first"]
    assert again.refusal is None and again.shape == first.shape and again.shape.window == first.shape.window
    ids = ids_of_length(90)
    assert (
        handed_over(again, ids, 70, page.preset("native")) - uninterrupted(again, ids)
    ).abs().max() <= MAX_DIFFERENCE
    load("another", seed=1)
    monkeypatch.setattr(torch, "__version__", "9.9")
    load("another torch")
    assert probes == ["first", "another", "another torch"]
    for damage in ("", "[]", '{"groups": 3}', '{"groups": [[[0], 1]], "windows": []}'):
        for file in (verdicts.directory() / "probe").iterdir():
            file.write_text(damage)
        assert load("damaged").shape == first.shape
    assert probes[3:] == ["damaged"] * 4


def test_a_refusal_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", 7)
    with monkeypatch.context() as patch:
        patch.setattr(probe, "_continued", lambda *_: torch.zeros(640))
        assert Engine.of(model, tiny_tokenizer(), remember=True).refusal
    assert Engine.of(model, tiny_tokenizer(), remember=True).refusal is None


@pytest.mark.parametrize(("kind", "overrides"), SLIDING)
@pytest.mark.parametrize("shared", [12, 23, 24, 25, 100])
def test_a_handoff_is_exact_within_and_beyond_a_window(kind: str, overrides: dict, shared: int) -> None:
    engine = tiny_engine(kind, **overrides)
    assert engine.refusal is None and engine.shape and 24 in engine.shape.windows
    ids = ids_of_length(160)
    got = handed_over(engine, ids, shared, page.preset("native"))
    assert (got - uninterrupted(engine, ids)).abs().max() <= MAX_DIFFERENCE


def test_windows_count_in_the_yardstick_only_as_far_as_they_show() -> None:
    shape = tiny_engine("mistral", sliding_window=24).shape
    assert shape and shape.fp16_bytes(10) == 10 * shape.fp16_bytes(1)
    assert shape.fp16_bytes(1000) == shape.fp16_bytes(23)


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [("mistral", {"sliding_window": 4096}), ("gemma3_text", {"sliding_window": 1024, "head_dim": 16})],
)
def test_wide_windows_are_probed_as_if_they_were_short(
    kind: str, overrides: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = []
    original = Driver.read
    monkeypatch.setattr(
        Driver, "read", lambda self, run, ids, count: fed.append(len(ids)) or original(self, run, ids, count)
    )
    engine = tiny_engine(kind, max_position_embeddings=8192, **overrides)
    assert engine.refusal is None and engine.shape and max(fed) < 100
    wide = overrides["sliding_window"]
    assert max(w or 0 for w in engine.shape.windows) == wide == engine.config.sliding_window
    monkeypatch.undo()
    ids = ids_of_length(wide + 600)
    got = handed_over(engine, ids, wide + 520, page.preset("native"))
    assert (got - uninterrupted(engine, ids)).abs().max() <= MAX_DIFFERENCE


def test_a_model_whose_window_fails_is_refused_though_it_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe with a short window sees a wrong one."""
    original = cache_layers._WindowLayer.get_mask_sizes
    off = lambda self, query: (original(self, query)[0], original(self, query)[1] + 1)  # noqa: E731
    monkeypatch.setattr(cache_layers._WindowLayer, "get_mask_sizes", off)
    engine = tiny_engine("mistral", sliding_window=4096)
    assert engine.refusal and "continues differently" in engine.refusal


def test_logits_of_several_positions_are_those_of_one_after_the_other() -> None:
    engine = tiny_engine()
    assert engine.shape
    ids, kv = ids_of_length(60), KVCache(engine.shape)
    engine.feed(engine.begin(kv), ids[:40])
    at_once = engine.logits(kv, ids[40:], 5)
    assert kv.tokens == 40, "what was measured is forgotten"
    for count, logits in zip(range(56, 61), at_once, strict=True):
        assert (logits - uninterrupted(engine, ids[:count])).abs().max() <= MAX_DIFFERENCE


_SPARSE = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "index_topk": 4096, "index_n_heads": 2,
    "index_head_dim": 16,
}  # fmt: skip
_BLOCK_SPARSE = {
    "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8, "index_n_heads": 2,
    "index_head_dim": 16, "dense_intermediate_size": 64, "shared_intermediate_size": 64,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
}  # fmt: skip
REFUSED = [
    ("rwkv", {"attention_hidden_size": 48}, "can't be handed over"),
    # two index heads: a quarter of all scores is 0; which of equal ones are picked differs with what is read at once
    ("deepseek_v32", _SPARSE, "continues differently"),
    ("minimax_m3_vl_text", _BLOCK_SPARSE, "MiniMaxM3VLSparseCacheLayer"),
    ("minimax", {"head_dim": 16, "num_local_experts": 2, "layer_types": ["full_attention"] * 3}, "cache of its own"),
    # its state lives in the modules, so that it seems to continue until another conversation comes in between
    (
        "recurrent_gemma",
        {"block_types": ["recurrent", "attention"], "attention_window_size": 24},
        "continues differently|keeps no",
    ),
]


@pytest.mark.parametrize(("kind", "overrides", "reason"), REFUSED)
def test_what_can_not_be_handed_over_is_replayed_as_text(kind: str, overrides: dict, reason: str) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    engine = tiny_engine(kind, **overrides)
    assert engine.refusal is not None and re.search(reason, engine.refusal)
    ids, run = ids_of_length(150), engine.begin(None)
    engine.feed(run, ids[:100])
    engine.feed(run, ids[100:140])
    for token in ids[140:]:
        logits = engine.feed(run, [token])
    output = engine.model(input_ids=torch.tensor([ids]), use_cache=False)
    expected = output.logits[0, -1].float()
    assert (logits - expected).norm() / expected.norm() < 1e-3, "text replay must still be right"


def test_a_model_that_continues_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Driver.forward

    def forgets_positions(self: Driver, run: Run, *rest: Any) -> torch.Tensor:
        if run.kv is not None and run.tokens:
            run = Run(DynamicCache(config=self.config), None, 0)
        return original(self, run, *rest)

    monkeypatch.setattr(Driver, "forward", forgets_positions)
    refusal = tiny_engine().refusal
    assert refusal is not None and "differently" in refusal


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, 512),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, None),
        ({"rope_type": "default", "rope_theta": 1e4}, None),
    ],
)
def test_length_dependent_rope_limits_what_can_be_reused(rope: dict, limit: int | None) -> None:
    engine = tiny_engine(max_position_embeddings=512, rope_parameters=rope)
    assert engine.kv_limit_tokens == limit


def test_text_replay_beyond_the_rope_switch_equals_one_forward() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    engine = tiny_engine(max_position_embeddings=1024, rope_parameters=rope)
    engine.driver.context_tokens = 4096
    ids = ids_of_length(1500)
    got = engine.feed(engine.begin(None), ids)
    assert (got - uninterrupted(engine, ids)).abs().max() <= MAX_DIFFERENCE


def test_longrope_limit_is_the_original_length() -> None:
    factors = [1.0] * 6
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors,
        "original_max_position_embeddings": 256,
    }  # fmt: skip
    engine = tiny_engine(
        "phi3", max_position_embeddings=1024, original_max_position_embeddings=256, rope_parameters=rope
    )
    assert engine.kv_limit_tokens == 256


def test_feeding_beyond_the_context_is_refused_before_anything_is_fed() -> None:
    engine = tiny_engine(max_position_embeddings=64)
    run = engine.begin(None)
    engine.feed(run, ids_of_length(60))
    with pytest.raises(ContextOverflow, match="70 > 64"):
        engine.feed(run, ids_of_length(10))
    assert run.tokens == 60


def test_feeding_nothing_is_an_error() -> None:
    engine = tiny_engine()
    with pytest.raises(QKVShareError, match="at least one token"):
        engine.feed(engine.begin(None), [])


def test_cancelling_stops_between_chunks() -> None:
    engine = tiny_engine()
    calls: list[int] = []

    def cancelled() -> bool:
        calls.append(1)
        return len(calls) > 1

    run = engine.begin(None)
    assert engine.feed(run, ids_of_length(3 * PREFILL_CHUNK_TOKENS), cancelled) is None
    assert run.tokens == PREFILL_CHUNK_TOKENS


def test_half_precision_is_exact_enough_to_be_used() -> None:
    engine = Engine.of(tiny_model().to(torch.bfloat16), tiny_tokenizer())
    assert engine.refusal is None and engine.shape is not None and engine.shape.dtype == torch.bfloat16
    ids = ids_of_length(100)
    got = handed_over(engine, ids, 64, page.preset("native"))
    reference = uninterrupted(engine, ids)
    assert (got - reference).norm() / reference.norm() < 0.03


def test_a_template_is_required() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UnsupportedModel, match="chat template"):
        Engine.of(tiny_model(), tokenizer)
