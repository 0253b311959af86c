"""KV, PARTIAL or TEXT, and why: a pure function of what was found."""

from dataclasses import dataclass
from enum import StrEnum
from math import ceil


class Mode(StrEnum):
    """How an agent got its context. KV: everything that earlier turns computed was handed over. PARTIAL: a
    part of it. TEXT: all of it was read again."""

    KV = "KV"
    PARTIAL = "PARTIAL"
    TEXT = "TEXT"


@dataclass(frozen=True)
class Plan:
    """mode, the number of leading tokens whose KV is used, and the reasons in words."""

    mode: Mode
    reused_tokens: int
    reasons: tuple[str, ...]


def plan(
    settled_tokens: int,
    matched_tokens: int,
    *,
    refusal: str | None = None,
    evicted_pages: int = 0,
    withheld: str = "",
    stateless_tokens: int = 0,
) -> Plan:
    """Decide for a prompt of which `matched_tokens` leading ids have stored KV.

    refusal: why this model's KV can't be handed over at all. settled_tokens: ids before the newest user turn.
    evicted_pages: pages that the store has dropped for its budget, to explain a short match. withheld: why KV that
    others have of further tokens is not read, if so. stateless_tokens: further ids whose KV is stored, but
    without the recurrent state, or all that windows show, which the model needs beside it.
    """
    if refusal:
        return Plan(Mode.TEXT, 0, (refusal,))
    if matched_tokens == 0:
        if settled_tokens == 0:
            return Plan(Mode.TEXT, 0, ("first turn: nothing was computed before",))
        return Plan(Mode.TEXT, 0, (_why_short(0, settled_tokens, evicted_pages, withheld, stateless_tokens),))
    # the last token of an answer that hit its length limit was never fed, so its KV does not exist
    if 0 < settled_tokens <= matched_tokens + 1:
        return Plan(Mode.KV, matched_tokens, ())
    if settled_tokens == 0:
        return Plan(Mode.PARTIAL, matched_tokens, ("first turn: shares only its beginning with another conversation",))
    why = _why_short(matched_tokens, settled_tokens, evicted_pages, withheld, stateless_tokens)
    return Plan(Mode.PARTIAL, matched_tokens, (why,))


def stale_after(hops: int, refresh_every: int) -> str | None:
    """Why KV that `hops` handoffs lie behind is computed anew from the text; None if it need not be."""
    if not refresh_every or hops < refresh_every:
        return None
    return f"{hops} handoffs lie behind the stored KV (refresh_every={refresh_every}): computed anew from the text"


def slower_than_text(moving_ms: float | None, replay_ms: float | None) -> str | None:
    """Why KV is not moved to another process, if reading the text there is faster; None if not, or not known yet."""
    if moving_ms is None or replay_ms is None or moving_ms <= replay_ms:
        return None
    return f"text is faster here: moving the KV takes about {moving_ms:.0f} ms, reading it again {replay_ms:.0f} ms"


def crossover_tokens(fixed_ms: float, moving_ms_per_token: float, replay_ms_per_token: float) -> int | None:
    """From how many shared tokens on moving KV beats text replay; None if never."""
    gain = replay_ms_per_token - moving_ms_per_token
    return max(1, ceil(fixed_ms / gain)) if gain > 0 else None


def _why_short(matched: int, settled: int, evicted_pages: int, withheld: str, stateless: int) -> str:
    where = f"stored KV agrees with {matched} of {settled} tokens"
    if stateless:
        kept = "since state and windows are kept only where turns end and cues begin"
        return f"{where}; {stateless} more are read again, {kept}"
    if withheld:
        return f"{where}; others have more, but {withheld}"
    if evicted_pages:
        return f"{where}; {evicted_pages} pages were evicted so far for the byte budget"
    return f"{where}: from there the transcript was edited, private to an agent, or computed elsewhere"
