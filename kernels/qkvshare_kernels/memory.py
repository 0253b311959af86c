"""Fresh memory in huge pages: the page faults of first use take longer than copying into it does."""

import ctypes
import math
import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

_HUGE_BYTES = 2 * 1024**2
_BLOCK_BYTES = 8 * 1024**2
_ALIGNMENT_BYTES = 64


def fresh(nbytes: int) -> memoryview:
    """Private zeroed memory, page-aligned, its whole 2 MB in huge pages where the system has them; freed with its last
    view."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return memoryview(bytearray(nbytes))
    huge = nbytes - nbytes % _HUGE_BYTES
    memory = mmap.mmap(-1, nbytes + (_HUGE_BYTES if huge else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if not huge:
        return memoryview(memory)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_BYTES
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE, start, huge)
    return memoryview(memory)[start : start + nbytes]


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As torch.empty; on CPUs in huge pages, if it is large enough for one."""
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes < _HUGE_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(fresh(nbytes), dtype=dtype).view(shape)


class Blocks:
    """Pieces of blocks of at most 8 MB, so that dropping some of what is kept there frees about that much.

    total_bytes: what will be taken at most (None: not known), so that the last block is no larger than needed.
    """

    def __init__(self, total_bytes: int | None = None) -> None:
        self._left_bytes = total_bytes
        self._block = memoryview(b"")
        self._used_bytes = 0

    def take(self, nbytes: int) -> memoryview:
        """`nbytes` (at least 1) that begin aligned."""
        start = self._used_bytes + -self._used_bytes % _ALIGNMENT_BYTES
        if start + nbytes > self._block.nbytes:
            most = _BLOCK_BYTES if self._left_bytes is None else min(_BLOCK_BYTES, self._left_bytes)
            self._block, start = fresh(max(nbytes, most)), 0
        self._used_bytes = start + nbytes
        if self._left_bytes is not None:
            self._left_bytes -= -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        for place in range(-(-start // _HUGE_BYTES) * _HUGE_BYTES, self._used_bytes, _HUGE_BYTES):
            self._block[place] = 0  # two threads that come to a huge page at once would both clear one
        return self._block[start : self._used_bytes]


class Pool:
    """Memory of tensors that are kept for long, each with a storage of its own size. Thread-safe.

    A block is freed with the last of the tensors in it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = Blocks()

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Bytes of any value."""
        nbytes = math.prod(shape)
        if not nbytes:
            return torch.empty(shape, dtype=torch.uint8)
        with self._lock:
            piece = self._blocks.take(nbytes)
        return torch.frombuffer(piece, dtype=torch.uint8).view(shape)
