"""What a turn continues from."""

from dataclasses import dataclass, field

from qkvshare_agents.ids import Ids
from qkvshare_agents.kv.page import Page
from qkvshare_agents.kv.state import Snapshot
from qkvshare_agents.model.run import Run
from qkvshare_agents.store.assembly import Assembly
from qkvshare_agents.store.prefix_tree import NO_MATCH, Match
from qkvshare_agents.store.shared_store import SharedPageStore
from qkvshare_agents.store.state_store import SnapshotStore
from qkvshare_agents.turns.plan import Plan


@dataclass(frozen=True)
class Start:
    """A turn that is planned and has its handed-over KV in place.

    store, owners: where and for whom its KV may be kept, if anywhere. state: what it continues from beside the pages
    of `match`; snapshots: taken on the way, by tokens. assembly: what the run began with (None: `match`), standing for
    the prompt's first `covered` tokens; pages: where that came from; earlier: what it had begun with before, and the
    ids read behind that. hops: how many handoffs lie between the text and what this turn
    computes. renews: stored pages of these tokens are replaced.
    """

    run: Run
    plan: Plan
    match: Match = NO_MATCH
    store: SharedPageStore | None = None
    owners: tuple[str, ...] = ()
    import_ms: float = 0.0
    state: Snapshot | None = None
    assembly: Assembly | None = None
    covered: int = 0
    pages: tuple[Page, ...] = ()
    earlier: tuple[tuple[Assembly | None, Ids], ...] = ()
    hops: int = 0
    renews: bool = False
    snapshots: dict[int, Snapshot] = field(default_factory=dict)

    def path(self, ids: Ids) -> Ids:
        """Where the store keeps the KV that this turn computes of `ids`, its prompt and answer."""
        return self.assembly.path(ids) if self.assembly else ids

    @property
    def payload_bytes(self) -> int:
        """Of the pages and the state that were handed over, as stored."""
        pages = sum(page.nbytes for page in self.pages) if self.assembly else self.match.nbytes
        return pages + (self.state.nbytes if self.state else 0)

    @property
    def fp16_bytes(self) -> int:
        """The same in 16 bits."""
        kv = self.run.kv
        tokens = self.plan.reused_tokens
        return kv.shape.fp16_bytes(tokens) + (self.state.fp16_bytes if self.state else 0) if kv else 0


def with_state(match: Match, ids: Ids, snapshots: SnapshotStore) -> tuple[Match, Snapshot | None]:
    """As much of the match of `ids` as there is recurrent state behind, and that state."""
    state: Snapshot | None = None
    while match.tokens and (state is None or match.tokens < state.tokens):
        state = snapshots.longest(ids[: match.tokens])
        match = match.head(state.tokens if state else 0)
    return match, state if match.tokens else None
