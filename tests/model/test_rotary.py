"""Keys moved to other positions equal keys that were computed there, in every layer of every family."""

import pytest
import torch
from support import tiny_tokenizer

from qkvshare_agents.eval import families
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model import rope
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.model.rope import Rotary, Turn

IDS = [(11 * i + 5) % 600 for i in range(24)]
TAIL = [17, 4, 99, 250]
MOVED_BY = 100
TOLERANCE = 2e-5  # of the largest value, in float32
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}  # fmt: skip
TURNED = [
    "llama", "qwen2", "qwen3", "mistral", "gpt_neox", "phi", "phi3", "falcon", "starcoder2", "smollm3", "granite",
    "cohere", "cohere2", "olmo2", "olmo3", "glm", "glm4", "exaone4", "gemma", "gemma2", "gemma3_text", "llama4_text",
    "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "deepseek_v2",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def engine_of(family: str, **overrides: object) -> Engine:
    model = families.tiny_model(family, **overrides)
    for name, parameter in model.named_parameters():  # a norm behind the rotation would hide behind weights of one
        if "norm" in name and parameter.dim() == 1:
            with torch.no_grad():
                parameter.mul_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1)) + 0.5)
    return Engine.of(model, tiny_tokenizer(), name=family)


def read_at(engine: Engine, position: int, ids: list[int]) -> KVCache:
    """KV of `ids` that are read at `position` behind nothing."""
    run = engine.begin(KVCache(engine.shape))
    run.tokens = position
    engine.driver.read(run, ids, 1)
    return run.kv


def assert_moves_exactly(engine: Engine, by: int = MOVED_BY) -> Rotary:
    found = rope.measure(engine)
    assert found.refusal is None
    here, there = read_at(engine, 0, IDS), read_at(engine, by, IDS)
    before = [tuple(part.clone() for part in here.layer(layer)) for layer in range(engine.shape.layers)]
    found.move(here.span(0, len(IDS)), range(len(IDS)), range(by, by + len(IDS)))
    for layer in range(engine.shape.layers):
        for got, expected in zip(here.layer(layer), there.layer(layer), strict=True):
            assert (got - expected).abs().max() <= TOLERANCE * expected.abs().max(), layer
    found.move(here.span(0, len(IDS)), range(by, by + len(IDS)), range(len(IDS)))
    for layer in range(engine.shape.layers):
        for got, original in zip(here.layer(layer), before[layer], strict=True):
            assert (got - original).abs().max() <= TOLERANCE * original.abs().max()
    return found


@pytest.mark.parametrize("family", TURNED)
def test_moved_keys_are_those_of_the_new_positions_in_every_layer(family: str) -> None:
    """A text read at other positions behind nothing has the same hidden states: all layers can be compared."""
    assert_moves_exactly(engine_of(family))


@pytest.mark.parametrize("kind", ROPES)
def test_every_rope_type_moves_exactly(kind: str) -> None:
    engine = engine_of("llama", rope_parameters=ROPES[kind])
    found = assert_moves_exactly(engine)
    assert {turn.width for turn in found.layers} == {12}
    if kind == "yarn":
        assert engine.model.model.rotary_emb.attention_scaling != 1, "scaled keys: the scale must not be applied again"


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "glm4", "deepseek_v3", "gpt_oss", "smollm3"])
def test_what_follows_can_not_tell_moved_keys_from_computed_ones(family: str) -> None:
    engine = engine_of(family)
    here = read_at(engine, 0, IDS)
    run = engine.begin(here)
    expected = engine.driver.read(run, TAIL, len(TAIL))
    moved = read_at(engine, 0, IDS)
    rope.measure(engine).move(moved.span(0, len(IDS)), range(len(IDS)), range(MOVED_BY, MOVED_BY + len(IDS)))
    run = engine.begin(moved)
    run.tokens += MOVED_BY
    got = engine.driver.read(run, TAIL, len(TAIL))
    assert (got - expected).norm() <= 1e-4 * expected.norm()


def test_unmoved_keys_are_seen(family: str = "llama") -> None:
    """The comparison above can fail: without the rotation the logits are far off."""
    engine = engine_of(family)
    expected = engine.driver.read(engine.begin(read_at(engine, 0, IDS)), TAIL, len(TAIL))
    run = engine.begin(read_at(engine, 0, IDS))
    run.tokens += MOVED_BY
    assert (engine.driver.read(run, TAIL, len(TAIL)) - expected).norm() > 0.05 * expected.norm()


def test_layers_have_layouts_of_their_own() -> None:
    smollm3, llama4 = (rope.measure(engine_of(f)).layers for f in ("smollm3", "llama4_text"))
    assert [bool(turn) for turn in smollm3] == [True, True, False], "the third has no positions"
    assert None in llama4 and any(llama4)
    mixed = rope.measure(
        engine_of("gemma3_text", layer_types=["sliding_attention", "full_attention"] * 2, num_hidden_layers=4)
    ).layers
    assert mixed[0].frequencies != mixed[1].frequencies == mixed[3].frequencies, "local and global bases differ"


@pytest.mark.parametrize(
    ("family", "width", "interleaved"), [("phi", 6, False), ("gpt_neox", 4, False), ("glm", 6, True)]
)
def test_a_part_of_the_head_is_turned(family: str, width: int, interleaved: bool) -> None:
    turns = set(rope.measure(engine_of(family)).layers)
    assert {(turn.first, turn.width, turn.interleaved) for turn in turns} == {(0, width, interleaved)}


def test_latent_attention_turns_its_shared_key_only() -> None:
    turns = set(rope.measure(engine_of("deepseek_v3")).layers)
    assert {(turn.part, turn.width) for turn in turns} == {("values", 8)}


def test_alibi_needs_no_rotation() -> None:
    assert rope.measure(engine_of("bloom")) == Rotary((None,) * 3)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_learned_positions_are_refused(family: str) -> None:
    found = rope.measure(engine_of(family))
    assert "learned positions" in found.refusal and family in found.refusal


@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba", "falcon_h1"])
def test_recurrent_state_is_refused(family: str) -> None:
    assert "can't be cut" in rope.measure(engine_of(family)).refusal


def test_a_norm_behind_the_rotation_is_refused() -> None:
    """HunYuan scales keys after turning them: then they are no rotation of each other."""
    engine = engine_of("llama")
    turn = rope.measure(engine).layers[0]
    assert isinstance(turn, Turn)
    weight = torch.rand(12, generator=torch.Generator().manual_seed(2)) + 0.5
    for layer in engine.model.model.layers:
        original = layer.self_attn.forward

        def scaled(*args: object, original=original, **kwargs: object):
            cache = kwargs["past_key_values"] if "past_key_values" in kwargs else kwargs["cache"]
            update = cache.update

            def scaling(keys, values, *rest, **more):
                return update(keys * weight, values, *rest, **more)

            cache.update = scaling
            try:
                return original(*args, **kwargs)
            finally:
                cache.update = update

        layer.self_attn.forward = scaled
    assert "can't be moved" in rope.measure(engine).refusal


def test_a_token_moves_alone_and_the_others_stay() -> None:
    engine = engine_of("llama")
    found, kv = rope.measure(engine), read_at(engine, 0, IDS)
    keys = kv.layer(0)[0]
    before = keys.clone()
    old = list(range(len(IDS)))
    old[-1] = 500
    rope.move(found, kv, old)
    assert torch.equal(keys[:, :-1], before[:, :-1]) and not torch.equal(keys[:, -1], before[:, -1])


def test_half_precision_is_measured_too() -> None:
    engine = Engine.of(families.tiny_model("llama").to(torch.bfloat16), tiny_tokenizer(), name="half")
    found = rope.measure(engine)
    assert found.refusal is None and {(t.part, t.width, t.interleaved) for t in found.layers} == {("keys", 12, False)}
