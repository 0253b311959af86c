"""transformers' `generate` says what our own loop says, on the same KV, and leaves KV that the next turn can use."""

import threading
from typing import Any

import pytest
import torch
from support import of_words, tiny_model, tiny_tokenizer

from qkvshare_agents import Host, HostSettings, Sampling, Turn
from qkvshare_agents.errors import Cancelled, InvalidSetting, UnsupportedModel
from qkvshare_agents.eval import families
from qkvshare_agents.model import decoding
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.prompt.layout import Message
from qkvshare_agents.prompt.members import Member

TASK = Message("user", "Say something long enough to fill a page or two of the cache, please, and then more.", "user")
FAMILIES = ["llama", "gpt2", "gemma3_text", "deepseek_v3", "gemma3n_text", "qwen3_next", "falcon_h1", "mamba2", "mamba"]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "lookup", "description": "Look up.", "parameters": SCHEMA}}


def model_of(family: str, *, static: bool = False) -> Any:
    model = of_words(families.tiny_model(family))
    if static:
        model.generation_config.cache_implementation = "static"
    # What these would do to an answer is none of our settings
    model.generation_config.update(repetition_penalty=5.0, do_sample=True, max_length=3, eos_token_id=[7, 9])
    return model


def engine_of(family: str, *, static: bool = False) -> Engine:
    engine = Engine.of(model_of(family, static=static), tiny_tokenizer(), name=family)
    engine.stop_ids = frozenset({2})
    return engine


def turn(speaker: str, *messages: Message, **fields: Any) -> Turn:
    sampling = fields.pop("sampling", Sampling(max_tokens=70))
    return Turn(Member(speaker, speaker, f"You are {speaker}."), "", messages, sampling, **fields)


def talk(engine: Engine, how: str, **fields: Any) -> list[tuple[Any, ...]]:
    """Three turns of two agents: what they said, how it ended, the pieces, and how much KV was reused."""
    settings = fields.pop("settings", {})
    host = Host(HostSettings("tiny", decoding=how, **{"precision": "native", **settings}), engine)
    messages, found = [TASK], []
    try:
        for speaker in "aba":
            pieces: list[str] = []
            answer = host.submit(turn(speaker, *messages, **fields), on_text=pieces.append).result()
            messages.append(Message("assistant", answer.text or "nothing", speaker))
            report, calls = answer.report, [(call.name, call.arguments) for call in answer.calls]
            found.append((answer.text, calls, answer.finish_reason, pieces, report.reused_tokens, report.mode))
    finally:
        host.close()
    return found


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens `generate` was asked for, call by call."""
    calls: list[int] = []
    original = decoding.by_generate
    monkeypatch.setattr(decoding, "by_generate", lambda *args: calls.append(args[3]) or original(*args))
    return calls


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_says_what_the_loop_says(family: str, generated: list[int]) -> None:
    by_loop = talk(engine_of(family), "loop")
    assert not generated
    assert talk(engine_of(family), "generate") == by_loop
    assert generated[1:] == [69, 69, 69], "one probe, three turns"
    assert by_loop[2][4] > 64, "the third turn continues from KV that the second one left"


WAYS: dict[str, dict[str, Any]] = {
    "sampling": {"sampling": Sampling(temperature=1.5, top_p=0.9, top_k=50, seed=3, max_tokens=60)},
    "penalty": {"sampling": Sampling(repetition_penalty=1.7, max_tokens=60)},
    "stop": {"sampling": Sampling(temperature=2.0, seed=1, stop=("a", "e"), max_tokens=60)},
    "one token": {"sampling": Sampling(max_tokens=1)},
    "two tokens": {"sampling": Sampling(max_tokens=2)},
    "schema": {"schema": SCHEMA},
    "tools": {"tools": (TOOL,), "must_call": True},
    "packed history": {"settings": {"packed_history": True, "precision": "safe"}},
    "safe": {"settings": {"precision": "safe"}},
    "cut": {"settings": {"context_tokens": 240}},
}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_sampling_grammars_tools_and_stops_are_the_same(way: str, static: bool) -> None:
    if way in ("schema", "tools"):
        pytest.importorskip("llguidance", reason="llguidance is not installed (extra autogen or langgraph)")
    by_loop = talk(engine_of("llama"), "loop", **WAYS[way])
    assert talk(engine_of("llama", static=static), "generate", **WAYS[way]) == by_loop


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "deepseek_v3", "gemma3_text", "qwen3_next"])
def test_a_static_cache_is_filled_from_pages_and_read_back(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = decoding.static_over
    monkeypatch.setattr(decoding, "static_over", lambda kv, config: made.append(kv.tokens) or original(kv, config))
    by_loop = talk(engine_of(family), "loop")
    assert talk(engine_of(family, static=True), "generate") == by_loop
    plain = family not in ("gemma3_text", "qwen3_next")  # windows and recurrent state keep caches of their own kinds
    assert len(made) == (4 if plain else 0)
    assert made[1:] == sorted(made[1:])


def test_cancelling_ends_generate_between_two_tokens() -> None:
    host, stop = (
        Host(HostSettings("tiny", decoding="generate", precision="native"), engine_of("llama")),
        threading.Event(),
    )
    pieces: list[str] = []

    def hear(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 5:
            stop.set()

    try:
        with pytest.raises(Cancelled, match=r"after [56] tokens"):
            host.submit(turn("a", TASK, sampling=Sampling(max_tokens=None)), on_text=hear, cancelled=stop).result()
        assert len(pieces) <= 6
        assert host.submit(turn("a", TASK)).result().text == talk(engine_of("llama"), "loop")[0][0]
    finally:
        host.close()


def test_the_models_own_generation_settings_stay_as_they_were() -> None:
    engine = engine_of("llama", static=True)
    before = engine.model.generation_config
    talk(engine, "generate")
    assert engine.model.generation_config is before and before.cache_implementation == "static"


@pytest.mark.parametrize("kind", ["rwkv", "minimax"])
def test_a_model_whose_cache_only_it_can_fill_reads_its_text_once(kind: str) -> None:
    sizes = {"rwkv": {"attention_hidden_size": 48}}.get(
        kind, {"head_dim": 16, "num_local_experts": 2, "layer_types": ["full_attention"] * 3}
    )
    calls: list[int] = []

    def engine() -> Engine:
        made = Engine.of(tiny_model(kind, **sizes), tiny_tokenizer())
        made.stop_ids = frozenset({2})
        made.model.register_forward_pre_hook(
            lambda _, args, kwargs: calls.append((args[0] if args else kwargs["input_ids"]).shape[1]), with_kwargs=True
        )
        return made

    first = engine()
    assert first.refusal and first.feeding == "whole"
    by_loop = talk(first, "loop")
    read_by_loop = sum(calls)
    calls.clear()
    assert talk(engine(), "auto") == by_loop
    assert sum(calls) < read_by_loop / 10, "the loop reads everything for every token"


def test_generate_that_says_something_else_is_refused_when_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("llama")
    original = type(engine.model).prepare_inputs_for_generation

    def forgetful(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        prepared = original(self, input_ids, **kwargs)
        prepared["position_ids"] = torch.zeros_like(prepared["input_ids"])
        return prepared

    monkeypatch.setattr(type(engine.model), "prepare_inputs_for_generation", forgetful)
    with pytest.raises(UnsupportedModel, match="off those of our own loop"):
        decoding.chosen("generate", engine)
    assert decoding.chosen("auto", engine) is decoding.by_loop
    with pytest.raises(InvalidSetting, match='"auto", "loop" or "generate"'):
        HostSettings("tiny", decoding="beam")
