"""What a handoff saved and cost."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from qkvshare_agents.planner import Mode

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class HandoffReport:
    """One turn. Times are measured on the turn itself; bytes are those of the stored tensors.

    agent, source: whose turn it was, and who computed the KV it started from ("" if nobody).
    reused_tokens + prefilled_tokens = prompt_tokens. payload_bytes: pages handed over, scales, sinks and
    native tokens included. fp16_bytes: the same tokens in a 16-bit cache. import_ms: pages into the working
    cache. first_token_ms: from the start of the turn to the first token, import included. transfer_ms: 0
    within a process, where a handoff is a reference. quantize_ms: sealing what this turn added.
    replay_first_token_ms: text replay of the same tokens, measured right after the turn when asked for.
    """

    agent: str
    source: str
    mode: Mode
    reasons: tuple[str, ...]
    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    payload_bytes: int
    fp16_bytes: int
    import_ms: float
    transfer_ms: float
    first_token_ms: float
    quantize_ms: float
    total_ms: float
    replay_first_token_ms: float | None = None

    @property
    def prefilled_tokens(self) -> int:
        return self.prompt_tokens - self.reused_tokens

    @property
    def payload_ratio(self) -> float | None:
        """Payload over the same tokens in fp16; None when nothing was handed over."""
        return self.payload_bytes / self.fp16_bytes if self.fp16_bytes else None

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for logs, traces and JSON; no text of the conversation."""
        return {
            **asdict(self),
            "mode": self.mode.value,
            "reasons": list(self.reasons),
            "prefilled_tokens": self.prefilled_tokens,
            "payload_ratio": self.payload_ratio,
        }


def table(reports: Iterable[HandoffReport]) -> "Table":
    """The turns of a conversation, one a line, for a terminal."""
    from rich.table import Table

    shown = Table(title="Handoffs", show_lines=False, title_justify="left")
    for name in ("hop", "agent", "from", "mode"):
        shown.add_column(name)
    numbers = ("reused", "prefilled", "payload KB", "of fp16", "quantize", "transfer", "import", "1st token", "replay")
    for name in numbers:
        shown.add_column(name, justify="right")
    notes = []
    for hop, r in enumerate(reports, 1):
        replay, ratio = r.replay_first_token_ms, r.payload_ratio
        shown.add_row(
            str(hop), r.agent, r.source or "-", r.mode.value,
            str(r.reused_tokens), str(r.prefilled_tokens), f"{r.payload_bytes / 1000:,.0f}",
            "-" if ratio is None else f"{ratio:.2f}",
            *(f"{ms:.1f}" for ms in (r.quantize_ms, r.transfer_ms, r.import_ms, r.first_token_ms)),
            "-" if replay is None else f"{replay:.1f} ({replay / r.first_token_ms:.1f}x)",
        )  # fmt: skip
        notes += [f"hop {hop}: {reason}" for reason in r.reasons]
    shown.caption = "\n".join(["times in ms; replay: first token when the same tokens are read again", *notes])
    shown.caption_justify = "left"
    return shown
