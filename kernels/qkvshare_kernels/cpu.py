"""The kernels on CPUs: C++ (`cpp/`), built once by torch's own extension builder.

The library is kept under $QKVSHARE_HOME (default ~/.cache/qkvshare), in a directory that nobody else may write to. Its
name changes with its sources, its flags and the instructions of this processor, and says the digest of its own bytes:
one that was cut or changed is not loaded but built anew. A build removes those that nothing has loaded for long.
Nothing is built at import or by a call to a kernel: `build` is for whoever has some seconds, and until it has run
somewhere `load` finds nothing.
"""

import ctypes
import hashlib
import math
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from qkvshare_kernels import attention as plain_attention
from qkvshare_kernels import plain, private
from qkvshare_kernels.attention import Native, PackedPages
from qkvshare_kernels.layout import four, norm, row_bytes, side, units, viewed
from qkvshare_kernels.memory import Pool

NAME = "cpu"
_SOURCES = sorted(Path(__file__).with_name("cpp").glob("*.[ch]*"))
_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_packed = Pool()
_LARGEST_BYTES = 1 << 28  # of a library
_KEPT_SECONDS = 7 * 24 * 3600
_MARCH = {"AVX512": "x86-64-v4", "AVX2": "x86-64-v3"}
# A page of one layer is done before threads have woken up
_VALUES_PER_THREAD = 1 << 16
# Larger memory is written past the caches: they would be emptied for what is not read soon
_CACHED_BYTES = 32 << 20
_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_QUANTIZE = (_P, _I, _L, _L, _L, _I, _L, _L, _L, _I, _I, _I, _I, _F, _F, _F, _P, _I, _P, _P, _I)
_ATTENTION = (_P, _P, _L, _I, _I, _I, _P, _L, _P, _L, _I, _F, _F, _L, _I)
_TURN = (_P, _I, _L, _L, _L, _L, _L, _L, _I, _I, _I, _P, _P, _I)
_DEQUANTIZE = (_P, _P, _P, _P, _I, _L, _L, _L, _I, _L, _L, _L, _L, _L, _I, _I, _I, _F, _I, _I, _I)


class BuildError(RuntimeError):
    """The library can't be built or loaded here; says what is missing."""


def directory() -> Path:
    """Where libraries are kept."""
    return Path(os.environ.get("QKVSHARE_HOME") or "~/.cache/qkvshare").expanduser() / "kernels"


def build() -> None:
    """Compile the library unless it is there. Takes seconds, and a C++ compiler and ninja.

    Several processes may do so at once: each builds in a directory of its own, and what is there when they end is
    whole. Raises BuildError.
    """
    try:
        with private.opened(directory(), readable=True) as folder:
            if not _find(folder):
                _forget(directory())
                data = _compiled(directory())
                private.write(folder, f"{_stem()}_{_digest(data)}.so", data)
    except (ImportError, OSError, RuntimeError) as error:  # no setuptools or ninja, no space, no compiler
        raise BuildError(f"the CPU kernels can't be built: {str(error).strip().splitlines()[0]}") from error


def load() -> "CpuKernels | None":
    """The kernels, if their library has been built. Raises BuildError, also where others can change the library."""
    try:
        with private.opened(directory(), make=False, readable=True) as folder:
            if not (name := _find(folder)):
                return None
            with suppress(OSError):
                os.utime(name, dir_fd=folder)
            through = Path(f"/proc/self/fd/{folder}")  # what was checked, whatever the path leads to by now
            return CpuKernels((through if through.exists() else directory()) / name)
    except private.NotPrivate as error:
        raise BuildError(f"the CPU kernels are not loaded: {error}") from error
    except FileNotFoundError:
        return None


def _compiled(beside: Path) -> bytes:
    from torch.utils import cpp_extension

    with tempfile.TemporaryDirectory(dir=beside, prefix="build_") as scratch:
        cpp_extension.load(
            _stem(),
            [str(source) for source in _SOURCES if source.suffix == ".cpp"],
            extra_cflags=_flags(),
            build_directory=scratch,
            is_python_module=False,
        )
        return (Path(scratch) / f"{_stem()}.so").read_bytes()


def _find(folder: int) -> str | None:
    """The name of this machine's library, if it is whole; what is not goes."""
    for name in os.listdir(folder):
        stem, _, digest = name.removesuffix(".so").rpartition("_")
        if stem != _stem():
            continue
        if _digest(private.read(folder, name, _LARGEST_BYTES)) == digest:
            return name
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)
    return None


def _stem() -> str:
    flags = " ".join([*_flags(), torch.__version__, platform.machine()])
    text = b"".join(source.read_bytes() for source in _SOURCES) + flags.encode()
    return f"qkvshare_cpu_{hashlib.sha256(text).hexdigest()[:16]}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _forget(directory: Path) -> None:
    """Remove libraries that no process has loaded lately (those that have keep what they hold), and what builds that
    were killed have left."""
    for found in (*directory.glob("qkvshare_cpu_*.so"), *directory.glob("build_*"), *directory.glob(".*")):
        with suppress(OSError):
            if found.stat().st_mtime < time.time() - _KEPT_SECONDS:
                shutil.rmtree(found) if found.is_dir() else found.unlink()


class CpuKernels:
    """Same signatures as `plain`. What it doesn't take (other devices and types) goes there."""

    name = NAME

    def __init__(self, library: Path) -> None:
        try:
            loaded = ctypes.CDLL(str(library))
            self._quantize, self._dequantize = loaded.qkvshare_quantize, loaded.qkvshare_dequantize
            self._attention, self._turn = loaded.qkvshare_attention, loaded.qkvshare_turn
        except (OSError, AttributeError) as error:
            raise BuildError(f"the CPU kernels can't be loaded: {error}") from error
        self._quantize.argtypes, self._dequantize.argtypes = _QUANTIZE, _DEQUANTIZE
        self._attention.argtypes, self._turn.argtypes = _ATTENTION, _TURN
        self._dequantize.restype = self._attention.restype = self._turn.restype = None

    def quantize(
        self,
        x: Tensor,
        bits: int,
        dim: int,
        *,
        symmetric: bool,
        group_size: int | None = None,
        fit: float = 0.0,
        rotate: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if x.device.type != "cpu" or x.dtype not in _TYPES or x.dim() < 2:
            return plain.quantize(x, bits, dim, symmetric=symmetric, group_size=group_size, fit=fit, rotate=rotate)
        *lead, tokens, size = x.shape
        layers = four(x if x.stride(-1) == 1 or size == 1 else x.contiguous())
        grouped, row = tokens if dim == -2 else size, row_bytes(size, bits)
        group = min(group_size or grouped, grouped)
        count = -(-grouped // group)
        codes = _packed.empty((*lead, tokens, row))
        shape = (*lead, count, size) if dim == -2 else (*lead, tokens, count)
        scale = torch.empty(shape, dtype=torch.float16)
        minimum = None if symmetric else torch.empty(shape, dtype=torch.float16)
        bad = self._quantize(
            layers.data_ptr(), _TYPES[x.dtype], *layers.shape, *_strides(layers), bits, dim == -2, symmetric, group,
            fit, norm(size) if rotate else 0.0, plain.LARGEST, codes.data_ptr(), row, scale.data_ptr(),
            None if minimum is None else minimum.data_ptr(), _threads(x.numel()),
        )  # fmt: skip
        if bad:
            raise ValueError(plain.REFUSAL)
        return codes, scale, minimum

    def dequantize(
        self,
        packed: Tensor,
        scale: Tensor,
        minimum: Tensor | None,
        bits: int,
        dim: int,
        out: Tensor,
        *,
        group_size: int | None = None,
        rotate: bool = False,
    ) -> None:
        *_, tokens, size = out.shape
        if not out.numel():
            return
        native = viewed(out)
        if native is None or out.dtype not in _TYPES or {out.device.type, packed.device.type} != {"cpu"}:
            plain.dequantize(packed, scale, minimum, bits, dim, out, group_size=group_size, rotate=rotate)
            return
        packed, scale, minimum, codes_stride, scale_stride = units(packed, scale, minimum)
        group = min(group_size or out.shape[dim], out.shape[dim])
        if dim == -2:  # the first tokens of a page have its groups
            group = group_size or max(tokens, 1)
        self._dequantize(
            packed.data_ptr(), scale.data_ptr(), None if minimum is None else minimum.data_ptr(), native.data_ptr(),
            _TYPES[out.dtype], *native.shape, *_strides(native), codes_stride, scale_stride, bits, dim == -2, group,
            norm(size) if rotate else 0.0, packed.shape[-1], out.untyped_storage().nbytes() > _CACHED_BYTES,
            _threads(out.numel()),
        )  # fmt: skip

    def attention(self, query: Tensor, packed: PackedPages, native: Sequence[Native], scaling: float) -> Tensor:
        """As `attention.attention`, on codes as they are: a page's scales go into the query and into the weights."""
        native = [run for run in native if run[0].shape[-2]]
        types = {tensor.dtype for run in native for tensor in run}
        fits = len(types) < 2 and types <= _TYPES.keys() and all(t.stride(-1) == 1 for run in native for t in run)
        table = _table(packed)
        if query.device.type != "cpu" or not fits or table is None or not (native or packed.tokens):
            return plain_attention.attention(query, packed, native, scaling)
        heads = native[0][0].shape[0] if native else packed.pages[0][0].codes.shape[0]
        size_v = native[0][1].shape[-1] if native else packed.pages[0][1].dim
        scaled = query.float().contiguous() * scaling
        out = torch.empty(query.shape[0], size_v)
        runs = [
            number
            for keys, values in native
            for number in (
                keys.data_ptr(), values.data_ptr(), keys.shape[-2],
                *(t.stride(i) * t.element_size() for i in (0, 1) for t in (keys, values)),
            )
        ]  # fmt: skip
        threads = _threads((packed.tokens + sum(run[0].shape[-2] for run in native)) * heads * query.shape[-1])
        parts = threads // math.gcd(threads, heads)  # as much for every thread
        self._attention(
            scaled.data_ptr(), out.data_ptr(), heads, query.shape[0] // heads, query.shape[-1], size_v,
            table.data_ptr(), len(packed.pages), (ctypes.c_int64 * max(1, len(runs)))(*runs), len(native),
            _TYPES[types.pop()] if types else 0, norm(query.shape[-1]), norm(size_v), parts, threads,
        )  # fmt: skip
        return out.to(query.dtype)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor, first: int, interleaved: bool) -> None:
        native = viewed(x)
        if native is None or x.dtype not in _TYPES or x.device.type != "cpu":
            plain.turn(x, cos, sin, first, interleaved)
            return
        cos, sin = cos.contiguous(), sin.contiguous()
        self._turn(
            native.data_ptr(), _TYPES[x.dtype], *native.shape[:3], *_strides(native), first, cos.shape[-1],
            interleaved, cos.data_ptr(), sin.data_ptr(), _threads(x.numel()),
        )  # fmt: skip


def _strides(x: Tensor) -> tuple[int, int, int]:
    size = x.element_size()
    layers, heads, tokens, _ = x.stride()
    return layers * size, heads * size, tokens * size


def _threads(values: int) -> int:
    return max(1, min(torch.get_num_threads(), values // _VALUES_PER_THREAD))


def _flags() -> list[str]:
    level = _MARCH.get(torch.backends.cpu.get_cpu_capability()) if platform.machine() in ("x86_64", "AMD64") else None
    wide = [f"-march={level}", "-mprefer-vector-width=512"] if level else []
    return ["-O3", *wide, "-ffp-contract=off", "-fopenmp", "-Wno-psabi"]


def _table(packed: PackedPages) -> Tensor | None:
    """[pages, 17] numbers that `qkvshare_attention` reads pages by; None for forms it doesn't know."""
    known: list[list[int]] = packed.prepared.setdefault(NAME, [])
    table: Tensor | None = packed.prepared.get(f"{NAME} table")
    if table is not None and len(known) == len(packed.pages):
        return table
    for keys, values in packed.pages[len(known) :]:
        sides = [side(keys, "channel"), side(values, "token")]
        if None in sides:
            return None
        known.append([*(n for found in sides for n in found or ()), keys.codes.shape[-2]])
    packed.prepared[f"{NAME} table"] = table = torch.tensor(known, dtype=torch.int64)
    return table
