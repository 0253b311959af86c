"""Bytes in pieces, as transports move them: nothing is joined unless a reader asks across a border."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from qkvshare_agents.errors import PackageError

Buffer = bytes | bytearray | memoryview


class Payload:
    """Pieces that stand for their concatenation.

    lasting: whether what is read may go on using these bytes (they are the sender's own tensors, or a mapping that
    is to be shared); else a reader copies what it keeps.
    """

    def __init__(self, pieces: Sequence[Buffer], *, lasting: bool = False) -> None:
        views = (memoryview(piece).cast("B") for piece in pieces)
        self.pieces = tuple(view for view in views if view.nbytes)
        self.lasting = lasting
        self._ends = list(accumulate(view.nbytes for view in self.pieces))

    @property
    def nbytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop): a view where one piece holds them, else a copy. Raises PackageError beyond the end."""
        parts = list(self.extent(start, stop))
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def extent(self, start: int, stop: int) -> Iterator[memoryview]:
        """Views that make up the bytes [start, stop), for hashing and copying."""
        if not 0 <= start <= stop <= self.nbytes:
            raise PackageError(f"the package ends after {self.nbytes} bytes; bytes {start} to {stop} were asked for")
        index = bisect_right(self._ends, start)
        while start < stop:
            begin = self._ends[index] - self.pieces[index].nbytes
            yield self.pieces[index][start - begin : stop - begin]
            start, index = self._ends[index], index + 1

    def chunks(self, size_bytes: int) -> Iterator[bytes]:
        """The same bytes in chunks of one size (the last may be shorter)."""
        for start in range(0, self.nbytes, size_bytes):
            yield b"".join(self.extent(start, min(start + size_bytes, self.nbytes)))
