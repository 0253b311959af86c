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
    """Pieces of blocks of at most `block_bytes`, so that dropping some of what is kept there frees about that much.

    total_bytes: what will be taken at most (None: not known), so that the last block is no larger than needed.
    """

    def __init__(self, total_bytes: int | None = None, block_bytes: int = _BLOCK_BYTES) -> None:
        self._left_bytes, self._block_bytes = total_bytes, block_bytes
        self._block = memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        """`nbytes` (at least 1) that begin aligned."""
        used = -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if used >= self._block_bytes:
            return fresh(nbytes)
        if used > self._block.nbytes:
            left = self._block_bytes if self._left_bytes is None else min(self._block_bytes, self._left_bytes)
            self._block = fresh(max(used, left))
        piece, self._block = self._block[:nbytes], self._block[used:]
        if self._left_bytes is not None:
            self._left_bytes -= used
        return piece


class Pool:
    """Memory of tensors that are kept for long, and are smaller than a huge page. Thread-safe.

    Each has a storage of its own size. A block is freed with the last of the tensors that share it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = Blocks(block_bytes=_HUGE_BYTES)

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Bytes of any value."""
        nbytes = math.prod(shape)
        if not nbytes:
            return torch.empty(shape, dtype=torch.uint8)
        with self._lock:
            piece = self._blocks.take(nbytes)
        return torch.frombuffer(piece, dtype=torch.uint8).view(shape)
