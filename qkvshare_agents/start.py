"""What a turn continues from."""

from dataclasses import dataclass, field

from qkvshare_agents.engine import Run
from qkvshare_agents.planner import Plan
from qkvshare_agents.prefix_tree import NO_MATCH, Match
from qkvshare_agents.shared_store import SharedPageStore
from qkvshare_agents.snapshot import Snapshot


@dataclass(frozen=True)
class Start:
    """A turn that is planned and has its handed-over KV in place.

    store, owners: where and for whom its KV may be kept, if anywhere. state: what it continues from beside the pages
    of `match`; snapshots: taken on the way, by tokens. hops: how many handoffs lie between the text and what this turn
    computes. renews: stored pages of these tokens are replaced.
    """

    run: Run
    plan: Plan
    match: Match = NO_MATCH
    store: SharedPageStore | None = None
    owners: tuple[str, ...] = ()
    import_ms: float = 0.0
    state: Snapshot | None = None
    hops: int = 0
    renews: bool = False
    snapshots: dict[int, Snapshot] = field(default_factory=dict)

    @property
    def payload_bytes(self) -> int:
        """Of the pages and the state that were handed over, as stored."""
        return self.match.nbytes + (self.state.nbytes if self.state else 0)

    @property
    def fp16_bytes(self) -> int:
        """The same in 16 bits."""
        kv = self.run.kv
        return kv.shape.fp16_bytes(self.match.tokens) + (self.state.fp16_bytes if self.state else 0) if kv else 0
