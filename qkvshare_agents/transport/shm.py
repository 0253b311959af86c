"""Between processes of one user: files in a private directory of memory.

A file appears under its name only when it is whole (`O_TMPFILE`, then `linkat`), and its pages are reserved before
they are written, so that a full memory is an error and not a crash. Nothing in the directory is trusted: it must be
ours alone, and a file must be regular, ours, mode 0600, with one name. A file's modification time is when it expires.
"""

import errno
import mmap
import os
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from qkvshare_agents.errors import PackageNotFound, TransportError
from qkvshare_agents.transport.interface import DEADLINE_MS, LIFETIME_MS, MAX_PACKAGE_BYTES, Deadline, check_key
from qkvshare_agents.wire.payload import Payload
from qkvshare_kernels import private
from qkvshare_kernels.memory import fresh

CAPACITY_BYTES = 2 * 1024**3
_STEP_BYTES = 8 * 1024**2  # between two looks at the clock
_SUFFIX = ".qkv"
_MOST_PIECES = 512  # of one writev; the system's limit is 1,024


@dataclass(frozen=True)
class Stored:
    """A file of the directory. expires_s: Unix time."""

    key: str
    nbytes: int
    expires_s: float


def default_directory() -> Path:
    """XDG_RUNTIME_DIR, then /dev/shm, then the temporary directory (which may be a disk): the first that is there.

    In the first nobody else can make a directory of our name.
    """
    for parent in (os.environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm"):
        if parent and os.path.isdir(parent) and os.access(parent, os.W_OK | os.X_OK):
            return Path(parent) / f"qkvshare-{os.geteuid()}"
    return Path(tempfile.gettempdir()) / f"qkvshare-{os.geteuid()}"


class ShmTransport:
    """directory: made with mode 0700 if it is not there. capacity_bytes: of all packages in it; more is an error.

    mapped: readers map the file instead of copying it, and share its memory (before Python 3.13 also a descriptor)
    as long as they keep a page of it. A process that truncates the file then kills them (SIGBUS), so it is for
    processes that trust each other.
    Raises TransportError for a directory that is another user's, a link, or open to others.
    """

    name = "shm"
    crosses_machines = False

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        capacity_bytes: int = CAPACITY_BYTES,
        max_package_bytes: int = MAX_PACKAGE_BYTES,
        mapped: bool = False,
    ) -> None:
        self.directory = Path(directory) if directory else default_directory()
        self._capacity_bytes, self._max_bytes, self._mapped = capacity_bytes, max_package_bytes, mapped
        self._folder = _open_private(self.directory)

    def put(
        self, key: str, payload: Payload, *, deadline_ms: float = DEADLINE_MS, lifetime_ms: int = LIFETIME_MS
    ) -> None:
        deadline, name = Deadline(deadline_ms), check_key(key) + _SUFFIX
        self.sweep()
        used = sum(file.nbytes for file in self.files())
        if used + payload.nbytes > self._capacity_bytes:
            raise TransportError(
                f"{self.directory} holds {used:,} bytes; {payload.nbytes:,} more exceed capacity_bytes="
                f"{self._capacity_bytes:,}: wait, delete what was read (qkvshare gc), or raise it"
            )
        with _explained(f"can't publish in {self.directory}"), self._unnamed_file() as file:
            os.posix_fallocate(file, 0, payload.nbytes)
            _write(file, payload, deadline)
            expires_ns = time.time_ns() + lifetime_ms * 1_000_000
            os.utime(file, ns=(expires_ns, expires_ns))
            _ = deadline.left_ms
            # linkat(AT_SYMLINK_FOLLOW): the name appears with all its bytes, or there is one of it already
            os.link(f"/proc/self/fd/{file}", name, dst_dir_fd=self._folder, follow_symlinks=True)

    def get(self, key: str, *, deadline_ms: float = DEADLINE_MS) -> Payload:
        deadline, name = Deadline(deadline_ms), check_key(key) + _SUFFIX
        with _explained(f"can't read {key!r} in {self.directory}"):
            # O_NONBLOCK: opening a FIFO must not wait for its writer
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            try:
                file = os.open(name, flags, dir_fd=self._folder)
            except FileNotFoundError:
                raise PackageNotFound(
                    f"nothing is stored under {key!r} in {self.directory}: never published, expired or deleted"
                ) from None
            try:
                size = self._check(file, key)
                if self._mapped:
                    return Payload([_map(file, size)], lasting=True)
                return Payload([_read(file, size, deadline)])
            finally:
                os.close(file)

    def missing(self, keys: Sequence[str], *, deadline_ms: float = DEADLINE_MS) -> list[str]:
        Deadline(deadline_ms)
        now, wanted = time.time(), [check_key(key) for key in keys]
        with _explained(f"can't look into {self.directory}"):
            return [key for key in wanted if self._expires_s(key) <= now]

    def delete(self, key: str, *, deadline_ms: float = DEADLINE_MS) -> None:
        Deadline(deadline_ms)
        with _explained(f"can't delete {key!r} in {self.directory}"):
            self._unlink(check_key(key) + _SUFFIX)

    def files(self) -> Iterator[Stored]:
        """What is published, expired or not."""
        with _explained(f"can't list {self.directory}"), os.scandir(self._folder) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # deleted meanwhile
                    continue
                if entry.name.endswith(_SUFFIX) and stat.S_ISREG(status.st_mode):
                    yield Stored(entry.name.removesuffix(_SUFFIX), status.st_size, status.st_mtime)

    def sweep(self) -> tuple[int, int]:
        """The janitor: delete what is expired, whoever of us left it; returns (files, bytes). Every put does so."""
        now = time.time()
        expired = [file for file in self.files() if file.expires_s <= now]
        with _explained(f"can't clean {self.directory}"):
            for file in expired:
                self._unlink(file.key + _SUFFIX)
        return len(expired), sum(file.nbytes for file in expired)

    def close(self) -> None:
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def __del__(self) -> None:
        if getattr(self, "_folder", -1) >= 0:
            self.close()

    @contextmanager
    def _unnamed_file(self) -> Iterator[int]:
        """A file that vanishes with its descriptor, also when the process is killed."""
        file = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=self._folder)
        try:
            yield file
        finally:
            os.close(file)

    def _expires_s(self, key: str) -> float:
        """When what is published under the key does; 0 if nothing is."""
        try:
            status = os.stat(key + _SUFFIX, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return 0.0
        return status.st_mtime if stat.S_ISREG(status.st_mode) else 0.0

    def _check(self, file: int, key: str) -> int:
        status = os.fstat(file)
        mode = stat.S_IMODE(status.st_mode)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or mode != 0o600 or status.st_nlink > 1:
            raise TransportError(
                f"{self.directory / key}{_SUFFIX} is not a regular file of this user with mode 0600 and one name; "
                "somebody else put it there: delete it"
            )
        if not status.st_nlink or status.st_mtime <= time.time():
            raise PackageNotFound(f"{key!r} was deleted or has expired")
        if not 0 < status.st_size <= self._max_bytes:
            raise TransportError(f"{key!r} has {status.st_size:,} bytes; the limit is {self._max_bytes:,}")
        return status.st_size

    def _unlink(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self._folder)
        except FileNotFoundError:
            pass


def _open_private(directory: Path) -> int:
    with _explained(f"can't use {directory}"):
        try:
            with suppress(FileExistsError):
                os.mkdir(directory, 0o700)
            return private.open_private(directory, make=False)
        except private.NotPrivate as error:
            raise TransportError(f"{error}, or pass directory=") from None


def _write(file: int, payload: Payload, deadline: Deadline) -> None:
    offset = 0
    while offset < payload.nbytes:
        _ = deadline.left_ms
        pieces = payload.extent(offset, min(offset + _STEP_BYTES, payload.nbytes))
        offset += os.pwritev(file, [piece for _, piece in zip(range(_MOST_PIECES), pieces, strict=False)], offset)


def _read(file: int, size: int, deadline: Deadline) -> memoryview:
    """Into memory of our own."""
    target, done = fresh(size), 0
    while done < size:
        _ = deadline.left_ms
        count = os.preadv(file, [target[done : min(done + _STEP_BYTES, size)]], done)
        if count == 0:
            raise TransportError(f"the file was cut to {done:,} of {size:,} bytes while it was read")
        done += count
    return target


def _map(file: int, size: int) -> memoryview:
    """The file itself; what a reader writes there is its own."""
    if sys.version_info >= (3, 13):
        return memoryview(mmap.mmap(file, size, access=mmap.ACCESS_COPY, trackfd=False))
    return memoryview(mmap.mmap(file, size, access=mmap.ACCESS_COPY))


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """What the system says, as an error of ours."""
    advice = {
        errno.ENOSPC: "the memory is full: free some, or pass a directory elsewhere",
        errno.EFBIG: "the process may not write files of that size (ulimit -f)",
        errno.EMFILE: "the process has too many open files (ulimit -n)",
        errno.ELOOP: "it is a symbolic link, which we never make: delete it",
        errno.ENOENT: "the directory, or the one above it, is not there: make it, then the transport anew",
        errno.EEXIST: "this key is published already; use a new one",
        errno.EOPNOTSUPP: "its file system knows no O_TMPFILE: pass a directory on tmpfs, ext4, xfs or btrfs",
        errno.EBADF: "the transport is closed",
    }
    try:
        yield
    except TransportError:
        raise
    except OSError as error:
        raise TransportError(f"{what}: {advice.get(error.errno or 0, os.strerror(error.errno or 0))}") from error
