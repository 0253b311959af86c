"""Whose pages a turn may continue from."""

from dataclasses import dataclass

from qkvshare_agents.store.runs import Readers


@dataclass(frozen=True)
class Access:
    """Whose pages a turn may continue from, and whose its own become.

    owners: who joins the owners of all that the turn computes or is handed; nobody by default.
    readers: the owners whose pages it may read; None: everybody's, also those without an owner.
    reason: why others' pages are not read, in words, for the report. notice: what the report says besides when a
    turn reuses nothing that others computed.
    """

    owners: tuple[str, ...] = ()
    readers: Readers | None = None
    reason: str = ""
    notice: str = ""
