"""Measurements of drift and canaries, on tiny models: the shape of the results, and what must hold on any model."""

import json

import pytest
from support import tiny_engine, tiny_tokenizer
from typer.testing import CliRunner

from qkvshare_agents.cli import app
from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.eval import canary, families, hops
from qkvshare_agents.model.engine import Engine

PRESETS = ["safe", "compact", "small", "tiny"]


@pytest.fixture(scope="module")
def curve() -> dict:
    return hops.run(engine=tiny_engine(), texts=1, hops=(1, 2, 5), segment=80, refresh_every=2)


def of(result: dict, scheme: str) -> dict[int, float]:
    return {row["hops"]: row["mean_kl"] for row in result["rows"] if row["scheme"] == scheme}


def test_every_scheme_has_every_number_of_hops(curve: dict) -> None:
    refreshed = [f"{name}, refresh_every=2" for name in PRESETS]
    schemes = [*PRESETS, *refreshed, hops.STRAWMAN, f"{hops.STRAWMAN}, safe"]
    assert [(r["scheme"], r["hops"]) for r in curve["rows"]] == [(s, n) for s in schemes for n in (1, 2, 5)]
    assert all(r["mean_kl"] > 0 and 0 <= r["top1"] <= 1 for r in curve["rows"])
    assert curve["header"]["positions"] == 80 and curve["header"]["cached_tokens"] == 400
    assert json.loads(json.dumps(curve)) == curve


def test_one_hop_is_one_hop_whoever_re_encodes_later(curve: dict) -> None:
    assert of(curve, hops.STRAWMAN)[1] == of(curve, "compact")[1]
    assert of(curve, f"{hops.STRAWMAN}, safe")[1] == of(curve, "safe")[1]
    assert of(curve, f"{hops.STRAWMAN}, safe")[5] > of(curve, "safe")[5]


def test_refresh_starts_over(curve: dict) -> None:
    """Up to the refresh nothing differs; 5 hops are refreshed behind the second and the fourth."""
    for name in PRESETS:
        plain, fresh = of(curve, name), of(curve, f"{name}, refresh_every=2")
        assert (fresh[1], fresh[2]) == (plain[1], plain[2])
        assert fresh[5] == pytest.approx(plain[1], rel=1e-3)


def test_a_context_too_short_for_the_hops_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="context of 510 tokens"):
        hops.run(engine=tiny_engine(max_position_embeddings=400), texts=1, hops=(16,), segment=30)
    with pytest.raises(InvalidSetting, match="at least 1"):
        hops.run(engine=tiny_engine(), hops=())
    for measure in (hops, canary):
        with pytest.raises(InvalidSetting, match="can't hand plain KV over"):
            measure.run(engine=Engine.of(families.tiny_model("mamba"), tiny_tokenizer()))


def test_the_curve_is_shown_and_drawn(curve: dict, tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra `plot`")
    from qkvshare_agents.eval import plot

    hops.show(curve)
    told = capsys.readouterr().out
    assert "reencode_each_hop, safe" in told and "5 hops" in told and "last / first" in told
    plot.save(hops.picture(curve), str(tmp_path / "hops.svg"))
    assert "refresh_every=2" in (tmp_path / "hops.svg").read_text()


def test_canaries_tell_right_from_wrong(capsys) -> None:
    result = canary.run(engine=tiny_engine(), conversations=2, answer_tokens=20)
    rows = {(row["preset"], row["kind"]): row for row in result["rows"]}
    assert len(rows) == 2 * 12
    for (_, kind), row in rows.items():
        assert row["count"] == {"right": 32, "coarse": 2}.get(kind, 4)
        if kind not in canary.FAINT:
            assert row["alarms"] == (0 if kind in ("right", "coarse") else 4), kind
    canary.show(result)
    assert "one comparison of 4 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(("command", "module"), [("hops", hops), ("canary", canary)])
def test_the_commands_print_json(command: str, module, monkeypatch) -> None:
    asked: dict[str, object] = {}
    monkeypatch.setattr(module, "run", lambda **options: asked.update(options) or {"header": {}, "rows": []})
    done = CliRunner().invoke(app.app, ["eval", command, "--json", "--model", "m"])
    assert json.loads(done.stdout) == {"header": {}, "rows": []} and asked["model"] == "m"
    if command == "hops":
        assert asked["hops"] == [1, 2, 4, 8, 16]
