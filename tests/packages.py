"""Packages for tests: small ones with pages of every kind, and a second reader written from FORMAT.md alone."""

import hashlib
import hmac
import json
import struct

import torch

from qkvshare_agents.fingerprint import Fingerprint
from qkvshare_agents.package import Package, Step
from qkvshare_agents.page import Page, Precision, keep_native, seal
from qkvshare_agents.page_store import chained_key

SECRET = "a secret that both sides were given"
FINGERPRINT = Fingerprint(*(hashlib.sha256(name.encode()).hexdigest() for name in "abcdef"))
ROOT = b"r" * 32
SHAPE = (2, 1, 8, 4)
PRECISIONS = (
    Precision(8, 8, page_size=16),
    Precision(4, 3, page_size=16, rotate_keys=True, rotate_values=True),
    Precision(2, 2, page_size=16, num_sink_tokens=0, key_group_size=4, value_group_size=2, rotate_keys=False),
    Precision(None, None, page_size=16),
)


def kv(tokens: int, shape: tuple[int, int, int, int] = SHAPE, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    layers, heads, key_dim, value_dim = shape
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(layers, heads, tokens, dim, generator=generator) for dim in (key_dim, value_dim))


def pages(precision: Precision, count: int = 2, open_tokens: int = 5, shape=SHAPE) -> list[Page]:
    sealed = [seal(*kv(precision.page_size, shape, i), precision, starts_sequence=i == 0) for i in range(count)]
    return [*sealed, keep_native(*kv(open_tokens, shape, count))]


def package(made: list[Page], *, omit: tuple[int, ...] = (), extra_ids: int = 2, **fields: object) -> Package:
    """The pages as one conversation; the last one is open. `omit`: pages that do not travel."""
    ids = tuple(range(1000, 1000 + sum(page.tokens for page in made) + extra_ids))
    steps, key, start = [], ROOT, 0
    for index, page in enumerate(made):
        key = chained_key(key, ids[start : start + page.tokens])
        sealed = index < len(made) - 1
        steps.append(Step(page.tokens, key, sealed, None if index in omit else page))
        start += page.tokens
    given = {"ledger": (("said", 3, 9),), "handoff": "go on", "metadata": {"turn": "2"}, "shape": SHAPE, **fields}
    return Package(ids, tuple(steps), FINGERPRINT, **given)


def flat(payload) -> bytes:
    return b"".join(payload.pieces)


def second_reader(data: bytes, secret: str = SECRET) -> dict[str, object]:
    """What FORMAT.md says, in the standard library; a sound file only (it explains nothing). No code of ours."""
    length = struct.unpack("<Q", data[:8])[0]
    head, body = data[: 8 + length], data[8 + length :]
    header = json.loads(head[8:])
    metadata = header.pop("__metadata__")
    assert (metadata["format"], metadata["version"]) == ("qkvshare", "1")
    manifest = json.loads(metadata["manifest"])
    place = {name: entry["data_offsets"] for name, entry in header.items()}
    assert manifest["algorithm"] == "sha256"
    signed = hmac.new(secret.encode(), b"qkvshare package 1\0" + head, "sha256").digest()
    assert body[slice(*place["mac"])] == signed and manifest["signed"]
    raw = body[slice(*place["ids"])]
    assert hashlib.sha256(raw).hexdigest() == manifest["ids_digest"]
    ids = struct.unpack(f"<{manifest['tokens']}q", raw)
    keys, values, key, start = [], [], ROOT, 0
    for index, run in enumerate(manifest["runs"]):
        for token in ids[start : start + run["tokens"]]:
            key += token.to_bytes(8, "little")
        key, start = hashlib.sha256(key).digest(), start + run["tokens"]
        assert run["key"] == key.hex()
        if run["page"] is None:
            continue
        own = [place[name] for name in place if name.startswith(f"{index}.")]
        assert hashlib.sha256(body[own[0][0] : own[-1][1]]).hexdigest() == run["page"]["digest"]
        for part, out, dim in (("k", keys, manifest["shape"][2]), ("v", values, manifest["shape"][3])):
            out.append(_second_plane(index, part, run, manifest, body, place, dim))
    return {"ids": ids, "keys": keys, "values": values, "manifest": manifest}


def _second_plane(index, part, run, manifest, body, place, dim):
    """Nested lists [L][H][T][D] of one page's keys or values."""
    layers, heads = manifest["shape"][:2]
    native = run["page"]["native"]
    packed = run["tokens"] - native
    plane = run["page"]["keys" if part == "k" else "values"]

    def numbers(name: str, code: str, *shape: int):
        flat_values = list(struct.iter_unpack("<" + code, body[slice(*place[f"{index}.{name}"])]))
        values = [value for (value,) in flat_values]
        for size in reversed(shape):
            values = [values[i : i + size] for i in range(0, len(values), size)]
        return values[0]

    code = {"F32": "f", "F16": "e"}[manifest["dtype"]]
    out = [[[] for _ in range(heads)] for _ in range(layers)]
    if native:
        rows = numbers(f"n{part}", code, layers, heads, native, dim)
        out = [[[*rows[la][h]] for h in range(heads)] for la in range(layers)]
    if plane is None:
        return out
    bits, per_channel = plane["bits"], plane["group"] == "channel"
    multiple = 8 if bits == 3 else 8 // bits
    width = -(-dim // multiple) * multiple
    codes = numbers(f"{part}c", "B", layers, heads, packed, width * bits // 8)
    axis = packed if per_channel else dim
    size = min(plane["group_size"] or axis, axis)
    groups = -(-axis // size)
    shape = (groups, dim) if per_channel else (packed, groups)
    scale = numbers(f"{part}s", "e", layers, heads, *shape)
    low = numbers(f"{part}m", "e", layers, heads, *shape) if plane["minimum"] else None
    for la in range(layers):
        for h in range(heads):
            for t in range(packed):
                row = []
                for d, number in enumerate(_second_codes(codes[la][h][t], bits, width)[:dim]):
                    at = (t // size, d) if per_channel else (t, d // size)
                    s = scale[la][h][at[0]][at[1]]
                    row.append(number * s + (low[la][h][at[0]][at[1]] if low else -s * (2**bits - 1) / 2))
                out[la][h].append(_second_rotation(row) if plane["rotated"] else row)
    return out


def _second_codes(row, bits: int, width: int) -> list[int]:
    if bits == 8:
        return row
    if bits == 3:
        low, high = row[: width // 4], row[width // 4 :]
        return [a + 4 * b for a, b in zip(_second_codes(low, 2, width), _second_codes(high, 1, width), strict=True)]
    return [(byte >> (bits * part)) % 2**bits for part in range(8 // bits) for byte in row]


def _second_rotation(row: list[float]) -> list[float]:
    block = len(row) & -len(row)
    out = []
    for start in range(0, len(row), block):
        part = row[start : start + block]
        out += [sum(x * (-1) ** (i & j).bit_count() for j, x in enumerate(part)) / block**0.5 for i in range(block)]
    return out
