"""A handoff's payload: the pages of one conversation's prefix, and everything needed to trust and place them.

`Package.write` gives bytes that FORMAT.md specifies; `read` takes them from anywhere and believes nothing. A page
that another conversation shares only in part travels cropped: its further tokens are not the receiver's to see.
"""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from qkvshare_agents.errors import PackageError
from qkvshare_agents.kv.balance import Balance
from qkvshare_agents.kv.codec import Encoded
from qkvshare_agents.kv.page import Page
from qkvshare_agents.kv.part import Part
from qkvshare_agents.kv.shape import LayerGroup
from qkvshare_agents.kv.state import State, StatePart
from qkvshare_agents.model.canary import Canary
from qkvshare_agents.model.fingerprint import Fingerprint
from qkvshare_agents.store.runs import Step
from qkvshare_agents.wire import container, integrity, manifest
from qkvshare_agents.wire.container import Contents, Entry
from qkvshare_agents.wire.manifest import FORMAT, MAX_HOPS, VERSION, Layout, Manifest, PageHead, PartHead, Plane, Run
from qkvshare_agents.wire.manifest_extras import NATIVE_DTYPES, StateHead, StateTensor
from qkvshare_agents.wire.payload import Payload
from qkvshare_kernels.memory import Blocks

LIFETIME_MS = 600_000
MAX_LIFETIME_MS = 24 * 3_600_000  # a receiver remembers for as long what came in
CLOCK_SKEW_MS = 60_000
_LARGEST = torch.finfo(torch.float16).max
_SMALLEST_SCALE = 2.0**-14
_DTYPES = {"U8": torch.uint8, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Package:
    """ids: the transcript as far as the sender knows it; `steps` cover the first `covered_tokens` of them.

    groups: layers whose KV is alike. ledger: (text, start, stop): what a member said is ids[start:stop]. handoff:
    the instruction that goes with it. metadata: free strings, e.g. turn, goal. canary: of the covered tokens. state:
    recurrent state behind all of them, if the model has any; then the canary is of the last tokens read once more.
    """

    ids: tuple[int, ...]
    steps: tuple[Step, ...]
    fingerprint: Fingerprint
    groups: tuple[LayerGroup, ...]
    ledger: tuple[tuple[str, int, int], ...] = ()
    handoff: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    created_ms: int = field(default_factory=lambda: int(time.time() * 1000))
    expires_ms: int = field(default_factory=lambda: int(time.time() * 1000) + LIFETIME_MS)
    canary: Canary | None = None
    state: State | None = None

    @property
    def covered_tokens(self) -> int:
        return sum(step.tokens for step in self.steps)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the tensors of all pages that travel, and of the state."""
        pages = sum(t.nbytes for step in self.steps if step.page for t in _tensors(step.page))
        return pages + (self.state.nbytes if self.state else 0)

    def write(self, *, secret: str = "", algorithm: str | None = None) -> Payload:
        """The bytes, in pieces that are the pages' own memory where it is contiguous and on the CPU.

        secret: signs them. algorithm: `sha256` or `blake3` (default: the fastest that is installed). Raises
        PackageError for more tokens than the header may describe, and for state of a kind that has no place in it.
        """
        algorithm = algorithm or integrity.preferred()
        pages = [[_raw(t) for t in _tensors(step.page)] for step in self.steps if step.page]
        ids = _raw(torch.tensor(self.ids, dtype=torch.int64))
        digests = iter([integrity.digest(algorithm, container.padded(page)).hex() for page in pages])
        state = [_raw(part.tensor) for part in self.state.parts] if self.state else []
        layouts: dict[Layout, int] = {}
        balances: dict[Balance, int] = {}
        described = Manifest(
            id=self.id, created_ms=self.created_ms, expires_ms=self.expires_ms, fingerprint=self.fingerprint,
            tokens=len(self.ids), runs=tuple(_run(step, digests, layouts, balances) for step in self.steps),
            ledger=self.ledger, handoff=self.handoff, metadata=self.metadata, groups=self.groups, dtype=self._dtype,
            layouts=tuple(layouts), balances=tuple(balances), algorithm=algorithm, signed=bool(secret),
            ids_digest=integrity.digest(algorithm, [ids]).hex(), canary=self.canary,
            state=_state_head(self.state, algorithm, state),
        )  # fmt: skip
        metadata = {"format": FORMAT, "version": VERSION, "manifest": described.to_text()}
        head = container.write_head(container.place(described.tensors()), metadata)
        mac = integrity.mac(algorithm, secret, head)
        return Payload([head, *container.padded([ids, *chain.from_iterable(pages), *state, mac])])

    @property
    def _dtype(self) -> str:
        parts = chain.from_iterable(step.page.parts for step in self.steps if step.page)
        return next((_NAMES[part.native.dtype] for part in parts if part.native is not None), "F32")


def inspect(payload: Payload) -> tuple[Contents, Manifest]:
    """Everything but the tensors, whoever signed it. Raises PackageError."""
    contents = container.parse(payload)
    kind, version = contents.metadata.get("format"), contents.metadata.get("version", "")
    if kind != FORMAT:
        raise PackageError(f"a safetensors file, but no package (format {str(kind)[:20]!r}, not {FORMAT!r})")
    if version != VERSION:
        raise PackageError(f"format version {version[:20]!r}; this release reads version {VERSION!r}: update one side")
    if contents.metadata.keys() != {"format", "version", "manifest"}:
        raise PackageError(f"unknown metadata: version {VERSION} has format, version and manifest")
    described = manifest.read(contents.metadata["manifest"])
    if contents.entries != container.place(described.tensors()):
        raise PackageError("the tensors are not those, or not in the order, that the manifest describes")
    return contents, described


def read(payload: Payload, *, secret: str = "", now_ms: int | None = None) -> Package:
    """Check and open. Raises PackageError, whose text says what is wrong, for anything but a whole, fresh package.

    secret: what it must be signed with; "" accepts unsigned ones only. Tensors are views of the payload if that
    is `lasting`, else copies, so that a page that is kept does not keep all of the payload.
    """
    reader = _Reader(payload)
    described = reader.described
    reader.authenticate(secret)
    now_ms = int(time.time() * 1000) if now_ms is None else now_ms
    if described.created_ms > now_ms + CLOCK_SKEW_MS:
        raise PackageError(f"the package is dated {(described.created_ms - now_ms) / 1000:.0f} s in the future")
    if described.expires_ms < now_ms:
        raise PackageError(f"the package expired {(now_ms - described.expires_ms) / 1000:.0f} s ago")
    lifetime_ms = described.expires_ms - described.created_ms
    if lifetime_ms > MAX_LIFETIME_MS:
        raise PackageError(
            f"the package lives {lifetime_ms / 1000:.0f} s; one may live {MAX_LIFETIME_MS / 1000:.0f} s at most, so "
            "that receivers can remember it as long"
        )
    reader.check_padding()
    ids = reader.ids()
    steps = tuple(
        Step(run.tokens, bytes.fromhex(run.key), run.sealed, reader.page(index, run))
        for index, run in enumerate(described.runs)
    )
    return Package(
        ids, steps, described.fingerprint, described.groups, described.ledger, described.handoff, described.metadata,
        described.id, described.created_ms, described.expires_ms, described.canary, reader.state(),
    )  # fmt: skip


class _Reader:
    """Takes what the manifest describes out of a payload, and checks it against the digests."""

    def __init__(self, payload: Payload) -> None:
        self._payload = payload
        self._contents, self.described = inspect(payload)
        self._places = {entry.name: entry for entry in self._contents.entries}
        self._blocks = Blocks(payload.nbytes)

    def authenticate(self, secret: str) -> None:
        described, contents = self.described, self._contents
        if described.signed and not secret:
            raise PackageError("the package is signed, and this host has no secret (QKVSHARE_SECRET)")
        if secret and not described.signed:
            raise PackageError("the package is not signed, and this host has a secret (QKVSHARE_SECRET)")
        given = bytes(self._payload.read(*contents.of(self._places["mac"])))
        if not integrity.equal(given, integrity.mac(described.algorithm, secret, contents.head)):
            wrong = "the signature is wrong: damaged, or another secret"
            raise PackageError(wrong if secret else "the header is damaged")

    def check_padding(self) -> None:
        padding = (entry for entry in self._contents.entries if container.is_padding(entry))
        if any(any(self._payload.read(*self._contents.of(entry))) for entry in padding):
            raise PackageError("padding that is not zero")

    def ids(self) -> tuple[int, ...]:
        place = self._places["ids"]
        self._check([place], self.described.ids_digest, "the token ids are damaged")
        ids = self._tensor(place)
        if int(ids.min()) < 0:
            raise PackageError("a token id is negative")
        return tuple(ids.tolist())

    def page(self, index: int, run: Run) -> Page | None:
        if run.page is None:
            return None
        named = [self._places[name] for name, _, _ in self.described.page_tensors(index, run)]
        self._check(named, run.page.digest, f"page {index} is damaged")
        tensors = iter([self._tensor(entry) for entry in named])
        layout = self.described.layouts[run.page.layout]
        of = self.described.balances
        keys, values = (tuple(_part(h, tensors, index, of) for h in heads) for heads in (layout.keys, layout.values))
        return Page(run.tokens, keys, values, min(run.page.hops + 1, MAX_HOPS))

    def state(self) -> State | None:
        head = self.described.state
        if head is None:
            return None
        named = [self._places[name] for name, _, _ in head.table()]
        self._check(named, head.digest, "the recurrent state is damaged")
        parts = [StatePart(t.layer, t.name, self._tensor(e)) for t, e in zip(head.tensors, named, strict=True)]
        if not all(bool(part.tensor.isfinite().all()) for part in parts):
            raise PackageError("the recurrent state holds NaN or Inf")
        return State(head.tokens, tuple(parts))

    def _check(self, entries: Sequence[Entry], digest: str, wrong: str) -> None:
        places = [self._contents.of(entry) for entry in entries] or [(0, 0)]
        covered = self._payload.extent(places[0][0], places[-1][1])
        if integrity.digest(self.described.algorithm, covered).hex() != digest:
            raise PackageError(wrong)

    def _tensor(self, entry: Entry) -> Tensor:
        start, stop = self._contents.of(entry)
        view = self._payload.read(start, stop) if self._payload.lasting else memoryview(b"")
        if view.readonly:
            view, done = self._blocks.take(stop - start), 0
            for part in self._payload.extent(start, stop):
                view[done : done + part.nbytes] = part
                done += part.nbytes
        return torch.frombuffer(view, dtype=_DTYPES[entry.dtype]).view(entry.shape)


def _part(head: PartHead, tensors: Iterator[Tensor], index: int, balances: Sequence[Balance]) -> Part:
    native = next(tensors) if head.native else None
    if native is not None and not bool(native.isfinite().all()):
        raise PackageError(f"page {index} holds NaN or Inf")
    balance = None if head.balance is None else balances[head.balance]
    largest = _LARGEST if balance is None else _LARGEST * balance.least(head.layers)
    return Part(head.layers, native, _encoded(head.plane, tensors, index, largest) if head.plane else None, balance)


def _encoded(plane: Plane, tensors: Iterator[Tensor], index: int, most: float) -> Encoded:
    """most: how large the values that are packed may be."""
    codes, scale = next(tensors), next(tensors)
    minimum = next(tensors) if plane.minimum else None
    smallest, largest = (float(x) for x in scale.aminmax())  # NaN if there is one, which passes no comparison
    reach = largest * ((1 << plane.bits) - 1)
    if minimum is None:
        reach /= 2
    else:
        low, high = (float(x) for x in minimum.aminmax())
        reach = reach - low if -low > high else reach + high
    limit = most / plane.dim**0.5 if plane.rotated else most  # rotating back may add a head's values up
    if not (smallest >= _SMALLEST_SCALE and reach <= limit):
        raise PackageError(f"page {index} has a scale or minimum that is NaN, Inf, not positive or too large")
    return Encoded(codes, scale, minimum, plane.bits, plane.group, plane.dim, plane.group_size, plane.rotated)


def _tensors(page: Page) -> list[Tensor]:
    return list(chain.from_iterable(part.tensors() for part in page.parts))


def _raw(tensor: Tensor) -> memoryview:
    """A tensor's bytes; of its own memory if it is contiguous and on the CPU."""
    data: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(data)


def _run(step: Step, digests: Iterator[str], layouts: dict[Layout, int], balances: dict[Balance, int]) -> Run:
    page, head = step.page, None
    if page:
        layout = Layout(*(tuple(_part_head(part, balances) for part in parts) for parts in (page.keys, page.values)))
        head = PageHead(next(digests), min(page.hops, MAX_HOPS), layouts.setdefault(layout, len(layouts)))
    return Run(step.tokens, step.key.hex(), step.sealed, head)


def _part_head(part: Part, balances: dict[Balance, int]) -> PartHead:
    packed = part.packed
    balance = balances.setdefault(part.balance, len(balances)) if packed and part.balance else None
    return PartHead(part.layers, part.native_tokens, _plane(packed) if packed else None, balance)


def _plane(e: Encoded) -> Plane:
    return Plane(e.bits, e.group, e.group_size, e.rotated, e.dim, e.minimum is not None)


def _state_head(state: State | None, algorithm: str, raw: Sequence[memoryview]) -> StateHead | None:
    if state is None:
        return None
    for part in state.parts:
        if _NAMES.get(part.tensor.dtype) not in NATIVE_DTYPES or not part.tensor.numel() or not part.tensor.dim():
            raise PackageError(f"recurrent state can't be moved: {part}")
    tensors = (StateTensor(p.layer, p.name, _NAMES[p.tensor.dtype], tuple(p.tensor.shape)) for p in state.parts)
    return StateHead(state.tokens, integrity.digest(algorithm, container.padded(raw)).hex(), tuple(tensors))
