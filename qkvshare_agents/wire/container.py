"""Named tensors in one run of bytes: the outer half of FORMAT.md.

A safetensors file (8 bytes of header length, JSON, data without gaps) in which every tensor begins at a multiple
of 64 bytes. Whatever is read is hostile until it was checked: sizes before anything is allocated for them, the
number of brackets before the JSON is parsed.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from qkvshare_agents.errors import PackageError
from qkvshare_agents.wire.payload import Payload

ALIGNMENT_BYTES = 64
MAX_HEADER_BYTES = 4 * 1024**2
MAX_TENSORS = 2**16
MAX_BRACKETS = 4 * MAX_TENSORS  # every one may cost an object when the JSON is parsed
MAX_DIMENSIONS = 8
ITEM_BYTES = {"U8": 1, "F16": 2, "BF16": 2, "F32": 4, "I64": 8}
_PADDING = "~"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """A tensor's place: bytes [start, stop) of the data."""

    name: str
    dtype: str
    shape: Shape
    start: int
    stop: int


@dataclass(frozen=True)
class Contents:
    """head: the bytes before the data. entries: all tensors in order, padding included."""

    head: bytes
    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]

    def of(self, entry: Entry) -> tuple[int, int]:
        """Where the tensor's bytes are in the whole package."""
        return len(self.head) + entry.start, len(self.head) + entry.stop


def place(tensors: Iterable[tuple[str, str, Shape]]) -> tuple[Entry, ...]:
    """Places for (name, dtype, shape) in the order given, with padding tensors between them where needed."""
    entries: list[Entry] = []
    offset = 0
    for name, dtype, shape in tensors:
        if missing := -offset % ALIGNMENT_BYTES:
            entries.append(Entry(f"{_PADDING}{len(entries)}", "U8", (missing,), offset, offset + missing))
            offset += missing
        size = prod(shape) * ITEM_BYTES[dtype]
        entries.append(Entry(name, dtype, shape, offset, offset + size))
        offset += size
    return tuple(entries)


def is_padding(entry: Entry) -> bool:
    return entry.name.startswith(_PADDING)


def write_head(entries: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
    """Length and header; raises PackageError if a reader would refuse it for its size."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    for e in entries:
        table[e.name] = {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": [e.start, e.stop]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES or len(table) - 1 > MAX_TENSORS:
        raise PackageError(
            f"a header of {len(text):,} bytes for {len(table) - 1:,} tensors; the limits are {MAX_HEADER_BYTES:,} "
            f"bytes and {MAX_TENSORS:,} tensors: hand over fewer tokens, or larger pages"
        )
    return len(text).to_bytes(8, "little") + text


def parse(payload: Payload) -> Contents:
    """Check the header and where it says the tensors are. Raises PackageError; allocates no more than the header."""
    if payload.nbytes < 8:
        raise PackageError(f"{payload.nbytes} bytes are too few for a package")
    length = int.from_bytes(payload.read(0, 8), "little")
    if length > MAX_HEADER_BYTES:
        raise PackageError(f"the header claims {length:,} bytes; the limit is {MAX_HEADER_BYTES:,}")
    if (8 + length) % ALIGNMENT_BYTES:
        raise PackageError(f"the data would begin at byte {8 + length}, no multiple of {ALIGNMENT_BYTES}")
    head = bytes(payload.read(0, 8 + length))
    table = parse_json(head[8:])
    if not isinstance(table, dict) or len(table) > MAX_TENSORS + 1:
        raise PackageError(f"the header is no table of at most {MAX_TENSORS:,} tensors")
    metadata = table.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise PackageError("the header's __metadata__ is no table of strings")
    entries = tuple(_entry(name, fields) for name, fields in table.items())
    end = 0
    for entry in entries:
        if entry.start != end:
            raise PackageError(f"tensor {entry.name[:40]!r} begins at {entry.start}, the one before ends at {end}")
        if entry.start % ALIGNMENT_BYTES and not is_padding(entry):
            raise PackageError(f"tensor {entry.name[:40]!r} begins at {entry.start}, which is not aligned")
        end = entry.stop
    if len(head) + end != payload.nbytes:
        raise PackageError(f"the header describes {len(head) + end:,} bytes, the package has {payload.nbytes:,}")
    return Contents(head, entries, metadata)


def parse_json(text: bytes) -> Any:
    """JSON without floats, duplicate names or more nesting and brackets than we write. Raises PackageError."""
    if text.count(b"{") + text.count(b"[") > MAX_BRACKETS:
        raise PackageError(f"JSON with more than {MAX_BRACKETS:,} brackets")
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique, parse_float=_no_number, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:  # RecursionError: nested deeper than the interpreter goes
        if isinstance(error, PackageError):
            raise
        raise PackageError(f"not JSON as we write it: {str(error)[:80]}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise PackageError("a name appears twice in the JSON")
    return table


def _no_number(text: str) -> Any:
    raise PackageError(f"{text[:20]!r} where only whole numbers are")


def _entry(name: str, fields: Any) -> Entry:
    shown = name[:40]
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise PackageError(f"tensor {shown!r} must have dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise PackageError(f"tensor {shown!r} has dtype {str(dtype)[:20]!r}; the dtypes are {', '.join(ITEM_BYTES)}")
    for numbers, least, most in ((shape, 1, MAX_DIMENSIONS), (offsets, 2, 2)):
        if not isinstance(numbers, list) or not least <= len(numbers) <= most:
            raise PackageError(f"tensor {shown!r} has no usable shape and offsets")
        if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
            raise PackageError(f"tensor {shown!r} has a shape or an offset outside of 0 ... 2**62")
    if 0 in shape or offsets[1] - offsets[0] != prod(shape) * ITEM_BYTES[dtype]:
        raise PackageError(f"tensor {shown!r} of {dtype} {shape} does not fill bytes {offsets[0]} to {offsets[1]}")
    return Entry(name, dtype, tuple(shape), *offsets)


def padded(parts: Sequence[memoryview | bytes]) -> list[memoryview | bytes]:
    """The parts with zeros between them, so that each begins aligned."""
    out: list[memoryview | bytes] = []
    for part in parts:
        if out and (missing := -len(out[-1]) % ALIGNMENT_BYTES):
            out.append(bytes(missing))
        out.append(part)
    return out
