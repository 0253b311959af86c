"""Whether keys are rotated is measured once per model, and the measurement is of what it says."""

import json
from pathlib import Path

import pytest
from support import tiny_engine, tiny_tokenizer

from qkvshare_agents.eval import families
from qkvshare_agents.host.host import Host
from qkvshare_agents.kv.page import PRESETS, Precision
from qkvshare_agents.model import key_calibration, verdicts
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.settings import HostSettings


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(verdicts, "directory", lambda: tmp_path / "kept")
    return tmp_path / "kept" / "keys"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Which ways were measured; plain keys look better."""
    asked: list[bool] = []

    def divergence(engine: Engine, *, rotate_keys: bool, balance: object) -> float:
        asked.append(rotate_keys)
        return 2.0 if rotate_keys else 1.0

    monkeypatch.setattr(key_calibration, "divergence", divergence)
    return asked


def test_the_better_way_is_taken_and_kept_for_the_next_load(folder: Path, measured: list[bool]) -> None:
    assert key_calibration.probed(tiny_engine())[0] is False
    assert key_calibration.probed(tiny_engine())[0] is False
    assert sorted(measured) == [False, True], "the second load measured again"
    (kept,) = folder.iterdir()
    assert json.loads(kept.read_text())["kl_rotated"] == 2.0
    assert key_calibration.probed(tiny_engine(seed=1))[0] is False
    assert len(measured) == 4, "other weights are another model"


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "{}", "null", '{"rotate_keys"', '{"rotate_keys": true}', '{"balance": null}'),
        *(f'{{"rotate_keys": true, "balance": {balance}}}' for balance in ('"00"', '"x"', "7", "[]")),
    ],
)
def test_a_damaged_verdict_is_measured_again(folder: Path, measured: list[bool], content: str) -> None:
    key_calibration.probed(tiny_engine())
    (kept,) = folder.iterdir()
    kept.write_text(content)
    assert key_calibration.probed(tiny_engine())[0] is False
    assert len(measured) == 4 and json.loads(kept.read_text())["rotate_keys"] is False


def test_a_cache_that_can_not_be_written_to_costs_only_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[bool]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(verdicts, "directory", lambda: tmp_path / "file" / "below")
    assert key_calibration.probed(tiny_engine())[0] is False


def test_the_divergence_is_measured_and_depends_on_the_rotation() -> None:
    engine = tiny_engine()
    rotated, plain = (key_calibration.divergence(engine, rotate_keys=rotate) for rotate in (True, False))
    assert 0 < rotated != plain > 0
    assert key_calibration.divergence(engine, rotate_keys=True) == rotated


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2", "qwen2", "olmo2"])
def test_a_balance_has_a_factor_for_every_channel(kind: str) -> None:
    engine = tiny_engine(kind)
    found = key_calibration.balance_of(engine)
    assert engine.shape and found
    widths = [g.heads * g.key_dim for g in engine.shape.groups for _ in g.layers]
    assert sorted(map(len, found.steps)) == sorted(widths)
    assert found == key_calibration.balance_of(engine) and len(set(b"".join(found.steps))) > 1


def test_keys_that_attention_does_not_multiply_are_not_balanced() -> None:
    engine = Engine.of(families.tiny_model("deepseek_v3"), tiny_tokenizer())  # stores a latent
    assert engine.refusal is None and key_calibration.balance_of(engine) is None
    assert key_calibration.settle(Precision(4, 4), engine).balance is None


def test_a_short_context_is_enough() -> None:
    assert key_calibration.divergence(tiny_engine(max_position_embeddings=200), rotate_keys=True) > 0


def test_a_precision_that_says_is_not_overruled(folder: Path, measured: list[bool]) -> None:
    for said in (Precision(4, 4, rotate_keys=True), PRESETS["native"]):
        assert key_calibration.settle(said, tiny_engine()) is said
    assert not measured
    assert key_calibration.settle(PRESETS["compact"], tiny_engine()) == Precision(4, 4, rotate_keys=False)


def test_a_host_settles_its_precision_while_it_loads(folder: Path, measured: list[bool]) -> None:
    host = Host(HostSettings("tiny", precision="compact"), tiny_engine())
    _ = host.engine
    assert len(measured) == 2 and host.precision.rotate_keys is False
    without = Host(HostSettings("tiny", precision="compact", handoff=False), tiny_engine(seed=3))
    _ = without.engine
    assert len(measured) == 2, "a host that hands nothing over needs no probe"


def test_the_demo_model_wants_its_keys_rotated(demo_engine: Engine, folder: Path) -> None:
    rotate, found = key_calibration.probed(demo_engine)
    assert rotate and found
    (kept,) = folder.iterdir()
    verdict = json.loads(kept.read_text())
    assert verdict["kl_plain"] > 1.1 * verdict["kl_rotated"]
