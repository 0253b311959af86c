"""The benchmark of a growing conversation: what it counts, and that handoff keeps it linear."""

import json

import pytest
from support import tiny_engine

from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.eval import conversation


def test_each_token_is_computed_at_most_twice_where_replay_is_quadratic(capsys) -> None:
    result = conversation.run(model="tiny", tokens=40, answer_tokens=16, preset="native", engine=tiny_engine())
    rows = result["turns"]
    assert [row["agent"] for row in rows] == ["agent1", "agent2", "agent3"] * 2
    assert [row["turn"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert row["prefilled_tokens"] + row["reused_tokens"] == row["replay_prefilled_tokens"]
        assert row["replay_prefilled_tokens"] < row["conversation_tokens"]
    later = [row["prefilled_tokens"] for row in rows[1:]]
    assert max(later) <= 2 * min(later), "what a turn reads does not grow"
    replayed = [row["replay_prefilled_tokens"] for row in rows]
    assert replayed == sorted(replayed) and replayed[-1] > 3 * later[-1]
    assert 1 <= result["computed_per_token"] <= 2
    assert json.loads(json.dumps(result)) == result
    conversation.show(result)
    shown = capsys.readouterr().out
    assert "agent3" in shown and f"computed {result['computed_per_token']:.2f} times" in shown


def test_sizes_are_checked() -> None:
    with pytest.raises(InvalidSetting, match="at least 1"):
        conversation.run(turns=0, engine=tiny_engine())
