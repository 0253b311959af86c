"""What a handoff saved and cost."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from qkvshare_agents.turns.plan import Mode

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Arrival:
    """What came from another process before a turn. reasons: why KV did not, if so. transfer_ms: fetching and
    checking it. moved_bytes: of the package, manifest included; 0 if none was moved. canary_nats: how far the KV was
    off (None: not compared); canary_ms: what it took to find out. alarmed: it was too far off and is not used."""

    reasons: tuple[str, ...] = ()
    transfer_ms: float = 0.0
    moved_bytes: int = 0
    canary_nats: float | None = None
    canary_ms: float = 0.0
    alarmed: bool = False


@dataclass(frozen=True)
class HandoffReport:
    """One turn. Times are measured on the turn itself; bytes are those of the stored tensors.

    agent, source: whose turn it was, and whose answer is the last one in the KV it started from ("" if none is).
    reused_tokens + prefilled_tokens = prompt_tokens. payload_bytes: pages handed over, scales, sinks and
    native tokens included. fp16_bytes: the same tokens in a 16-bit cache. import_ms: pages into the working
    cache. first_token_ms: from the start of the turn to the first token, import included. transfer_ms: of the
    package that came before the turn; 0 within a process, where a handoff is a reference. quantize_ms: sealing what
    this turn added.
    replay_first_token_ms: text replay of the same tokens, measured right after the turn when asked for.
    replay_kl: KL in nats of the first token to that of the replay, measured with it.
    dropped_tokens: of the conversation, which did not fit into the context; prompt_tokens are without them.
    hops: how many handoffs lie between the text and this turn; 0 if it read all of it. canary_nats, canary_ms: of
    the package that came before the turn, see `Arrival`. kernels: what encoded and decoded pages, `triton`, `cpu` or
    `torch`.
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
    replay_kl: float | None = None
    dropped_tokens: int = 0
    hops: int = 0
    canary_nats: float | None = None
    canary_ms: float = 0.0
    kernels: str = ""

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


def table(reports: Sequence[HandoffReport]) -> "Table":
    """The turns of a conversation, one a line, in 80 columns."""
    from rich import box
    from rich.table import Table

    shown = Table(title="Handoffs", box=box.SIMPLE_HEAD, padding=0, title_justify="left")
    for name in ("#", "agent", "from", "mode"):
        # Where it gets narrow the names give way, not the numbers
        named = name in ("agent", "from")
        shown.add_column(name, vertical="bottom", max_width=12, overflow="ellipsis", no_wrap=not named)
    moved = any(r.transfer_ms for r in reports)
    times = (
        ("quan-\ntize", "trans-\nfer", "im-\nport", "first\ntoken")
        if moved
        else ("quan-\ntize", "im-\nport", "first\ntoken")
    )
    for name in ("hops", "tokens\nreused", "\nread", "KV\nMB", "of\nfp16", *times, "text\nreplay", "\n×"):
        shown.add_column(name, justify="right", vertical="bottom", no_wrap=True)
    for turn, r in enumerate(reports, 1):
        replay, ratio = r.replay_first_token_ms, r.payload_ratio
        shown.add_row(
            str(turn), r.agent, r.source or "-", r.mode.value,
            str(r.hops), str(r.reused_tokens), str(r.prefilled_tokens),
            f"{r.payload_bytes / 1e6:.1f}", "-" if ratio is None else f"{ratio:.2f}",
            *(f"{ms:.1f}" for ms in (r.quantize_ms, *([r.transfer_ms] if moved else []), r.import_ms)),
            f"{r.first_token_ms:.0f}",
            *(("-", "-") if replay is None else (f"{replay:.0f}", f"{replay / r.first_token_ms:.1f}")),
        )  # fmt: skip
    notes = ["hops: handoffs that lie between the text and the KV"]
    notes.append("times in ms; text replay: first token when the same tokens are read again")
    if not moved:
        notes.append("transfer: 0 ms, a handoff within one process is a reference")
    notes += [f"{turn}: {reason}" for turn, r in enumerate(reports, 1) for reason in r.reasons]
    shown.caption, shown.caption_justify = "\n".join(notes), "left"
    return shown
