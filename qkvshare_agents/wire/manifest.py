"""What a package says about itself, and the one table of tensors that follows from it (FORMAT.md)."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

from qkvshare_agents.errors import PackageError
from qkvshare_agents.kv import codec
from qkvshare_agents.kv.balance import Balance
from qkvshare_agents.kv.shape import LayerGroup
from qkvshare_agents.model.canary import Canary
from qkvshare_agents.model.fingerprint import Fingerprint
from qkvshare_agents.wire import checks, container, manifest_extras
from qkvshare_agents.wire.container import Shape
from qkvshare_agents.wire.integrity import ALGORITHMS
from qkvshare_agents.wire.manifest_extras import MAX_LAYERS, NATIVE_DTYPES, StateHead

FORMAT, VERSION = "qkvshare", "2"
MAX_RUNS = 2**14
MAX_TOKENS = 2**24
MAX_RUN_TOKENS = 2**16
MAX_WIDTH = 2**16  # heads, head size
MAX_HOPS = 2**16  # a handoff a second for 18 hours; counting stops there, so that what came in can always be sent on


@dataclass(frozen=True)
class Plane:
    """How keys or values of some layers are packed; the fields of `codec.Encoded`. minimum: whether one is stored."""

    bits: int
    group: codec.Group
    group_size: int | None
    rotated: bool
    dim: int
    minimum: bool


@dataclass(frozen=True)
class PartHead:
    """Keys or values of some layers of one group: the first `native` tokens as they are, the rest packed.

    balance: which of the manifest's balances the packed ones were multiplied by; not written where there is none.
    """

    layers: tuple[int, ...]
    native: int
    plane: Plane | None
    balance: int | None = None


@dataclass(frozen=True)
class Layout:
    """What a page is made of, which many pages have in common."""

    keys: tuple[PartHead, ...]
    values: tuple[PartHead, ...]

    @property
    def layers(self) -> frozenset[int]:
        return frozenset(chain.from_iterable(part.layers for part in self.keys))


@dataclass(frozen=True)
class PageHead:
    """A page that travels. digest: of its bytes, in hex. layout: which of the manifest's."""

    digest: str
    hops: int
    layout: int


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

    ledger: (text, start, stop): what a member said, and which ids it is. groups: of layers whose KV is alike.
    dtype: of native tokens. ids_digest: of the tensor `ids`, in hex. signed: whether the MAC needs the secret.
    canary: what the sender's model expected behind the last tokens that the runs cover. state: recurrent state behind
    them. balances: factors of key channels. Neither is written where there is none, as in packages of older releases.
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
    groups: tuple[LayerGroup, ...]
    layouts: tuple[Layout, ...]
    dtype: str
    algorithm: str
    ids_digest: str
    signed: bool
    canary: Canary | None
    state: StateHead | None = None
    balances: tuple[Balance, ...] = ()

    def to_text(self) -> str:
        table = asdict(self)
        if self.state is None:
            del table["state"]
        table["balances"] = [b"".join(balance.steps).hex() for balance in self.balances]
        if not self.balances:
            del table["balances"]
        for part in chain.from_iterable(layout["keys"] + layout["values"] for layout in table["layouts"]):
            if part["balance"] is None:
                del part["balance"]
        return json.dumps(table, separators=(",", ":"), ensure_ascii=False)

    def tensors(self) -> tuple[tuple[str, str, Shape], ...]:
        """(name, dtype, shape) of every tensor of the package, in order, without padding."""
        pages = ((i, run) for i, run in enumerate(self.runs) if run.page)
        inner = chain.from_iterable(self.page_tensors(i, run) for i, run in pages)
        state = self.state.table() if self.state else ()
        return ("ids", "I64", (self.tokens,)), *inner, *state, ("mac", "U8", (32,))

    @cached_property
    def _group_of(self) -> dict[int, LayerGroup]:
        return {layer: group for group in self.groups for layer in group.layers}

    def page_tensors(self, index: int, run: Run) -> list[tuple[str, str, Shape]]:
        """Those of one page: of each part native tokens, then codes, scale and minimum."""
        assert run.page is not None
        layout = self.layouts[run.page.layout]
        table: list[tuple[str, str, Shape]] = []
        for what, parts in (("k", layout.keys), ("v", layout.values)):
            for number, part in enumerate(parts):
                group = self._group_of[part.layers[0]]
                dim = group.key_dim if what == "k" else group.value_dim
                rows, name = (len(part.layers), group.heads), f"{index}.{what}{number}"
                if part.native:
                    table.append((f"{name}n", self.dtype, (*rows, part.native, dim)))
                if part.plane:
                    table += _packed_tensors(name, part.plane, rows, run.tokens - part.native)
        return table


def _packed_tensors(name: str, plane: Plane, rows: Shape, tokens: int) -> list[tuple[str, str, Shape]]:
    grouped = tokens if plane.group == "channel" else plane.dim
    groups = -(-grouped // min(plane.group_size or grouped, grouped))
    scale = (groups, plane.dim) if plane.group == "channel" else (tokens, groups)
    table: list[tuple[str, str, Shape]] = [(f"{name}c", "U8", (*rows, tokens, packed_bytes(plane.dim, plane.bits)))]
    for suffix in ("s", "m") if plane.minimum else ("s",):
        table.append((f"{name}{suffix}", "F16", (*rows, *scale)))
    return table


def packed_bytes(dim: int, bits: int) -> int:
    """Bytes of one packed vector: `dim` is filled up to whole bytes, at 3 bits to 8 values."""
    multiple = 8 if bits == 3 else 8 // bits
    return -(-dim // multiple) * multiple * bits // 8


def read(text: str) -> Manifest:
    """Parse and check everything that does not need the tensors. Raises PackageError."""
    table = container.parse_json(checks.utf8(text))
    absent = tuple(name for name in ("state", "balances") if isinstance(table, dict) and name not in table)
    m = checks.table(table, Manifest, "manifest", absent)
    aspects = checks.table(m["fingerprint"], Fingerprint, "fingerprint")
    for aspect, value in aspects.items():
        checks.string(value, f"fingerprint.{aspect}")
    checks.hexadecimal(m["id"], 32, "id")
    checks.hexadecimal(m["ids_digest"], 64, "ids_digest")
    checks.whole(m["created_ms"], 0, 2**53, "created_ms")
    checks.whole(m["expires_ms"], 0, 2**53, "expires_ms")
    tokens = checks.whole(m["tokens"], 1, MAX_TOKENS, "tokens")
    checks.choice(m["algorithm"], ALGORITHMS, "algorithm")
    checks.choice(m["dtype"], NATIVE_DTYPES, "dtype")
    checks.choice(m["signed"], (True, False), "signed")
    checks.string(m["handoff"], "handoff")
    if not isinstance(m["metadata"], dict):
        raise PackageError("metadata must be a table of strings")
    for part in chain.from_iterable(m["metadata"].items()):
        checks.string(part, "metadata")
    groups = tuple(_group(entry) for entry in checks.entries(m["groups"], MAX_LAYERS, "groups"))
    layers = sorted(chain.from_iterable(group.layers for group in groups))
    if layers != list(range(len(layers))):
        raise PackageError("the groups' layers are not 0, 1, 2, ..., each once")
    of = {layer: group for group in groups for layer in group.layers}
    balances = () if "balances" in absent else manifest_extras.balances(m["balances"], groups)
    layouts = tuple(_layout(entry, of, len(balances)) for entry in checks.entries(m["layouts"], MAX_RUNS, "layouts"))
    runs = tuple(_run(entry, len(layouts)) for entry in checks.entries(m["runs"], MAX_RUNS, "runs"))
    covered = sum(run.tokens for run in runs)
    if covered > tokens:
        raise PackageError(f"the runs cover more than the {tokens} token ids")
    if any(not run.sealed for run in runs[:-1]):
        raise PackageError("a run that is not sealed can only be the last")
    _check_pages(runs, layouts)
    ledger = tuple(_spoken(entry, tokens) for entry in checks.entries(m["ledger"], MAX_RUNS, "ledger"))
    read_parts = {"groups": groups, "layouts": layouts, "runs": runs, "ledger": ledger}
    canary = manifest_extras.canary(m["canary"], covered)
    state = None if "state" in absent else manifest_extras.state(m["state"], covered)
    given = {**m, "fingerprint": Fingerprint(**aspects), **read_parts, "canary": canary}
    return Manifest(**{**given, "state": state, "balances": balances})


def _check_pages(runs: tuple[Run, ...], layouts: tuple[Layout, ...]) -> None:
    parts = [layout.keys + layout.values for layout in layouts]
    if sum(len(parts[run.page.layout]) for run in runs if run.page) > container.MAX_TENSORS:  # before looking at each
        raise PackageError(f"the runs imply more than {container.MAX_TENSORS:,} tensors")
    for run in runs:
        for part in parts[run.page.layout] if run.page else ():
            if part.native > run.tokens or (part.plane is None) != (part.native == run.tokens):
                raise PackageError("a part needs packed keys or values for exactly the tokens that are not native")


def _group(entry: Any) -> LayerGroup:
    g = checks.table(entry, LayerGroup, "group")
    for name in ("heads", "key_dim", "value_dim"):
        checks.whole(g[name], 1, MAX_WIDTH, f"group.{name}")
    return LayerGroup(_layers(g["layers"]), g["heads"], g["key_dim"], g["value_dim"])


def _layers(entry: Any) -> tuple[int, ...]:
    given = checks.entries(entry, MAX_LAYERS, "layers")
    layers = tuple(checks.whole(layer, 0, MAX_LAYERS - 1, "a layer") for layer in given)
    if not layers or any(a >= b for a, b in pairwise(layers)):
        raise PackageError("layers must be named in ascending order, and at least one")
    return layers


def _layout(entry: Any, of: Mapping[int, LayerGroup], balances: int) -> Layout:
    table = checks.table(entry, Layout, "layout")
    keys, values = (
        tuple(_part(part, what, of, balances) for part in checks.entries(table[what], MAX_LAYERS, what))
        for what in ("keys", "values")
    )
    held = [sorted(chain.from_iterable(part.layers for part in parts)) for parts in (keys, values)]
    if held[0] != held[1] or len(set(held[0])) != len(held[0]):
        raise PackageError("a page needs keys and values of the same layers, each once")
    return Layout(keys, values)


def _part(entry: Any, what: str, of: Mapping[int, LayerGroup], balances: int) -> PartHead:
    balanced = isinstance(entry, dict) and "balance" in entry
    p = checks.table(entry, PartHead, "part", () if balanced else ("balance",))
    layers = _layers(p["layers"])
    group = of.get(layers[0])
    if group is None or any(of.get(layer) is not group for layer in layers):
        raise PackageError("the layers of a part are not of one group")
    plane = _plane(p["plane"], group.key_dim if what == "keys" else group.value_dim)
    native = checks.whole(p["native"], 0, MAX_RUN_TOKENS, "part.native")
    if not balanced:
        return PartHead(layers, native, plane)
    if what != "keys" or plane is None or not plane.rotated:
        raise PackageError("only keys that are packed and rotated are balanced")
    return PartHead(layers, native, plane, checks.whole(p["balance"], 0, balances - 1, "part.balance"))


def _run(entry: Any, layouts: int) -> Run:
    r = checks.table(entry, Run, "run")
    tokens = checks.whole(r["tokens"], 1, MAX_RUN_TOKENS, "run.tokens")
    checks.hexadecimal(r["key"], 64, "run.key")
    checks.choice(r["sealed"], (True, False), "run.sealed")
    if r["page"] is None:
        return Run(tokens, r["key"], r["sealed"], None)
    p = checks.table(r["page"], PageHead, "page")
    checks.hexadecimal(p["digest"], 64, "page.digest")
    checks.whole(p["hops"], 0, MAX_HOPS, "page.hops")
    checks.whole(p["layout"], 0, layouts - 1, "page.layout")
    return Run(tokens, r["key"], r["sealed"], PageHead(**p))


def _plane(entry: Any, dim: int) -> Plane | None:
    if entry is None:
        return None
    p = checks.table(entry, Plane, "plane")
    checks.choice(p["bits"], codec.WIDTHS, "bits")
    checks.choice(p["group"], ("channel", "token"), "group")
    for name in ("rotated", "minimum"):
        checks.choice(p[name], (True, False), name)
    if p["group_size"] is not None:
        checks.whole(p["group_size"], 1, MAX_WIDTH, "group_size")
    checks.whole(p["dim"], dim, dim, "dim")
    return Plane(**p)


def _spoken(entry: Any, tokens: int) -> tuple[str, int, int]:
    text, start, stop = checks.exactly(checks.entries(entry, 3, "ledger entry"), 3)
    checks.whole(start, 0, tokens - 1, "ledger start")
    return checks.string(text, "ledger text"), start, checks.whole(stop, start + 1, tokens, "ledger stop")
