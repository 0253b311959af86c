"""The mode and its reasons follow from the numbers alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkvshare_agents.turns.plan import Mode, plan


@pytest.mark.parametrize(
    ("settled", "matched", "mode", "reason"),
    [
        (0, 0, Mode.TEXT, "first turn: nothing was computed before"),
        (0, 20, Mode.PARTIAL, "first turn: shares only its beginning"),
        (100, 0, Mode.TEXT, "agrees with 0 of 100 tokens: from there the transcript was edited"),
        (100, 1, Mode.PARTIAL, "agrees with 1 of 100 tokens"),
        (100, 98, Mode.PARTIAL, "agrees with 98 of 100 tokens"),
        (100, 99, Mode.KV, None),
        (100, 100, Mode.KV, None),
        (100, 150, Mode.KV, None),
        (1, 1, Mode.KV, None),
        (1, 0, Mode.TEXT, "agrees with 0 of 1 tokens"),
    ],
)
def test_the_mode_and_why(settled: int, matched: int, mode: Mode, reason: str | None) -> None:
    decision = plan(settled, matched)
    assert (decision.mode, decision.reused_tokens) == (mode, matched)
    if reason is None:
        assert decision.reasons == ()
    else:
        assert len(decision.reasons) == 1 and reason in decision.reasons[0]


def test_a_refusal_is_text_replay_whatever_is_stored() -> None:
    decision = plan(100, 100, refusal="mamba has layers whose KV can't be handed over")
    assert (decision.mode, decision.reused_tokens) == (Mode.TEXT, 0)
    assert decision.reasons == ("mamba has layers whose KV can't be handed over",)


@pytest.mark.parametrize("matched", [0, 50])
def test_a_short_match_after_evictions_is_explained_by_them(matched: int) -> None:
    (reason,) = plan(100, matched, evicted_pages=7).reasons
    assert f"{matched} of 100" in reason and "7 pages were evicted so far for the byte budget" in reason


def test_evictions_explain_nothing_when_nothing_is_missing() -> None:
    assert plan(100, 100, evicted_pages=7).reasons == ()
    assert "evicted" not in plan(0, 0, evicted_pages=7).reasons[0]


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 3))
def test_only_a_full_handoff_needs_no_reason(settled: int, matched: int, evicted: int) -> None:
    decision = plan(settled, matched, evicted_pages=evicted)
    assert (decision.mode is Mode.KV) == (not decision.reasons)
    assert (decision.mode is Mode.TEXT) == (decision.reused_tokens == 0)
    assert decision.reused_tokens == matched


def test_modes_are_their_names() -> None:
    assert [str(mode) for mode in Mode] == ["KV", "PARTIAL", "TEXT"]
