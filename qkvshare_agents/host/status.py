"""What a host holds, for its owner and for `qkvshare top` in another process of the same user.

While it answers turns, a host replaces a small file of its own: names of agents, counts and bytes, no text and no ids.
A thread of its own does so, some times a second at most, and no turn waits for it. The file lies in a directory that
only this user can enter, and is gone when the host closes; that of a process that has died is deleted by whoever looks
next.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from qkvshare_agents.budget.agents import Resident, Residents
from qkvshare_agents.errors import QKVShareError, printable
from qkvshare_agents.model import catalog
from qkvshare_agents.store.shared_store import SharedPageStore
from qkvshare_kernels import private

_LARGEST = 1 << 20  # bytes of a file that is read
_MOST_AGENTS = 32  # in a description; the others are counted
_LONGEST_NAME = 80
_PAUSE_S = 0.25  # between two files


def directory() -> Path:
    """Where hosts of this user write: in $XDG_RUNTIME_DIR, or beside the models."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return (Path(runtime) / "qkvshare" if runtime else catalog.models_directory().parent) / "hosts"


def describe(residents: Residents, store: SharedPageStore | None, budget_bytes: int, **about: Any) -> dict[str, Any]:
    """The agents that spoke last with the widths of their next pages, how many others there were, what is stored, and
    the budget; about: what it says besides. Waits for no turn.

    stored_bytes of an agent: of pages with its last prompt; agents that share pages count them each. forgotten: how
    often an agent had to make way for others, beside those that are listed or counted as `others`.
    """
    known = list(residents)
    shown = known[-_MOST_AGENTS:]
    return {
        **about,
        "pid": os.getpid(),
        "time_s": time.time(),
        "budget_bytes": store.budget_bytes if store else budget_bytes,
        "stored_bytes": store.nbytes if store else 0,
        "pages": store.page_count if store else 0,
        "evicted_pages": store.evicted_pages if store else 0,
        "agents": [_row(agent, residents.widths(agent), store) for agent in shown],
        "others": len(known) - len(shown),
        "forgotten": residents.forgotten,
    }


def _row(agent: Resident, flat: Sequence[int], store: SharedPageStore | None) -> dict[str, Any]:
    """What is said of an agent: name, scope, tokens, turns, widths of its next pages per layer, their average."""
    stored_tokens, stored_bytes = store.weigh(agent.ids) if store else (0, 0)
    return {
        "agent": agent.key[1][:_LONGEST_NAME],
        "scope": agent.key[0][:_LONGEST_NAME],
        "tokens": len(agent.ids),
        "turns": agent.turns,
        "key_bits": flat[::2],
        "value_bits": flat[1::2],
        "average_bits": sum(flat) / len(flat) if flat else None,
        "observations": agent.observations,
        "last_turn_s": agent.last_turn,
        "stored_tokens": stored_tokens,
        "stored_bytes": stored_bytes,
    }


class Notice:
    """The file of one host. What can't be written is left out: nobody's turn fails for it.

    describe: what to write, called on a thread of the notice's own.
    """

    def __init__(self, describe: Callable[[], Mapping[str, Any]]) -> None:
        self._describe = describe
        self._path: Path | None = None
        self._thread: threading.Thread | None = None
        self._changed, self._closing = threading.Event(), threading.Event()

    def changed(self) -> None:
        """What is described is not what it was: replace the file soon. Returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="qkvshare-status", daemon=True)
            self._thread.start()
        self._changed.set()

    def withdraw(self) -> None:
        """Delete the file, for good."""
        self._closing.set()
        self._changed.set()
        if self._thread:
            self._thread.join()
        if self._path:
            self._path.unlink(missing_ok=True)
        self._path = None

    def _run(self) -> None:
        while self._changed.wait() and not self._closing.is_set():
            self._changed.clear()
            self._post(self._describe())
            self._closing.wait(_PAUSE_S)

    def _post(self, described: Mapping[str, Any]) -> None:
        """Replace the file by what is described, in one step."""
        try:
            path = self._path or directory() / f"{os.getpid()}-{id(self):x}.json"
            with private.opened(path.parent) as folder:
                private.write(folder, path.name, json.dumps(described).encode(), lasting=False)
            self._path = path
        except OSError:
            return


def running() -> list[dict[str, Any]]:
    """What the hosts of this user said last, oldest process first. Raises QKVShareError for a directory of others."""
    if not directory().is_dir():
        return []
    try:
        with private.opened(directory(), make=False) as folder:
            names = sorted(name for name in os.listdir(folder) if name.endswith(".json") and name[0] != ".")
            return [described for name in names if (described := _read(folder, name))]
    except private.NotPrivate as error:
        raise QKVShareError(str(error)) from None


def _read(folder: int, name: str) -> dict[str, Any] | None:
    pid = name.partition("-")[0]
    if pid.isdigit() and not _is_alive(int(pid)):
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        return None
    try:
        described = json.loads(private.read(folder, name, _LARGEST))
    except (OSError, ValueError, RecursionError):
        return None
    return described if isinstance(described, dict) and isinstance(described.get("agents"), list) else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def lines(described: Mapping[str, Any]) -> Iterator[str]:
    """A host as text: a line for the host, one for each agent."""
    d = described
    stored, budget = d["stored_bytes"], d["budget_bytes"]
    share = 100 * stored / budget if budget else 100.0
    yield (
        f"{printable(str(d['model']))} (pid {d['pid']}, {printable(str(d['precision']))}): "
        f"{_mb(stored)} of {_mb(budget)} MB ({share:.0f} %) in {d['pages']} pages, {d['evicted_pages']} evicted"
    )
    if d["uniform_because"]:
        yield f"  all layers alike: {printable(str(d['uniform_because']))}"
    yield f"  {'agent':20} {'tokens':>8} {'stored':>8} {'MB':>8} {'bits':>6}  widths of the next pages"
    for row in d["agents"]:
        bits = f"{row['average_bits']:.2f}" if row["average_bits"] else "native"
        counts = f"{row['tokens']:8} {row['stored_tokens']:8} {_mb(row['stored_bytes']):>8} {bits:>6}"
        widths = f"keys {_widths(row['key_bits'])}  values {_widths(row['value_bits'])}" if row["key_bits"] else ""
        yield f"  {printable(str(row['agent']))[:20]:20} {counts}  {widths}".rstrip()
    if others := d.get("others", 0) + d.get("forgotten", 0):
        yield f"  and {others} that spoke earlier"


def _widths(bits: Sequence[int]) -> str:
    """One digit per layer, or the width that all have."""
    return str(bits[0]) if len(set(bits)) == 1 else "".join(str(b) for b in bits)


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f}"
