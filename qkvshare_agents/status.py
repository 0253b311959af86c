"""What a host holds, for its owner and for `qkvshare top` in another process of the same user.

After every turn a host replaces a small file of its own: names of agents, counts and bytes, no text and no ids. It lies
in a directory that only this user can enter, and is gone when the host closes; that of a process that has died
is deleted by whoever looks next.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkvshare_agents import models
from qkvshare_agents.errors import QKVShareError
from qkvshare_kernels import private

if TYPE_CHECKING:
    from qkvshare_agents.host import Host

_LARGEST = 1 << 20  # bytes of a file that is read


def directory() -> Path:
    """Where hosts of this user write: in $XDG_RUNTIME_DIR, or beside the models."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return (Path(runtime) / "qkvshare" if runtime else models.models_directory().parent) / "hosts"


def describe(host: "Host") -> dict[str, Any]:
    """Agents with the widths of their next pages, what is stored, and the budget. Waits for nothing.

    stored_bytes of an agent: of pages with its last prompt; agents that share pages count them each.
    """
    store = host.stored
    agents = host.residents.snapshot()
    for row, ids in zip(agents, [agent.ids for agent in host.residents], strict=False):
        row["stored_tokens"], row["stored_bytes"] = store.weigh(ids) if store else (0, 0)
    return {
        "model": host.settings.model,
        "pid": os.getpid(),
        "time_s": time.time(),
        "precision": host.settings.precision,
        "uniform_because": host.uniform_because,
        "budget_bytes": store.budget_bytes if store else host.settings.budget_bytes,
        "stored_bytes": store.nbytes if store else 0,
        "pages": store.page_count if store else 0,
        "evicted_pages": store.evicted_pages if store else 0,
        "agents": agents,
    }


class Notice:
    """The file of one host. What can't be written is left out: nobody's turn fails for it."""

    def __init__(self) -> None:
        self._path: Path | None = None

    def post(self, described: Mapping[str, Any]) -> None:
        """Replace the file by what is described, in one step."""
        try:
            path = self._path or directory() / f"{os.getpid()}-{id(self):x}.json"
            with private.opened(path.parent) as folder:
                private.write(folder, path.name, json.dumps(described).encode(), lasting=False)
            self._path = path
        except OSError:
            return

    def withdraw(self) -> None:
        if self._path:
            self._path.unlink(missing_ok=True)
        self._path = None


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
        f"{_plain(d['model'])} (pid {d['pid']}, {_plain(d['precision'])}): {_mb(stored)} of {_mb(budget)} MB "
        f"({share:.0f} %) in {d['pages']} pages, {d['evicted_pages']} evicted"
    )
    if d["uniform_because"]:
        yield f"  all layers alike: {_plain(d['uniform_because'])}"
    yield f"  {'agent':20} {'tokens':>8} {'stored':>8} {'MB':>8} {'bits':>6}  widths of the next pages"
    for row in d["agents"]:
        bits = f"{row['average_bits']:.2f}" if row["average_bits"] else "native"
        counts = f"{row['tokens']:8} {row['stored_tokens']:8} {_mb(row['stored_bytes']):>8} {bits:>6}"
        widths = f"keys {_widths(row['key_bits'])}  values {_widths(row['value_bits'])}" if row["key_bits"] else ""
        yield f"  {_plain(row['agent'])[:20]:20} {counts}  {widths}".rstrip()


def _widths(bits: Sequence[int]) -> str:
    """One digit per layer, or the width that all have."""
    return str(bits[0]) if len(set(bits)) == 1 else "".join(str(b) for b in bits)


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f}"


def _plain(text: Any) -> str:
    """Without anything that a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in str(text))
