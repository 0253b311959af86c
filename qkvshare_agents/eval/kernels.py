"""What the kernels reach of the rate at which this machine copies memory, in one process; no model is loaded."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.kv.page import PRESETS, Page, Precision, seal
from qkvshare_agents.kv.span import Block, Span
from qkvshare_kernels import backend, memory
from qkvshare_kernels.attention import PackedPages

# Keys and values at one width each: presets where there is one
PRECISIONS = {8: PRESETS["safe"], 4: PRESETS["compact"], 3: Precision(3, 3), 2: Precision(2, 2)}


@dataclass(frozen=True)
class Sizes:
    """Of the cache that is read and written; SmolLM2-135M's, unless said."""

    layers: int = 30
    heads: int = 3
    query_heads: int = 9
    head_size: int = 64
    tokens: int = 2048


def run(
    *, device: str = "cpu", implementations: Sequence[str] = (), sizes: Sizes | None = None, rounds: int = 7
) -> dict[str, Any]:
    """Rows of op, bits, impl, gb_per_s, copy_gb_per_s, fresh_copy_gb_per_s, ms, sdpa_ms, and what was measured on.

    quantize, dequantize: all pages of the cache, keys (rotated) and values as the presets treat them, without sinks.
    GB/s are bytes read and written; the copy moves as many, with the same threads, into memory that is there already;
    the fresh copy is torch's clone, which takes its memory first, as quantize does. attention: one token in every
    layer; its GB/s are those of the packed pages, and sdpa_ms is torch's attention over a native cache of the same
    length. ms: medians over `rounds`, in which what is compared alternates. Raises InvalidSetting.
    """
    sizes, place = sizes or Sizes(), torch.device(device)
    if rounds < 1 or sizes.tokens < 64 or sizes.tokens % 64:
        raise InvalidSetting(f"rounds ({rounds}) must be at least 1, tokens ({sizes.tokens}) a multiple of 64")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise InvalidSetting("this torch sees no CUDA device")
    names = implementations or (("cpu", "torch") if place.type == "cpu" else ("triton", "torch"))
    try:
        chosen = [backend.kernels(place, name) for name in names]
    except backend.KernelsUnavailable as error:
        raise InvalidSetting(str(error)) from error
    dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    rows = []
    for bits in PRECISIONS:
        for kernels in chosen:
            with _using(kernels.name):
                rows += _Measured(kernels.name, bits, sizes, place, dtype, rounds).rows()
    return {
        "rows": rows,
        "sizes": vars(sizes),
        "rounds": rounds,
        "dtype": str(dtype),
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


class _Measured:
    """One implementation at one width."""

    def __init__(
        self, name: str, bits: int, sizes: Sizes, device: torch.device, dtype: torch.dtype, rounds: int
    ) -> None:
        self._name, self._bits, self._sizes, self._device, self._rounds = name, bits, sizes, device, rounds
        shape = (2, sizes.layers, sizes.heads, sizes.tokens, sizes.head_size)
        self._native, self._out = (memory.empty(shape, dtype, device) for _ in range(2))  # as a cache is held
        self._native.normal_()
        self._out.fill_(1)
        self._read, self._written = (list(self._spans(cache)) for cache in (self._native, self._out))
        self._query = torch.randn(sizes.query_heads, sizes.head_size, device=device, dtype=dtype)
        self._scaling = sizes.head_size**-0.5

    def rows(self) -> list[dict[str, Any]]:
        pages = self._quantize()
        packed_bytes = sum(page.nbytes for page in pages)
        moved = self._native.nbytes + packed_bytes
        layers = [PackedPages() for _ in range(self._sizes.layers)]
        for page in pages:
            for layer, packed in enumerate(layers):
                keys, values = page.layer(layer, page.tokens)
                assert keys.packed and values.packed
                packed.append(keys.packed, values.packed)
        return [
            self._row("quantize", moved, self._quantize, fresh=True),
            self._row("dequantize", moved, lambda: self._dequantize(pages)),
            self._row("attention", packed_bytes, lambda: self._attend(layers), self._sdpa),
        ]

    def _spans(self, cache: Tensor) -> Iterator[Span]:
        size, layers = PRECISIONS[self._bits].page_size, tuple(range(self._sizes.layers))
        for start in range(0, self._sizes.tokens, size):
            part = cache[:, :, :, start : start + size]
            yield Span(size, (Block(layers, part[0], part[1]),))

    def _quantize(self) -> list[Page]:
        return [seal(span, PRECISIONS[self._bits], starts_sequence=False) for span in self._read]

    def _dequantize(self, pages: Sequence[Page]) -> None:
        for page, span in zip(pages, self._written, strict=True):
            page.open_into(span)

    def _attend(self, layers: Sequence[PackedPages]) -> None:
        kernels = backend.kernels(self._device)
        for packed in layers:
            kernels.attention(self._query, packed, (), self._scaling)

    def _sdpa(self) -> None:
        query = self._query.view(1, self._sizes.heads, -1, self._sizes.head_size)  # query heads of a key head as tokens
        for keys, values in zip(*self._native, strict=True):
            torch.nn.functional.scaled_dot_product_attention(query, keys[None], values[None])

    def _row(
        self, op: str, moved: int, work: Callable[[], Any], sdpa: Callable[[], Any] | None = None, fresh: bool = False
    ) -> dict[str, Any]:
        source, target = (torch.ones(moved // 2, dtype=torch.uint8, device=self._device) for _ in range(2))
        works: dict[str, Callable[[], Any]] = {"this": work, "copy": lambda: target.copy_(source)}
        if sdpa:
            works["sdpa"] = sdpa
        ms = self._medians(works)
        if fresh:  # by itself: what it gives back to the system, others would be given
            ms |= self._medians({"fresh": source.clone})
        return {
            "op": op,
            "bits": self._bits,
            "impl": self._name,
            "gb_per_s": moved / ms["this"] / 1e6,
            "copy_gb_per_s": moved / ms["copy"] / 1e6,
            "fresh_copy_gb_per_s": moved / ms["fresh"] / 1e6 if fresh else None,
            "ms": ms["this"],
            "sdpa_ms": ms.get("sdpa"),
        }

    def _medians(self, works: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        times: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(self._rounds + 1):  # the first round warms up
            for name, work in works.items():
                times[name].append(self._ms(work))
        return {name: statistics.median(spent[1:]) for name, spent in times.items()}

    def _ms(self, work: Callable[[], Any]) -> float:
        self._wait()
        started = time.perf_counter()
        kept = work()  # pages are kept, so giving them back is no part of making them
        self._wait()
        ms = (time.perf_counter() - started) * 1000
        del kept
        return ms

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@contextmanager
def _using(name: str) -> Iterator[None]:
    """What this process' codec runs on, for a while: the benchmark goes the way that a host goes."""
    before = os.environ.get("QKVSHARE_KERNELS")
    os.environ["QKVSHARE_KERNELS"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["QKVSHARE_KERNELS"]
        else:
            os.environ["QKVSHARE_KERNELS"] = before


def show(result: dict[str, Any]) -> None:
    """Print the result of `run` as a table."""
    from rich.console import Console
    from rich.table import Table

    s = result["sizes"]
    table = Table(
        title=f"{s['tokens']} tokens of {s['layers']} x {s['heads']} heads of {s['head_size']}",
        caption="copy: GB/s of a copy of as many bytes into memory that is there already, and this as a share of it. "
        "fresh: torch's clone, which takes its memory first, as quantize does. SDPA: torch's, over native KV, and its "
        "time as a multiple of this one's",
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    for column in ("", "bits", "impl", "ms", "GB/s", "copy", "share", "fresh", "SDPA ms", "x"):
        table.add_column(column, justify="right" if column not in ("", "impl") else "left", no_wrap=True)
    for r in result["rows"]:
        ms, gb_per_s, copy, fresh, sdpa = (
            r[key] for key in ("ms", "gb_per_s", "copy_gb_per_s", "fresh_copy_gb_per_s", "sdpa_ms")
        )
        table.add_row(
            r["op"], str(r["bits"]), r["impl"], _short(ms), _short(gb_per_s), _short(copy), f"{gb_per_s / copy:.0%}",
            _short(fresh), _short(sdpa), _short(sdpa and sdpa / ms),
        )  # fmt: skip
    Console().print(table)


def _short(number: float | None) -> str:
    """At most five characters below 100,000."""
    return "" if number is None else f"{number:.2f}" if number < 10 else f"{number:.{1 if number < 1000 else 0}f}"
