"""Fresh memory in large blocks: the page faults of first use take longer than copying into it does."""

import mmap
from contextlib import suppress

_BLOCK_BYTES = 8 * 1024**2
_ALIGNMENT_BYTES = 64


def fresh(nbytes: int) -> memoryview:
    """Private zeroed memory, page-aligned, in huge pages where the system has them; freed with its last view."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return memoryview(bytearray(nbytes))
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


class Blocks:
    """Pieces of blocks of at most 8 MB, so that dropping some of what is kept there frees about that much.

    total_bytes: what will be taken at most, so that the last block is no larger than needed.
    """

    def __init__(self, total_bytes: int) -> None:
        self._left_bytes = total_bytes
        self._block = memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        """`nbytes` (at least 1) that begin aligned."""
        used = -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if used > self._block.nbytes:
            self._block = fresh(max(used, min(_BLOCK_BYTES, self._left_bytes)))
        piece, self._block = self._block[:nbytes], self._block[used:]
        self._left_bytes -= used
        return piece
