"""Packages for tests: small ones with pages of every kind, and a second reader written from FORMAT.md alone."""

import hashlib
import hmac
import json
import struct

import torch

from qkvshare_agents.kv.balance import Balance
from qkvshare_agents.kv.page import Page, Precision, keep_native, seal
from qkvshare_agents.kv.shape import LayerGroup
from qkvshare_agents.kv.span import Block, Span
from qkvshare_agents.kv.state import State, StatePart
from qkvshare_agents.model.fingerprint import Fingerprint
from qkvshare_agents.store.prefix_tree import chained_key
from qkvshare_agents.store.runs import Step
from qkvshare_agents.wire.package import Package

SECRET = "a secret that both sides were given"
FINGERPRINT = Fingerprint(*(hashlib.sha256(name.encode()).hexdigest() for name in "abcdef"))
ROOT = b"r" * 32
GROUPS = (LayerGroup((0, 1), 1, 8, 4),)
MIXED_GROUPS = (LayerGroup((0, 2, 3), 1, 8, 4), LayerGroup((1,), 2, 4, 4))
BALANCE = Balance(tuple(bytes((128, 88 + 20 * i, 168, 129, 127, 140, 111, 128)) for i in range(4)))
PRECISIONS = (
    Precision(8, 8, page_size=16),
    Precision(4, 3, page_size=16, rotate_keys=True, rotate_values=True),
    Precision(2, 2, page_size=16, num_sink_tokens=0, key_group_size=4, value_group_size=2, rotate_keys=False),
    Precision(None, None, page_size=16),
    Precision(page_size=16, widths=((4, 2), (8, 8), (2, 3), (4, None))),
    Precision(4, 4, page_size=16, balance=Balance(BALANCE.steps[:2])),
    Precision(page_size=16, widths=((4, 2), (8, 8), (2, 3), (4, None)), balance=BALANCE),
)


def kv(tokens: int, groups: tuple[LayerGroup, ...] = GROUPS, seed: int = 0) -> Span:
    generator = torch.Generator().manual_seed(seed)

    def noise(group: LayerGroup, dim: int) -> torch.Tensor:
        return torch.randn(len(group.layers), group.heads, tokens, dim, generator=generator)

    return Span(tokens, tuple(Block(g.layers, noise(g, g.key_dim), noise(g, g.value_dim)) for g in groups))


def pages(precision: Precision, count: int = 2, open_tokens: int = 5) -> list[Page]:
    """Sealed ones and an open one; layers differ in shape if they differ in width."""
    groups = MIXED_GROUPS if precision.widths else GROUPS
    sealed = [seal(kv(precision.page_size, groups, i), precision, starts_sequence=i == 0) for i in range(count)]
    return [*sealed, keep_native(kv(open_tokens, groups, count))]


def state(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> State:
    """Of two layers: one with both kinds of state, one with a convolution only."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((0, "conv_states.0", (1, 3, 4)), (0, "recurrent_states.0", (1, 2, 3, 5)), (1, "conv_states.0", (1, 3, 4)))
    return State(
        tokens,
        tuple(StatePart(i, name, torch.randn(shape, generator=generator).to(dtype)) for i, name, shape in shapes),
    )


def package(made: list[Page], *, omit: tuple[int, ...] = (), extra_ids: int = 2, **fields: object) -> Package:
    """The pages as one conversation; the last one is open. `omit`: pages that do not travel."""
    ids = tuple(range(1000, 1000 + sum(page.tokens for page in made) + extra_ids))
    steps, key, start = [], ROOT, 0
    for index, page in enumerate(made):
        key = chained_key(key, ids[start : start + page.tokens])
        sealed = index < len(made) - 1
        steps.append(Step(page.tokens, key, sealed, None if index in omit else page))
        start += page.tokens
    groups = MIXED_GROUPS if 3 in {layer for part in made[0].keys for layer in part.layers} else GROUPS
    given = {"ledger": (("said", 3, 9),), "handoff": "go on", "metadata": {"turn": "2"}, "groups": groups, **fields}
    return Package(ids, tuple(steps), FINGERPRINT, **given)


def flat(payload) -> bytes:
    return b"".join(payload.pieces)


def second_reader(data: bytes, secret: str = SECRET) -> dict[str, object]:
    """What FORMAT.md says, in the standard library; a sound file only (it explains nothing). No code of ours."""
    length = struct.unpack("<Q", data[:8])[0]
    head, body = data[: 8 + length], data[8 + length :]
    header = json.loads(head[8:])
    metadata = header.pop("__metadata__")
    assert (metadata["format"], metadata["version"]) == ("qkvshare", "2")
    manifest = json.loads(metadata["manifest"])
    place = {name: entry["data_offsets"] for name, entry in header.items()}
    assert manifest["algorithm"] == "sha256"
    signed = hmac.new(secret.encode(), b"qkvshare package 2\0" + head, "sha256").digest()
    assert body[slice(*place["mac"])] == signed and manifest["signed"]
    raw = body[slice(*place["ids"])]
    assert hashlib.sha256(raw).hexdigest() == manifest["ids_digest"]
    ids = struct.unpack(f"<{manifest['tokens']}q", raw)
    found, key, start = [], ROOT, 0
    for index, run in enumerate(manifest["runs"]):
        for token in ids[start : start + run["tokens"]]:
            key += token.to_bytes(8, "little")
        key, start = hashlib.sha256(key).digest(), start + run["tokens"]
        assert run["key"] == key.hex()
        if run["page"] is None:
            found.append(None)
            continue
        own = [place[name] for name in place if name.startswith(f"{index}.")]
        assert hashlib.sha256(body[own[0][0] : own[-1][1]]).hexdigest() == run["page"]["digest"]
        layout, kept = manifest["layouts"][run["page"]["layout"]], {}
        for letter, name, size in (("k", "keys", "key_dim"), ("v", "values", "value_dim")):
            for number, part in enumerate(layout[name]):
                (group,) = [g for g in manifest["groups"] if set(part["layers"]) <= set(g["layers"])]
                read = (f"{index}.{letter}{number}", part, run["tokens"], group["heads"], group[size])
                rows = _second_part(*read, manifest["dtype"], body, place)
                if "balance" in part:
                    rows = _second_balance(manifest, part, rows)
                kept.update({(letter, layer): row for layer, row in zip(part["layers"], rows, strict=True)})
        found.append(kept)
    state = _second_state(manifest, header, body) if "state" in manifest else None
    return {"ids": ids, "pages": found, "manifest": manifest, "state": state}


def _second_balance(manifest, part, rows):
    """Keys divided by their factors, but for the native ones."""
    steps, per_layer, start = bytes.fromhex(manifest["balances"][part["balance"]]), {}, 0
    of = {layer: group for group in manifest["groups"] for layer in group["layers"]}
    for layer in sorted(of):
        size = of[layer]["heads"] * of[layer]["key_dim"]
        per_layer[layer], start = [2 ** ((step - 128) / 8) for step in steps[start : start + size]], start + size
    assert start == len(steps)
    out = []
    for layer, heads in zip(part["layers"], rows, strict=True):
        dim = of[layer]["key_dim"]
        factors = [per_layer[layer][h * dim : (h + 1) * dim] for h in range(len(heads))]
        out.append(
            [
                [
                    row if t < part["native"] else [x / f for x, f in zip(row, factors[h], strict=True)]
                    for t, row in head
                ]
                for h, head in enumerate(map(enumerate, heads))
            ]
        )
    return out


def _second_state(manifest, header, body) -> dict[tuple[int, str], list[float]]:
    """Flat numbers by layer and name."""
    said = manifest["state"]
    assert said["tokens"] == sum(run["tokens"] for run in manifest["runs"])
    entries = [header[f"s{number}"] for number in range(len(said["tensors"]))]
    first, last = entries[0]["data_offsets"][0], entries[-1]["data_offsets"][1]
    assert hashlib.sha256(body[first:last]).hexdigest() == said["digest"]
    found = {}
    for entry, tensor in zip(entries, said["tensors"], strict=True):
        assert (entry["dtype"], entry["shape"]) == (tensor["dtype"], tensor["shape"])
        code, raw = {"F32": "f", "F16": "e"}[tensor["dtype"]], body[slice(*entry["data_offsets"])]
        found[tensor["layer"], tensor["name"]] = [value for (value,) in struct.iter_unpack("<" + code, raw)]
    return found


def _second_part(prefix, part, tokens, heads, dim, dtype, body, place):
    """Nested lists [L][H][T][D] of the keys or values of some layers."""
    layers, native, plane = len(part["layers"]), part["native"], part["plane"]
    packed = tokens - native

    def numbers(name: str, code: str, *shape: int):
        flat_values = list(struct.iter_unpack("<" + code, body[slice(*place[prefix + name])]))
        values = [value for (value,) in flat_values]
        for size in reversed(shape):
            values = [values[i : i + size] for i in range(0, len(values), size)]
        return values[0]

    code = {"F32": "f", "F16": "e"}[dtype]
    out = [[[] for _ in range(heads)] for _ in range(layers)]
    if native:
        rows = numbers("n", code, layers, heads, native, dim)
        out = [[[*rows[la][h]] for h in range(heads)] for la in range(layers)]
    if plane is None:
        return out
    bits, per_channel = plane["bits"], plane["group"] == "channel"
    multiple = 8 if bits == 3 else 8 // bits
    width = -(-dim // multiple) * multiple
    codes = numbers("c", "B", layers, heads, packed, width * bits // 8)
    axis = packed if per_channel else dim
    size = min(plane["group_size"] or axis, axis)
    groups = -(-axis // size)
    shape = (groups, dim) if per_channel else (packed, groups)
    scale = numbers("s", "e", layers, heads, *shape)
    low = numbers("m", "e", layers, heads, *shape) if plane["minimum"] else None
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
