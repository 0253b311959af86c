"""What a package says about itself, without its tensors and without any text of the conversation."""

import mmap
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from qkvshare_agents.errors import InvalidSetting, PackageError
from qkvshare_agents.kv.shape import LayerGroup, in_words
from qkvshare_agents.transport.interface import check_key
from qkvshare_agents.transport.shm import ShmTransport
from qkvshare_agents.wire import integrity
from qkvshare_agents.wire.manifest import Manifest, PartHead, Run
from qkvshare_agents.wire.package import inspect
from qkvshare_agents.wire.payload import Payload


def find(name: str) -> Payload:
    """The package in the file `name`, or under the key `name` in the shm directory, mapped. Raises PackageNotFound."""
    path = Path(name)
    try:
        if path.is_file():
            with path.open("rb") as file:
                if not os.fstat(file.fileno()).st_size:
                    raise PackageError(f"{name} is empty")
                return Payload([memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))])
    except (OSError, ValueError) as error:  # no right to read it, a name that is none, a file that can't be mapped
        raise PackageError(f"{name[:80]!r} can't be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        check_key(name)
    except InvalidSetting:
        raise InvalidSetting(f"{name[:80]!r} is neither a file nor a key; `qkvshare ls` lists the keys") from None
    transport = ShmTransport(mapped=True)
    try:
        return transport.get(name)
    finally:
        transport.close()


def describe(payload: Payload, *, secret: str = "") -> dict[str, Any]:
    """Plain numbers and strings, for JSON. secret: to check the signature with. Raises PackageError."""
    contents, m = inspect(payload)
    signature = "not signed"
    if m.signed:
        signature = "not checked: no secret here (QKVSHARE_SECRET)"
    if m.signed and secret:
        mac = next(entry for entry in contents.entries if entry.name == "mac")
        given = bytes(payload.read(*contents.of(mac)))
        right = integrity.equal(given, integrity.mac(m.algorithm, secret, contents.head))
        signature = "valid" if right else "wrong: damaged, or another secret"
    return {
        "id": m.id,
        "nbytes": payload.nbytes,
        "header_bytes": len(contents.head),
        "created_ms": m.created_ms,
        "expires_ms": m.expires_ms,
        "signature": signature,
        "digest": m.algorithm,
        "fingerprint": vars(m.fingerprint),
        "groups": [vars(group) for group in m.groups],
        "tokens": m.tokens,
        "covered_tokens": sum(run.tokens for run in m.runs),
        "answers": len(m.ledger),
        "canary_tokens": m.canary.tokens if m.canary else 0,
        "state": [vars(tensor) for tensor in m.state.tensors] if m.state else None,
        "runs": [_run(m, run) for run in m.runs],
    }


def _run(m: Manifest, run: Run) -> dict[str, Any]:
    layout = m.layouts[run.page.layout] if run.page else None
    return {
        "tokens": run.tokens,
        "key": run.key,
        "sealed": run.sealed,
        "hops": run.page.hops if run.page else None,
        "digest": run.page.digest if run.page else None,
        "keys": [_part(part) for part in layout.keys] if layout else None,
        "values": [_part(part) for part in layout.values] if layout else None,
    }


def show(described: Mapping[str, Any]) -> None:
    """Print the result of `describe`; equal runs that follow each other are one line."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    d = described
    console = Console(highlight=False, markup=False)
    console.print(f"package {d['id']}: {d['nbytes']:,} bytes, {d['header_bytes']:,} of them header")
    canary = f"a canary of {d['canary_tokens']} tokens" if d["canary_tokens"] else "no canary"
    console.print(f"expires {_date(d['expires_ms'])}; {d['digest']}, signature {d['signature']}; {canary}")
    console.print(
        f"KV of {d['covered_tokens']} of {d['tokens']} tokens, {d['answers']} answers; "
        + in_words(LayerGroup(**group) for group in d["groups"])
    )
    if d["state"]:
        layers = len({tensor["layer"] for tensor in d["state"]})
        console.print(f"recurrent state of {layers} layers in {len(d['state'])} tensors")
    for aspect, value in d["fingerprint"].items():
        console.print(f"  {aspect:14} {_printable(value[:16])}")
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    for column in ("runs", "tokens", "native", "key bits", "value bits", "hops", ""):
        table.add_column(column, no_wrap=True)
    rows: list[list[str]] = []
    for run in d["runs"]:
        state = "open" if not run["sealed"] else "" if run["digest"] else "left out"
        cells = [str(run["tokens"]), _native(run["keys"]), *(_short(run[name]) for name in ("keys", "values"))]
        row = [*cells, str(run["hops"] or 0), state]
        if rows and rows[-1][1:] == row:
            rows[-1][0] = str(int(rows[-1][0]) + 1)
        else:
            rows.append(["1", *row])
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _date(ms: int) -> str:
    """Whatever a package says: calendars end in the year 9999."""
    try:
        return datetime.fromtimestamp(ms / 1000).isoformat(" ", "seconds")
    except (OverflowError, OSError, ValueError):
        return f"{ms} ms after 1970"


def _printable(text: str) -> str:
    """Whoever wrote the package may not move the cursor here."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _part(part: PartHead) -> dict[str, Any]:
    return {"layers": part.layers, "native_tokens": part.native, "plane": vars(part.plane) if part.plane else None}


def _native(parts: list[dict[str, Any]] | None) -> str:
    return str(max((part["native_tokens"] for part in parts), default=0)) if parts is not None else "-"


def _short(parts: list[dict[str, Any]] | None) -> str:
    """Width and grouping; how many layers have it where they differ."""
    shown: dict[str, int] = {}
    for part in parts or ():
        plane = part["plane"]
        how = f"{plane['bits']}/{plane['group']}{' rotated' if plane['rotated'] else ''}" if plane else "-"
        shown[how] = shown.get(how, 0) + len(part["layers"])
    if len(shown) < 2:
        return next(iter(shown), "-")
    return ", ".join(f"{count} x {how}" for how, count in shown.items())
