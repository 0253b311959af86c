"""Evaluations of cutting and splicing: shape of the results, and what must hold on any model."""

import json

import pytest
from support import tiny_engine, tiny_tokenizer
from typer.testing import CliRunner

from qkvshare_agents.cli import app
from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.eval import families, fitting, splice
from qkvshare_agents.model.engine import Engine


def by_method(result: dict) -> dict[str, dict]:
    return {row["method"]: row for row in result["rows"]}


def test_cutting_is_compared_with_keeping_everything() -> None:
    result = fitting.run(engine=tiny_engine(), tokens=256, keep=128, samples=3, positions=8)
    rows = by_method(result)
    assert {"drop_head", "drop_least_attended", "cut_text", "drop_head, no sinks", "header only"} <= rows.keys()
    for row in rows.values():
        assert row["positions"] == 24 and row["mean_kl"] > 0 and 0 <= row["top1"] <= 1 and len(row["text_kl"]) == 3
    assert rows["drop_head"]["read_tokens"] == 0 and rows["cut_text"]["read_tokens"] == 128
    assert rows["drop_head"]["mean_kl"] < rows["header only"]["mean_kl"]
    assert rows["drop_head"]["mean_kl"] < rows["cut_text"]["mean_kl"], "kept KV has seen what was dropped"
    assert rows["drop_head, 8 bits"]["mean_kl"] == pytest.approx(rows["drop_head"]["mean_kl"], rel=0.1)
    json.dumps(result)


def test_splicing_is_compared_with_reading_anew() -> None:
    result = splice.run(engine=tiny_engine(), tokens=128, samples=3, positions=8)
    rows = by_method(result)
    assert rows["read anew"]["mean_kl"] < 1e-9, "the reference itself"
    assert rows["read anew"]["mean_kl"] < rows["spliced, 64 computed anew"]["mean_kl"]
    assert rows["spliced, 64 computed anew"]["mean_kl"] < rows["spliced, 0 computed anew"]["mean_kl"]
    assert rows["spliced, 16 computed anew"]["mean_kl"] < rows["spliced, not turned"]["mean_kl"]
    assert rows["spliced, 16 computed anew"]["mean_kl"] < rows["without the text"]["mean_kl"]


@pytest.mark.parametrize("module", [fitting, splice])
def test_what_can_not_be_moved_is_refused(module) -> None:
    engine = Engine.of(families.tiny_model("gpt2"), tiny_tokenizer(), name="tiny-gpt2")
    with pytest.raises(InvalidSetting, match="learned positions"):
        module.run(engine=engine)
    with pytest.raises(InvalidSetting, match="need"):
        module.run(engine=tiny_engine(max_position_embeddings=128))


def test_the_commands_are_there() -> None:
    for name in ("fitting", "splice"):
        assert CliRunner().invoke(app.app, ["eval", name, "--help"]).exit_code == 0
