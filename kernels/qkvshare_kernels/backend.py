"""Which implementation of the kernels runs: Triton on GPUs, the CPU library where it is built, plain torch elsewhere.

All of them write the same codes, scales and minima, so that a change in between (a library whose build has finished)
changes no result. `$QKVSHARE_KERNELS` names one that must be used.
"""

import importlib.util
import logging
import os
import threading
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from qkvshare_kernels import attention, cpu, plain
from qkvshare_kernels.attention import Native, PackedPages

NAMES = ("triton", "cpu", "torch")
_log = logging.getLogger("qkvshare")


class KernelsUnavailable(RuntimeError):
    """The implementation that was asked for can't run here; says why."""


class Kernels(Protocol):
    """What every implementation offers; shapes and errors as in `plain` and `attention`."""

    @property
    def name(self) -> str: ...

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
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...

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
    ) -> None: ...

    def attention(self, query: Tensor, packed: PackedPages, native: Sequence[Native], scaling: float) -> Tensor: ...

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor, first: int, interleaved: bool) -> None: ...


class TorchKernels:
    """`plain` as an object."""

    name = "torch"
    quantize = staticmethod(plain.quantize)
    dequantize = staticmethod(plain.dequantize)
    attention = staticmethod(attention.attention)
    turn = staticmethod(plain.turn)


class CpuLibrary:
    """The CPU library of this process: looked for once, and again when a build has finished."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looked = False
        self._kernels: cpu.CpuKernels | None = None
        self._builder: threading.Thread | None = None
        self.failure = ""

    def get(self) -> cpu.CpuKernels | None:
        if not self._looked:
            with self._lock:
                self._look()
        return self._kernels

    def build(self) -> None:
        """Build and load; raises BuildError."""
        cpu.build()
        with self._lock:
            self._looked = False
            self._look()
        if self._kernels is None:
            raise cpu.BuildError(self.failure)

    def build_behind(self) -> None:
        """The same on a thread of its own, once per process; a failure is kept in `failure`."""
        if self.get() is not None or self.failure:
            return
        with self._lock:
            if self._builder is None:
                self._builder = threading.Thread(target=self._try, name="qkvshare-build", daemon=True)
                self._builder.start()

    def wait(self) -> None:
        """Until a build that was begun has ended."""
        if self._builder:
            self._builder.join()

    def _try(self) -> None:
        try:
            self.build()
        except cpu.BuildError as error:
            self.failure = str(error)
            _log.info("%s; plain torch does their work", error)

    def _look(self) -> None:
        if self._looked:
            return
        try:
            self._kernels = cpu.load()
        except (cpu.BuildError, OSError) as error:
            self.failure = str(error)
        self._looked = True


library = CpuLibrary()
_torch = TorchKernels()


def kernels(device: torch.device, name: str | None = None) -> Kernels:
    """The implementation for tensors on `device`: `name`, else $QKVSHARE_KERNELS, else the fastest that is ready.

    Never waits for a build by itself, except where `cpu` is asked for. Raises KernelsUnavailable for one that was
    asked for and can't run.
    """
    asked = name or os.environ.get("QKVSHARE_KERNELS", "")
    if asked:
        return _named(asked, device)
    if device.type == "cuda" and has_triton():
        return _triton()
    return (library.get() if device.type == "cpu" else None) or _torch


def prepare(device: torch.device) -> None:
    """What takes time and needs no turn to wait for it: begins to build the CPU library, if none is there.

    Raises KernelsUnavailable if $QKVSHARE_KERNELS names what can't run here.
    """
    if os.environ.get("QKVSHARE_KERNELS"):
        kernels(device)
    elif device.type == "cpu":
        library.build_behind()


def has_triton() -> bool:
    """Whether triton is installed; does not import it."""
    return importlib.util.find_spec("triton") is not None


def _named(name: str, device: torch.device) -> Kernels:
    if name not in NAMES:
        raise KernelsUnavailable(f"no kernels {name!r}; choose from {', '.join(NAMES)}")
    if name == "torch":
        return _torch
    if name == "cpu":
        if device.type != "cpu":
            raise KernelsUnavailable(f"the cpu kernels don't run on {device.type}; choose triton or torch")
        try:
            if library.get() is None:
                library.build()
        except cpu.BuildError as error:
            raise KernelsUnavailable(f"{error}. They need a C++ compiler and the extra 'cpu'") from error
        found = library.get()
        assert found is not None
        return found
    if not has_triton():
        raise KernelsUnavailable("triton is not installed; the extra 'triton' brings it")
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise KernelsUnavailable(f"triton doesn't run on {device.type}; TRITON_INTERPRET=1 makes it, for tests")
    return _triton()


def _triton() -> Kernels:
    from qkvshare_kernels.triton_kernels import TritonKernels

    return TritonKernels()
