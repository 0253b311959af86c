"""Many handoffs in one process, and what they leave behind."""

import os
import secrets
import time
from pathlib import Path
from typing import Any

from qkvshare_agents.store.shared_store import SharedPageStore
from qkvshare_agents.transport.shm import ShmTransport
from qkvshare_agents.wire import package
from qkvshare_agents.wire.package import Package

_DEADLINE_MS = 30_000.0


def run(transport: ShmTransport, sent: Package, count: int) -> dict[str, Any]:
    """Write, move, check and store one package `count` times: files, descriptors and resident bytes that it left."""
    secret = secrets.token_hex(32)

    def once(index: int) -> None:
        transport.put(f"h{index}", sent.write(secret=secret), deadline_ms=_DEADLINE_MS)
        got = package.read(transport.get(f"h{index}", deadline_ms=_DEADLINE_MS), secret=secret)
        SharedPageStore(b"", 2**62).graft(got.ids, got.steps)
        transport.delete(f"h{index}")

    for index in range(20):  # warm up
        once(index)
    before = resources()
    started = time.perf_counter()
    for index in range(count):
        once(index)
    ms_each = (time.perf_counter() - started) * 1000 / count
    after = resources()
    files = len(list(transport.files()))
    transport.close()
    return {
        "handoffs": count, "ms_each": ms_each, "files": files,
        "descriptors": after[0] - before[0], "resident_bytes": after[1] - before[1],
    }  # fmt: skip


def resources() -> tuple[int, int]:
    """(open descriptors, resident bytes) of this process."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return len(os.listdir("/proc/self/fd")), resident
