"""Whatever changes the KV changes the fingerprint, by name; what does not, does not."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from support import CHATML, tiny_engine, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from qkvshare_agents.model.engine import Engine
from qkvshare_agents.model.fingerprint import Fingerprint, hash_config, hash_weights


def differences(engine: Engine) -> list[str]:
    """What differs between a plain tiny engine and this one."""
    found = tiny_engine().fingerprint.differences(engine.fingerprint)
    assert (engine.fingerprint.digest == tiny_engine().fingerprint.digest) == (not found)
    return found


def test_equal_models_have_equal_fingerprints() -> None:
    assert differences(tiny_engine()) == []


@pytest.mark.parametrize("name", sorted(tiny_model().state_dict()))
def test_any_changed_weight_differs(name: str) -> None:
    """One value of one tensor, by the smallest step: a fine-tune may touch any of them."""
    model = tiny_model()
    with torch.no_grad():
        values = model.state_dict()[name].view(-1)
        values[-1] = torch.nextafter(values[-1], torch.tensor(torch.inf))
    assert differences(Engine.of(model, tiny_tokenizer())) == ["weights"]


def test_a_changed_buffer_differs() -> None:
    def buffered(value: float) -> PreTrainedModel:
        model = tiny_model()
        model.model.register_buffer("gate", torch.tensor([value]))
        return model

    first, same, other = (hash_weights(buffered(value).state_dict().items()) for value in (1.0, 1.0, 1.5))
    assert first == same != other


def test_another_dtype_differs() -> None:
    assert differences(Engine.of(tiny_model().to(torch.bfloat16), tiny_tokenizer())) == ["weights", "dtype"]


def test_other_random_weights_differ() -> None:
    assert differences(tiny_engine(seed=1)) == ["weights"]


@pytest.mark.parametrize(
    "overrides",
    [
        {"rms_norm_eps": 1e-5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"max_position_embeddings": 2048},
        {"hidden_act": "gelu"},
        {"a_future_setting": True},
    ],
    ids=lambda overrides: next(iter(overrides)),
)
def test_any_config_entry_that_computes_differs(overrides: dict[str, object]) -> None:
    assert differences(tiny_engine(**overrides)) == ["architecture"]


def test_another_family_differs() -> None:
    assert "architecture" in differences(tiny_engine("qwen2"))


@pytest.mark.parametrize("special", [True, False])
def test_a_tokenizer_with_one_more_token_differs(special: bool) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<extra>"], special_tokens=special)
    assert differences(Engine.of(tiny_model(), tokenizer)) == ["tokenizer"]


def test_another_chat_template_differs() -> None:
    template = CHATML.replace("<|im_end|>\n", "<|im_end|>")
    assert template != CHATML
    assert differences(tiny_engine(template=template)) == ["chat_template"]


def test_names_paths_and_ways_of_running_do_not_matter(tmp_path: Path) -> None:
    model = tiny_model()
    model.config._name_or_path = "/somewhere/else"
    model.config.use_cache = False
    model.config.id2label = {0: "yes", 1: "no", 2: "maybe"}
    assert differences(Engine.of(model, tiny_tokenizer(), name="another name")) == []
    tiny_model().save_pretrained(tmp_path / "copy")
    for attention in ("sdpa", "eager"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", attn_implementation=attention)
        assert differences(Engine.of(loaded, tiny_tokenizer())) == [], attention


def test_tokenizer_switches_for_one_call_do_not_matter() -> None:
    engine = tiny_engine()
    before = engine.fingerprint
    engine.tokenizer("some text", add_special_tokens=False)
    assert engine.fingerprint is before, "it is not taken again for nothing"


def add_to_weight(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.add_(0.01)


def replace_weight(model: PreTrainedModel) -> None:
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach() + 0.01)


def train_one_step(model: PreTrainedModel) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("change", [add_to_weight, replace_weight, train_one_step])
def test_an_engine_takes_its_fingerprint_again_after_its_weights_changed(
    change: Callable[[PreTrainedModel], None],
) -> None:
    engine = tiny_engine()
    before = engine.fingerprint
    assert engine.fingerprint is before
    change(engine.model)
    assert before.differences(engine.fingerprint) == ["weights"]


def test_every_aspect_counts_and_is_named() -> None:
    base = Fingerprint(*(f.name for f in fields(Fingerprint)))
    for f in fields(Fingerprint):
        other = replace(base, **{f.name: "something else"})
        assert base.differences(other) == other.differences(base) == [f.name]
        assert base.digest != other.digest
    assert base.differences(base) == []
    swapped = replace(base, weights=base.dtype, dtype=base.weights)
    assert base.digest != swapped.digest


def test_weights_are_hashed_with_name_type_and_shape_in_any_order() -> None:
    a, b = torch.zeros(2, 3), torch.ones(6)
    base = hash_weights([("a", a), ("b", b)])
    assert base == hash_weights([("b", b), ("a", a)]) == hash_weights([("a", a.T.contiguous().T), ("b", b.clone())])
    for other in (
        [("a", b), ("b", a)],
        [("a", a), ("c", b)],
        [("a", a)],
        [("a", a.reshape(3, 2)), ("b", b)],
        [("a", a.to(torch.int32)), ("b", b)],  # the same bytes
    ):
        assert hash_weights(other) != base


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5, 3)])
def test_tensors_of_every_type_and_shape_can_be_hashed(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    first, second = (hash_weights([("x", torch.zeros(shape, dtype=dtype))]) for _ in range(2))
    assert first == second


def test_strided_weights_are_hashed_by_their_values() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    assert hash_weights([("x", x[:, ::2])]) == hash_weights([("x", x[:, ::2].clone())])
    assert hash_weights([("x", x[:, ::2])]) != hash_weights([("x", x[:, 1::2])])


def test_config_order_does_not_matter() -> None:
    assert hash_config({"a": 1, "b": {"c": 2, "d": 3}}) == hash_config({"b": {"d": 3, "c": 2}, "a": 1})
    assert hash_config({"a": 1}) != hash_config({"a": 2}) != hash_config({"b": 2})


def test_a_write_through_data_is_noticed() -> None:
    """Merging a LoRA adapter writes to `.data`, which moves no version counter."""
    engine = tiny_engine()
    before = engine.fingerprint
    engine.model.model.layers[1].self_attn.q_proj.weight.data += 0.01
    assert engine.fingerprint.differences(before) == ["weights"]
