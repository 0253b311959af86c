"""KV of one model as another's: better than no KV, honest about how much, and only between models that share ids."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from courier_child import TASK, turn
from safetensors.torch import save_file
from support import tiny_engine, tiny_model, tiny_tokenizer

from qkvshare_agents.errors import InvalidSetting, PackageError, UnsupportedModel
from qkvshare_agents.host.courier import Courier
from qkvshare_agents.host.host import Host
from qkvshare_agents.ids import Ids
from qkvshare_agents.model import projector
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.model.projector import Projector
from qkvshare_agents.prompt.layout import Message
from qkvshare_agents.settings import HostSettings
from qkvshare_agents.transport.local import LocalTransport
from qkvshare_agents.turns.report import Arrival


def texts(seed: int, count: int, tokens: int = 160) -> list[Ids]:
    """Random ids that repeat, so that a context says something about what follows."""
    made = torch.Generator().manual_seed(seed)
    halves = [torch.randint(3, 600, (tokens // 4,), generator=made).tolist() for _ in range(count)]
    return [tuple(half * 4) for half in halves]


def without_layer(layer: int) -> Engine:
    """The same weights, one layer less."""
    whole, less = tiny_model(num_hidden_layers=4), tiny_model(num_hidden_layers=3)
    kept = [block for index, block in enumerate(whole.model.layers) if index != layer]
    for ours, theirs in zip(less.model.layers, kept, strict=True):
        ours.load_state_dict(theirs.state_dict())
    for part in ("embed_tokens", "norm"):
        getattr(less.model, part).load_state_dict(getattr(whole.model, part).state_dict())
    less.lm_head.load_state_dict(whole.lm_head.state_dict())
    return Engine.of(less, tiny_tokenizer(), name="less")


@pytest.fixture(scope="module")
def made() -> Projector:
    return projector.fit(tiny_engine(num_hidden_layers=4), without_layer(2), texts(0, 16), texts(1, 4))


def test_it_is_better_than_no_context(made: Projector) -> None:
    assert made.quality.tokens == 4 * 80
    assert made.quality.mean_kl < made.quality.mean_kl_without / 4
    assert len(made.target_groups[0].layers) == 3 and all(made.layers)


def test_a_model_onto_itself_is_nearly_exact() -> None:
    engine = tiny_engine()
    same = projector.fit(engine, engine, texts(0, 16), texts(1, 2))
    assert same.quality.mean_kl < 1e-3 * same.quality.mean_kl_without and same.quality.top1 > 0.97


def test_what_it_says_of_its_quality_holds_again(made: Projector) -> None:
    """Measured anew, through `fill`, on the same held-out texts."""
    source, target = tiny_engine(num_hidden_layers=4), without_layer(2)
    again = projector.measured(made, source, target, texts(1, 4))
    assert again.mean_kl == pytest.approx(made.quality.mean_kl, rel=1e-3)


def test_the_first_tokens_are_read(made: Projector) -> None:
    source, target = tiny_engine(num_hidden_layers=4), without_layer(2)
    ids = texts(2, 1)[0]
    filled = made.fill(target, ids, projector._filled(source, ids).span(0, len(ids)))
    truth, found = projector._filled(target, ids).span(0, len(ids)).blocks[0], filled.span(0, len(ids)).blocks[0]
    for true, ours in ((truth.keys, found.keys), (truth.values, found.values)):
        torch.testing.assert_close(ours[:, :, : made.read_tokens], true[:, :, : made.read_tokens])
        assert not torch.equal(ours[:, :, made.read_tokens :], true[:, :, made.read_tokens :])
    short = ids[: made.read_tokens - 2]
    assert made.fill(target, short, projector._filled(source, short).span(0, len(short))).tokens == len(short)


def test_what_was_saved_is_loaded(made: Projector, tmp_path: Path) -> None:
    made.save(tmp_path / "a.safetensors")
    again = projector.load(tmp_path / "a.safetensors")
    assert replace(again, weights=()) == replace(made, weights=())
    for ours, theirs in zip(again.weights, made.weights, strict=True):
        assert torch.equal(ours, theirs)


def _said(path: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["projector"]), {key: file.get_tensor(key) for key in file.keys()}


def _no_layer(said: dict, tensors: dict) -> None:
    del tensors["2"]


def _other_layer(said: dict, tensors: dict) -> None:
    said["layers"][0] = [0, 99]


def _other_shape(said: dict, tensors: dict) -> None:
    tensors["0"] = tensors["0"][:-1].contiguous()


def _nan(said: dict, tensors: dict) -> None:
    tensors["1"][3, 3] = float("nan")


def _no_rotary(said: dict, tensors: dict) -> None:
    said["source_rotary"] = []


def _words(said: dict, tensors: dict) -> None:
    said["target_groups"] = "shape"


def _name(said: dict, tensors: dict) -> None:
    tensors["x"] = tensors.pop("1")


@pytest.mark.parametrize("damage", [_no_layer, _other_layer, _other_shape, _nan, _no_rotary, _words, _name])
def test_damaged_files_are_refused(made: Projector, tmp_path: Path, damage) -> None:
    made.save(tmp_path / "a.safetensors")
    said, tensors = _said(tmp_path / "a.safetensors")
    damage(said, tensors)
    save_file(tensors, tmp_path / "b.safetensors", {"format": "qkvshare-projector-1", "projector": json.dumps(said)})
    with pytest.raises(PackageError, match="can't be read as a projector"):
        projector.load(tmp_path / "b.safetensors")


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    save_file({"0": torch.zeros(1)}, tmp_path / "other.safetensors")
    (tmp_path / "text").write_text("no")
    for name in ("other.safetensors", "text", "absent"):
        with pytest.raises(PackageError, match="projector"):
            projector.load(tmp_path / name)


@pytest.fixture
def file(made: Projector, tmp_path: Path) -> str:
    made.save(tmp_path / "made.safetensors")
    return str(tmp_path / "made.safetensors")


def host(engine: Engine, **settings: object) -> Host:
    made = Host(HostSettings("tiny", **{"precision": "native", "measure_replay": True, **settings}), engine)
    for name in "ab":
        made.roster.learn("", name, f"You are {name}, and you say what {name} says.")
    return made


def hand_over(a: Host, b: Host) -> tuple[Message, Arrival]:
    said = Message("assistant", a.submit(turn(a, "a", TASK)).result().text, "a")
    transport = LocalTransport()
    sent = Courier(a, transport).send(turn(a, "b", TASK, said))
    return said, Courier(b, transport).receive(sent.key)


def test_a_handoff_between_two_models(file: str) -> None:
    a, b = host(tiny_engine(num_hidden_layers=4)), host(without_layer(2), projectors=[file])
    said, arrival = hand_over(a, b)
    assert arrival.reasons == () and arrival.canary_nats is not None
    first = turn(b, "b", TASK, said)
    assert b.store.match(b.prompt(first).ids).tokens == 0, "an approximation lies where exact KV is looked for"
    answer = b.submit(first).result()
    report = answer.report
    assert report.mode.value == "PARTIAL" and "projected from another model's KV" in report.reasons[0]
    assert report.reused_tokens > 64 and report.replay_kl is not None and 0 < report.replay_kl < 1
    b.submit(turn(b, "a", TASK, said, Message("assistant", answer.text, "b"))).result()
    again = b.reports[-1]
    assert again.mode.value == "PARTIAL" and again.reused_tokens > report.reused_tokens
    assert "projected" in again.reasons[0]


def test_without_a_projector_for_this_pair_it_is_text(file: str) -> None:
    a, b = host(tiny_engine(num_hidden_layers=4)), host(without_layer(2))
    said, arrival = hand_over(a, b)
    assert "of another model" in arrival.reasons[0]
    b.submit(turn(b, "b", TASK, said, arrival=arrival)).result()
    assert b.reports[0].mode.value == "TEXT"
    other = host(tiny_engine(num_hidden_layers=4, seed=3))
    _, arrival = hand_over(other, host(without_layer(2), projectors=[file]))
    assert "of another model" in arrival.reasons[0]


def test_what_does_not_say_what_the_other_model_said_is_not_used(file: str) -> None:
    a, b = host(tiny_engine(num_hidden_layers=4)), host(without_layer(2), projectors=[file], canary_limit=1e-6)
    said, arrival = hand_over(a, b)
    assert arrival.alarmed and "not used" in arrival.reasons[0]
    b.submit(turn(b, "b", TASK, said, arrival=arrival)).result()
    assert b.reports[0].mode.value == "TEXT" and b.reports[0].reused_tokens == 0


def test_a_projector_to_another_model_is_an_error(file: str) -> None:
    with pytest.raises(InvalidSetting, match="leads to another model"):
        _ = host(tiny_engine(), projectors=[file]).engine


def test_models_that_can_not_be_projected() -> None:
    with pytest.raises(UnsupportedModel, match="tokenizers differ"):
        other = Engine.of(tiny_model(), tiny_tokenizer(special=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<x>"]))
        projector.fit(tiny_engine(), other, texts(0, 1), texts(1, 1))
    with pytest.raises(UnsupportedModel, match="gpt2"):
        projector.fit(tiny_engine("gpt2"), tiny_engine(), texts(0, 1), texts(1, 1))
