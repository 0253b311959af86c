"""What a package says about itself, and the one table of tensors that follows from it (FORMAT.md)."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import chain
from typing import Any

from qkvshare_agents import codec, container
from qkvshare_agents.container import Shape
from qkvshare_agents.drift import UNITS_PER_NAT, Canary
from qkvshare_agents.errors import PackageError
from qkvshare_agents.fingerprint import Fingerprint
from qkvshare_agents.integrity import ALGORITHMS

FORMAT, VERSION = "qkvshare", "1"
MAX_RUNS = 2**14
MAX_TOKENS = 2**24
MAX_RUN_TOKENS = 2**16
MAX_WIDTH = 2**16  # layers, heads, head size
MAX_CANARY_ROWS, MAX_CANARY_TOKENS, MAX_VOCABULARY = 64, 256, 2**31
_NATIVE_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Plane:
    """How keys or values of a page are packed; the fields of `codec.Encoded`. minimum: whether one is stored."""

    bits: int
    group: codec.Group
    group_size: int | None
    rotated: bool
    dim: int
    minimum: bool


@dataclass(frozen=True)
class PageHead:
    """A page that travels: its first `native` tokens as they are, the rest packed. digest: of its bytes, in hex."""

    digest: str
    hops: int
    native: int
    keys: Plane | None
    values: Plane | None


@dataclass(frozen=True)
class Run:
    """A run of tokens, as in the page store. key: its content address in hex. page: None if it does not travel."""

    tokens: int
    key: str
    sealed: bool
    page: PageHead | None


@dataclass(frozen=True)
class Manifest:
    """id: 32 hex digits that no other package has. tokens: of `ids`; the runs cover the first of them.

    ledger: (text, start, stop): what a member said, and which ids it is. shape: (L, H, Dk, Dv) of every page.
    dtype: of native tokens. ids_digest: of the tensor `ids`, in hex. signed: whether the MAC needs the secret.
    canary: what the sender's model expected behind the last tokens that the runs cover.
    """

    id: str
    created_ms: int
    expires_ms: int
    fingerprint: Fingerprint
    tokens: int
    runs: tuple[Run, ...]
    ledger: tuple[tuple[str, int, int], ...]
    handoff: str
    metadata: Mapping[str, str]
    shape: tuple[int, int, int, int]
    dtype: str
    algorithm: str
    ids_digest: str
    signed: bool
    canary: Canary | None

    def to_text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"), ensure_ascii=False)

    def tensors(self) -> tuple[tuple[str, str, Shape], ...]:
        """(name, dtype, shape) of every tensor of the package, in order, without padding."""
        pages = ((i, run) for i, run in enumerate(self.runs) if run.page)
        inner = chain.from_iterable(self.page_tensors(i, run) for i, run in pages)
        return ("ids", "I64", (self.tokens,)), *inner, ("mac", "U8", (32,))

    def page_tensors(self, index: int, run: Run) -> list[tuple[str, str, Shape]]:
        """Those of one page: native keys and values, then codes, scale and minimum of each."""
        assert run.page is not None
        layers, heads, *dims = self.shape
        native, packed = run.page.native, run.tokens - run.page.native
        table: list[tuple[str, str, Shape]] = []
        if native:
            table = [
                (f"{index}.n{part}", self.dtype, (layers, heads, native, dim))
                for part, dim in zip("kv", dims, strict=True)
            ]
        for part, plane in (("k", run.page.keys), ("v", run.page.values)):
            if plane is None:
                continue
            grouped = packed if plane.group == "channel" else plane.dim
            groups = -(-grouped // min(plane.group_size or grouped, grouped))
            scale = (groups, plane.dim) if plane.group == "channel" else (packed, groups)
            table.append((f"{index}.{part}c", "U8", (layers, heads, packed, packed_bytes(plane.dim, plane.bits))))
            names = ("s", "m") if plane.minimum else ("s",)
            table += [(f"{index}.{part}{name}", "F16", (layers, heads, *scale)) for name in names]
        return table


def packed_bytes(dim: int, bits: int) -> int:
    """Bytes of one packed vector: `dim` is filled up to whole bytes, at 3 bits to 8 values."""
    multiple = 8 if bits == 3 else 8 // bits
    return -(-dim // multiple) * multiple * bits // 8


def read(text: str) -> Manifest:
    """Parse and check everything that does not need the tensors. Raises PackageError."""
    table = container.parse_json(_utf8(text))
    m = _fields(table, Manifest, "manifest")
    aspects = _fields(m["fingerprint"], Fingerprint, "fingerprint")
    for aspect, value in aspects.items():
        _string(value, f"fingerprint.{aspect}")
    _hex(m["id"], 32, "id")
    _hex(m["ids_digest"], 64, "ids_digest")
    _whole(m["created_ms"], 0, 2**53, "created_ms")
    _whole(m["expires_ms"], 0, 2**53, "expires_ms")
    tokens = _whole(m["tokens"], 1, MAX_TOKENS, "tokens")
    _choice(m["algorithm"], ALGORITHMS, "algorithm")
    _choice(m["dtype"], _NATIVE_DTYPES, "dtype")
    _choice(m["signed"], (True, False), "signed")
    _string(m["handoff"], "handoff")
    if not isinstance(m["metadata"], dict):
        raise PackageError("metadata must be a table of strings")
    for part in chain.from_iterable(m["metadata"].items()):
        _string(part, "metadata")
    shape = tuple(_whole(n, 1, MAX_WIDTH, "shape") for n in _list(m["shape"], 4, "shape"))
    if len(shape) != 4:
        raise PackageError("shape must be layers, heads, key size and value size")
    runs = tuple(_run(entry, shape) for entry in _list(m["runs"], MAX_RUNS, "runs"))
    covered = sum(run.tokens for run in runs)
    if covered > tokens:
        raise PackageError(f"the runs cover more than the {tokens} token ids")
    if any(not run.sealed for run in runs[:-1]):
        raise PackageError("a run that is not sealed can only be the last")
    ledger = tuple(_spoken(entry, tokens) for entry in _list(m["ledger"], MAX_RUNS, "ledger"))
    read = {"fingerprint": Fingerprint(**aspects), "shape": shape, "runs": runs, "ledger": ledger}
    return Manifest(**{**m, **read, "canary": _canary(m["canary"], covered)})


def _run(entry: Any, shape: tuple[int, ...]) -> Run:
    r = _fields(entry, Run, "run")
    tokens = _whole(r["tokens"], 1, MAX_RUN_TOKENS, "run.tokens")
    _hex(r["key"], 64, "run.key")
    _choice(r["sealed"], (True, False), "run.sealed")
    if r["page"] is None:
        return Run(tokens, r["key"], r["sealed"], None)
    p = _fields(r["page"], PageHead, "page")
    _hex(p["digest"], 64, "page.digest")
    _whole(p["hops"], 0, 2**31, "page.hops")
    native = _whole(p["native"], 0, tokens, "page.native")
    keys, values = (_plane(p[name], dim) for name, dim in (("keys", shape[2]), ("values", shape[3])))
    if (keys is None) != (native == tokens) or (values is None) != (keys is None):
        raise PackageError("a page needs packed keys and values for exactly the tokens that are not native")
    return Run(tokens, r["key"], r["sealed"], PageHead(p["digest"], p["hops"], native, keys, values))


def _plane(entry: Any, dim: int) -> Plane | None:
    if entry is None:
        return None
    p = _fields(entry, Plane, "plane")
    _choice(p["bits"], codec.WIDTHS, "bits")
    _choice(p["group"], ("channel", "token"), "group")
    for name in ("rotated", "minimum"):
        _choice(p[name], (True, False), name)
    if p["group_size"] is not None:
        _whole(p["group_size"], 1, MAX_WIDTH, "group_size")
    _whole(p["dim"], dim, dim, "dim")
    return Plane(**p)


def _spoken(entry: Any, tokens: int) -> tuple[str, int, int]:
    text, start, stop = _exactly(_list(entry, 3, "ledger entry"), 3)
    _whole(start, 0, tokens - 1, "ledger start")
    return _string(text, "ledger text"), start, _whole(stop, start + 1, tokens, "ledger stop")


def _canary(entry: Any, covered: int) -> Canary | None:
    if entry is None:
        return None
    c = _fields(entry, Canary, "canary")
    rows: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    both = zip(*(_list(c[name], MAX_CANARY_ROWS, f"canary.{name}") for name in ("ids", "logs")), strict=False)
    for row in both:
        ids, logs = (_list(part, MAX_CANARY_TOKENS, "canary row") for part in row)
        rows.append(
            (
                tuple(_whole(i, 0, MAX_VOCABULARY - 1, "canary id") for i in ids),
                tuple(_whole(log, -100 * UNITS_PER_NAT, 0, "canary log-probability") for log in logs),
            )
        )
        total = sum(math.exp(log / UNITS_PER_NAT) for log in rows[-1][1])
        if not len(set(ids)) == len(ids) == len(logs) > 0 or sorted(logs, reverse=True) != logs or total > 1.001:
            raise PackageError("a canary row needs different ids, with log-probabilities of a distribution, descending")
    if not 1 <= len(rows) == len(c["ids"]) == len(c["logs"]) <= covered:
        raise PackageError(f"a canary needs at least one row and at most one for each of the {covered} tokens")
    return Canary(tuple(ids for ids, _ in rows), tuple(logs for _, logs in rows))


def _fields(entry: Any, kind: type, what: str) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    if not isinstance(entry, dict) or entry.keys() != names:
        given = sorted(str(name)[:20] for name in entry)[:20] if isinstance(entry, dict) else type(entry).__name__
        raise PackageError(f"{what} has {given}; version {VERSION} has exactly {sorted(names)}")
    return entry


def _list(entry: Any, longest: int, what: str) -> list[Any]:
    if not isinstance(entry, list) or len(entry) > longest:
        raise PackageError(f"{what} must be a list of at most {longest:,} entries")
    return entry


def _exactly(entry: list[Any], count: int) -> list[Any]:
    if len(entry) != count:
        raise PackageError(f"a ledger entry has {len(entry)} parts, not {count}")
    return entry


def _whole(value: Any, least: int, most: int, what: str) -> int:
    if type(value) is not int or not least <= value <= most:  # a bool is an int to Python
        raise PackageError(f"{what} is {_shown(value)}; it must be a whole number in {least} ... {most}")
    return value


def _choice(value: Any, choices: tuple[Any, ...], what: str) -> None:
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        raise PackageError(f"{what} is {_shown(value)}; the choices are {', '.join(map(str, choices))}")


def _hex(value: Any, digits: int, what: str) -> None:
    if not isinstance(value, str) or len(value) != digits or not set(value) <= set("0123456789abcdef"):
        raise PackageError(f"{what} must be {digits} lower-case hex digits")


def _string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise PackageError(f"{what} must be a string")
    _utf8(value)
    return value


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise PackageError("text with half of a surrogate pair, which no UTF-8 can hold") from None


def _shown(value: Any) -> str:
    return repr(value)[:40] if isinstance(value, int | str) else type(value).__name__
