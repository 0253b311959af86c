"""What a Redis server may answer, looked at before it is parsed.

A reply begins with what it announces: an array of 300 million elements, say. A parser believes that, takes the memory,
and gives it back while all of Python waits. Our commands are answered by short lines and by strings of known size, so
nothing else is let through.
"""

import re
import socket
from typing import Any, NoReturn

from qkvshare_agents.errors import QKVShareError

SHORT_BYTES = 1 << 16  # of replies that are no chunk of a package
_LONGEST_LINE_BYTES = 4096
_STRING = re.compile(rb"\$(-1|0|[1-9]\d{0,9})\r")


class UnaskedReply(QKVShareError):
    """A reply announces what no command of ours asked for. No OSError, which redis-py takes for one of the network."""


class Announcements:
    """Reads along replies in RESP2. most_bytes: of the next strings. Raises UnaskedReply."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """What follows comes over a new connection."""
        self.most_bytes = SHORT_BYTES
        self._body_bytes = 0  # of a string, that are still to come
        self._line = b""

    def read(self, data: bytes | bytearray, size: int) -> None:
        """The next `size` bytes, which lie at the beginning of `data`."""
        at = 0
        while at < size:
            if self._body_bytes:
                step = min(self._body_bytes, size - at)
                at, self._body_bytes = at + step, self._body_bytes - step
                continue
            end = data.find(b"\n", at, size)
            stop = size if end < 0 else end
            if len(self._line) + stop - at > _LONGEST_LINE_BYTES:
                _refuse("a line without end")
            self._line += data[at:stop]
            at = stop + 1
            if end >= 0:
                self._announced(self._line)
                self._line = b""

    def _announced(self, line: bytes) -> None:
        if not line.endswith(b"\r") or b"\r" in line[:-1]:  # parsers might end the line elsewhere
            _refuse("a line that does not end as lines do")
        if line[:1] in (b"+", b"-", b":"):
            return
        string = _STRING.fullmatch(line)
        if not string:
            _refuse(f"{line[:16]!r}, which is no line and no string")
        elif (length := int(string[1])) > self.most_bytes:
            _refuse(f"a string of {length:,} bytes where at most {self.most_bytes:,} were asked for")
        elif length >= 0:
            self._body_bytes = length + 2


def _refuse(what: str) -> NoReturn:
    raise UnaskedReply(f"answered with {what}")


class ReadAlong:
    """A socket whose bytes are read along before anybody else gets them."""

    def __init__(self, sock: Any, announcements: Announcements) -> None:
        self._sock, self._announcements = sock, announcements

    def recv(self, size: int, flags: int = 0) -> bytes:
        data: bytes = self._sock.recv(size, flags) if flags else self._sock.recv(size)
        if not flags & socket.MSG_PEEK:
            self._announcements.read(data, len(data))
        return data

    def recv_into(self, buffer: bytearray) -> int:
        size: int = self._sock.recv_into(buffer)
        self._announcements.read(buffer, size)
        return size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)
