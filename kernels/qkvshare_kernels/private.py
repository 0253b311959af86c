"""Directories of this user alone: what lies there may be believed, and loaded.

A directory is opened once and everything in it is reached through its descriptor, so that it can't be swapped after
it was checked. Files appear under their names whole, and last through a power cut.
"""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class NotPrivate(OSError):
    """Others can change what lies here; says whose it is, and the remedy."""


def open_private(directory: Path, *, make: bool = True, readable: bool = False) -> int:
    """A descriptor of the directory. make: with mode 0700, and those above it, if it is not there. readable: others may
    read what lies in it, as long as they can't write.

    Raises NotPrivate for a link, a directory of another user and one that is open to others; FileNotFoundError,
    PermissionError and their like as the system does.
    """
    if make:
        _make(directory)
    try:
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        raise NotPrivate(f"{directory} is a link or no directory: delete it") from None
    status = os.fstat(folder)
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() or mode & (0o022 if readable else 0o077):
        os.close(folder)
        raise NotPrivate(
            f"{directory} is of user {status.st_uid} with mode {mode:04o}; it must be of user {os.geteuid()} with mode "
            "0700: chmod 700 it if it is yours and nobody has changed what lies in it, else delete it"
        )
    return folder


@contextmanager
def opened(directory: Path, *, make: bool = True, readable: bool = False) -> Iterator[int]:
    """As `open_private`, closed at the end."""
    folder = open_private(directory, make=make, readable=readable)
    try:
        yield folder
    finally:
        os.close(folder)


def read(folder: int, name: str, limit_bytes: int) -> bytes:
    """A file's bytes. Raises NotPrivate for what is no regular file of this user that only they can write to, OSError
    for one above the limit."""
    # O_NONBLOCK: opening a FIFO must not wait for its writer
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with os.fdopen(file, "rb") as opened_file:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise NotPrivate(f"{name} is not a regular file that only user {os.geteuid()} can write to: delete it")
        data = opened_file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise OSError(errno.EFBIG, f"{name} is larger than {limit_bytes:,} bytes")
    return data


def write(folder: int, name: str, data: bytes, *, lasting: bool = True) -> None:
    """Replace a file in one step, mode 0600. lasting: its bytes are on the disk before it has its name."""
    scratch = f".{secrets.token_hex(8)}"
    file = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        with os.fdopen(file, "wb") as out:
            out.write(data)
            out.flush()
            if lasting:
                os.fsync(file)
        os.replace(scratch, name, src_dir_fd=folder, dst_dir_fd=folder)
        if lasting:
            os.fsync(folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(scratch, dir_fd=folder)
        raise


def _make(directory: Path) -> None:
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        return
    except FileNotFoundError:
        _make(directory.parent)
        with suppress(FileExistsError):
            os.mkdir(directory, 0o700)
