"""The comparison of ways to spend a budget: equal bytes, all policies, honest gaps."""

import json
import math

import pytest
import torch
from support import tiny_engine
from typer.testing import CliRunner

from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.eval import budget, budget_table
from qkvshare_agents.eval.team import agents_that_differ
from qkvshare_agents.kv.page import Precision

POLICIES = ["uniform", "key_value_split", "per_layer", "joint"]


@pytest.fixture(scope="module")
def result() -> dict:
    engine = tiny_engine(hidden_size=64)
    return budget.run(
        engine=engine, tokens=384, positions=32, averages=(2, 2.5, 3, 4), clones=3, problems=2, answer_tokens=6
    )


def rows(result: dict, team: str, average: float) -> dict[str, dict]:
    return {r["policy"]: r for r in result["rows"] if r["team"] == team and r["average_bits"] == average}


def test_no_policy_takes_more_bytes_than_fixed_widths(result: dict) -> None:
    for team in ("different", "clones"):
        for average, fixed in ((2, "uniform"), (2.5, "key_value_split"), (3, "uniform"), (4, "uniform")):
            found = rows(result, team, average)
            assert list(found) == POLICIES
            allowed = found[fixed]["stored_bytes"]
            for row in found.values():
                assert "skipped" in row or allowed * 0.9 < row["stored_bytes"] <= allowed * 1.001, row
    assert "skipped" in rows(result, "different", 2.5)["uniform"]
    assert "skipped" in rows(result, "different", 4)["key_value_split"]


def test_at_the_narrowest_width_there_is_nothing_to_choose(result: dict) -> None:
    found = rows(result, "different", 2)
    assert found["uniform"]["kl_by_agent"] == found["joint"]["kl_by_agent"] == found["per_layer"]["kl_by_agent"]


def test_rows_say_what_was_measured(result: dict) -> None:
    native = result["rows"][0]
    assert native["policy"] == "native" and native["mean_kl"] == pytest.approx(0, abs=1e-9) and native["top1"] == 1
    assert native["agents"] == 4 and native["average_bits"] == 32
    assert native["equal_answers"] == 2 and native["equal_prefix_tokens"] == result["header"]["answer_tokens"]
    assert 1 < native["perplexity"] and len(result["header"]["load"]) == 2
    found = rows(result, "different", 3)
    for row in found.values():
        assert row["mean_kl"] > 0 and 0 < row["top1"] <= 1
        assert 0 <= row["equal_answers"] <= 2 and 0 <= row["equal_prefix_tokens"] <= native["equal_prefix_tokens"]
        assert row["perplexity"] == pytest.approx(native["perplexity"], rel=0.5)
        assert row["perplexity"] != native["perplexity"]
        assert min(row[name] for name in ("tokens_per_s", "native_tokens_per_s")) > 0
        assert row["stored_bytes"] < row["peak_kv_bytes"] < row["opened_peak_kv_bytes"] < native["peak_kv_bytes"]
        assert set(row["kl_by_agent"]) == {"prose", "code", "chat", "retrieval"}
    clones = rows(result, "clones", 3)["joint"]
    assert clones["agents"] == 3 and clones["equal_answers"] is None
    json.dumps(result)


def test_wider_codes_diverge_less(result: dict) -> None:
    for team in ("different", "clones"):
        kls = [rows(result, team, average)["uniform"]["mean_kl"] for average in (2, 3, 4)]
        assert kls == sorted(kls, reverse=True)


def test_the_table_and_the_picture(result: dict, tmp_path, capsys) -> None:
    budget_table.show(result)
    shown = capsys.readouterr().out
    assert "joint" in shown and "4 agents (different)" in shown and "3 agents (clones)" in shown
    path = tmp_path / "budget.png"
    budget_table.draw(result, str(path))
    assert path.stat().st_size > 10_000
    with pytest.raises(InvalidSetting, match="no plot"):
        budget_table.draw(result, str(tmp_path / "budget.nonsense"))


def test_what_can_not_be_measured_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="2 to 8"):
        budget.run(engine=tiny_engine(), averages=(1.0,))
    with pytest.raises(InvalidSetting, match="attention of 0 of 3 layers"):
        budget.run(engine=tiny_engine("bloom"), tokens=384, positions=16)


def test_the_command_is_there() -> None:
    from qkvshare_agents.cli.app import app

    assert "--average" in CliRunner().invoke(app, ["eval", "budget", "--help"]).output


def test_answers_are_the_models_own_and_are_compared_to_their_first_difference() -> None:
    """Against greedy decoding behind the native cache, and behind another one that is known to differ."""
    engine = tiny_engine(hidden_size=64)
    agent = next(a for a in agents_that_differ(engine, 320, 16, 2) if a.name == "code")
    read = budget._read(engine, agent, Precision(rotate_keys=True), 5)
    blocks = [block for block in read.blocks if block.kind == "code"]
    assert len(blocks) == 2
    for block, asked in zip(blocks, agent.problems, strict=True):
        run, answer = engine.begin(read.kv), list[int]()
        logits = engine.feed(run, asked)
        for _ in block.targets:
            answer.append(int(logits.argmax()))
            logits = engine.feed(run, answer[-1:])
        read.kv.crop(320)
        assert tuple(answer) == block.targets
    changed = [reference.clone() for reference in read.references]
    changed[-1][1] = -changed[-1][1]  # another second token in the second answer
    got = budget._mean([budget._outcome(read, changed)])
    assert got["equal_answers"] == 1 and got["equal_prefix_tokens"] == (len(blocks[0].targets) + 1) / 2
    rest = agent.blocks[0]
    loss = torch.nn.functional.cross_entropy(read.references[0], torch.tensor(rest.targets))
    assert got["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


def test_windows_are_counted_as_hosts_hold_them() -> None:
    """Native KV of what a window shows only, and no history that stays packed: hosts have none for such models."""
    engine = tiny_engine("gemma3_text", sliding_window=100)
    found = budget.run(engine=engine, tokens=256, positions=16, averages=(3,), problems=0)
    native, joint = (next(r for r in found["rows"] if r["policy"] == policy) for policy in ("native", "joint"))
    whole = engine.shape.values_per_token * 4 * (256 * 3 + 512)
    assert native["stored_bytes"] < 0.8 * whole
    assert joint["stored_bytes"] < joint["peak_kv_bytes"] == joint["opened_peak_kv_bytes"]
    assert native["equal_answers"] is None and found["header"]["answer_tokens"] is None
