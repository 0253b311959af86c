"""What the report of a turn will say, collected while the turn runs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from qkvshare_agents.context.fit import Fitted
from qkvshare_agents.turns.plan import Mode
from qkvshare_agents.turns.prefix import Start
from qkvshare_agents.turns.report import HandoffReport
from qkvshare_agents.turns.request import Turn


class Account:
    """Of one turn. spent_ms: on it before it came here.

    reasons: why text is read again and what was changed, in the order in which it came about. dropped_tokens: of the
    conversation. replayed: milliseconds of a text replay, and how far off the turn was (KL in nats), if measured.
    """

    def __init__(self, turn: Turn, spent_ms: float = 0.0) -> None:
        self._began = time.perf_counter() - spent_ms / 1000
        self._ms: dict[str, float] = {}
        self.reasons: tuple[str, ...] = turn.arrival.reasons
        self.dropped_tokens = 0
        self.replayed: tuple[float | None, float | None] = None, None

    def because(self, *reasons: str, dropped_tokens: int = 0) -> None:
        self.reasons += reasons
        self.dropped_tokens += dropped_tokens

    def lap(self, name: str) -> None:
        """Note how long the turn has taken so far."""
        self._ms[name] = (time.perf_counter() - self._began) * 1000

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Note how long what is inside takes."""
        started = time.perf_counter()
        yield
        self._ms[name] = (time.perf_counter() - started) * 1000

    def report(self, turn: Turn, fitted: Fitted, start: Start, generated_tokens: int, kernels: str) -> HandoffReport:
        """Laps: `first_token`, `total`; timed: `quantize`. kernels: what encoded and decoded pages."""
        replay_ms, replay_kl = self.replayed
        mode = start.plan.mode
        return HandoffReport(
            agent=turn.speaker.name,
            source=fitted.prompt.last_answerer(start.covered),
            mode=Mode.PARTIAL if self.dropped_tokens and mode is Mode.KV else mode,
            reasons=self.reasons,
            prompt_tokens=fitted.tokens,
            reused_tokens=start.plan.reused_tokens,
            generated_tokens=generated_tokens,
            payload_bytes=start.payload_bytes,
            fp16_bytes=start.fp16_bytes,
            import_ms=start.import_ms,
            transfer_ms=turn.arrival.transfer_ms,
            first_token_ms=self._ms["first_token"],
            quantize_ms=self._ms["quantize"],
            total_ms=self._ms["total"],
            replay_first_token_ms=replay_ms,
            replay_kl=None if fitted.dropped_tokens else replay_kl,
            dropped_tokens=self.dropped_tokens,
            kernels=kernels if start.store else "",
            hops=start.hops,
            canary_nats=turn.arrival.canary_nats,
            canary_ms=turn.arrival.canary_ms,
        )
