"""The shm directory: what others put there, what the system runs out of, who is killed."""

import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from qkvshare_agents.errors import PackageNotFound, TransportError, TransportTimeout
from qkvshare_agents.transport import shm
from qkvshare_agents.transport.shm import ShmTransport, default_directory
from qkvshare_agents.wire.payload import Payload

LONG_MS = 20_000
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make such a file")


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "packages"


@pytest.fixture
def transport(folder) -> Iterator[ShmTransport]:
    made = ShmTransport(folder)
    yield made
    made.close()


def payload(count: int = 100_000) -> Payload:
    return Payload([bytes(range(250)) * (count // 250)])


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_directory_and_files_are_private(transport: ShmTransport, folder: Path) -> None:
    old = os.umask(0)
    try:
        transport.put("a", payload())
    finally:
        os.umask(old)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [(p.name, stat.S_IMODE(p.stat().st_mode)) for p in folder.iterdir()] == [("a.qkv", 0o600)]


def place_link(path: Path) -> None:
    (path.parent / "other").write_bytes(b"x" * 100)
    path.symlink_to(path.parent / "other")


def place_hard_link(path: Path) -> None:
    write_private(path.parent / "other")
    os.link(path.parent / "other", path)


def write_private(path: Path, mode: int = 0o600) -> None:
    path.write_bytes(b"x" * 100)
    path.chmod(mode)
    later = time.time() + 600
    os.utime(path, (later, later))


def place_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(os.path.relpath(path))


def place_others(path: Path) -> None:
    write_private(path)
    os.chown(path, 12345, 12345)


STRANGERS = {
    "symbolic link": place_link,
    "hard link": place_hard_link,
    "fifo": os.mkfifo,
    "directory": os.mkdir,
    "mode 0666": lambda path: write_private(path, 0o666),
    "mode 0644": lambda path: write_private(path, 0o644),
    "socket": place_socket,
}


@pytest.mark.parametrize("place", STRANGERS.values(), ids=STRANGERS)
def test_strange_files_are_refused(transport: ShmTransport, folder: Path, place) -> None:
    place(folder / "a.qkv")
    before = descriptors()
    started = time.monotonic()
    with pytest.raises(TransportError):
        transport.get("a", deadline_ms=LONG_MS)
    assert time.monotonic() - started < 1, "opening must not wait for a writer"
    with pytest.raises(TransportError, match="published already"):
        transport.put("a", payload())
    assert descriptors() == before


@ROOT_ONLY
@pytest.mark.parametrize("place", [place_others, lambda path: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))])
def test_files_of_others_and_devices_are_refused(transport: ShmTransport, folder: Path, place) -> None:
    try:
        place(folder / "a.qkv")
    except PermissionError:
        pytest.skip("the kernel forbids it here")
    with pytest.raises(TransportError, match=r"not a regular file of this user|can't read"):
        transport.get("a")


def test_empty_and_huge_files_are_refused(folder: Path) -> None:
    transport = ShmTransport(folder, max_package_bytes=99)
    write_private(folder / "a.qkv")
    with pytest.raises(TransportError, match="limit is 99"):
        transport.get("a")
    write_private(folder / "b.qkv")
    os.truncate(folder / "b.qkv", 0)
    later = time.time() + 600
    os.utime(folder / "b.qkv", (later, later))
    with pytest.raises(TransportError, match="0 bytes"):
        transport.get("b")


def test_directories_that_are_not_ours_are_refused(tmp_path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(TransportError, match="chmod 700"):
        ShmTransport(tmp_path / "open")
    (tmp_path / "private").mkdir(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "private")
    with pytest.raises(TransportError, match="is a link"):
        ShmTransport(tmp_path / "link")
    (tmp_path / "file").write_text("")
    with pytest.raises(TransportError, match="no directory"):
        ShmTransport(tmp_path / "file")
    with pytest.raises(TransportError, match="above it"):
        ShmTransport(tmp_path / "nowhere" / "below")


@ROOT_ONLY
def test_a_directory_of_another_user_is_refused(tmp_path) -> None:
    (tmp_path / "theirs").mkdir(0o700)
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(TransportError, match="of user 12345"):
        ShmTransport(tmp_path / "theirs")


def test_where_it_goes_by_default(monkeypatch, tmp_path) -> None:
    there = {"/dev/shm", str(tmp_path)}
    monkeypatch.setattr(os.path, "isdir", lambda path: path in there)
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    name = f"qkvshare-{os.geteuid()}"
    assert default_directory() == tmp_path / name
    there.remove(str(tmp_path))
    assert default_directory() == Path("/dev/shm") / name
    there.clear()
    assert default_directory() == Path(tempfile.gettempdir()) / name


def test_a_full_memory_is_an_error(tmp_path) -> None:
    """A tmpfs of 4 MB: reserved before it is written, so there is no SIGBUS and nothing is left."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        transport = ShmTransport(small / "packages")
        transport.put("a", payload(3_000_000), deadline_ms=LONG_MS)
        with pytest.raises(TransportError, match="full"):
            transport.put("b", payload(3_000_000), deadline_ms=LONG_MS)
        assert [file.key for file in transport.files()] == ["a"]
        transport.delete("a")
        transport.put("b", payload(3_000_000), deadline_ms=LONG_MS)
        transport.close()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_file_size_limit(transport: ShmTransport) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(TransportError, match="ulimit -f"):
            transport.put("a", payload())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(transport.files()) == []


def test_descriptor_limit(transport: ShmTransport) -> None:
    transport.put("a", payload())
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        for call in (
            lambda: transport.get("a"),
            lambda: transport.put("b", payload()),
            lambda: list(transport.files()),
        ):
            with pytest.raises(TransportError, match="ulimit -n"):
                call()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert transport.get("a").nbytes == 100_000


def test_a_file_cut_while_it_is_read(transport: ShmTransport, folder: Path, monkeypatch) -> None:
    transport.put("a", payload(20_000_000), deadline_ms=LONG_MS)
    read = os.preadv

    def cutting(file: int, buffers, offset: int) -> int:
        if offset:
            os.truncate(folder / "a.qkv", 9_000_000)
        return read(file, buffers, offset)

    monkeypatch.setattr(shm.os, "preadv", cutting)
    before = descriptors()
    with pytest.raises(TransportError, match="was cut"):
        transport.get("a", deadline_ms=LONG_MS)
    assert descriptors() == before


def test_slow_memory_meets_the_deadline(transport: ShmTransport, monkeypatch) -> None:
    transport.put("a", payload(30_000_000), deadline_ms=LONG_MS)
    read, write = os.preadv, os.pwritev
    monkeypatch.setattr(shm.os, "preadv", lambda *a: (time.sleep(0.05), read(*a))[1])
    monkeypatch.setattr(shm.os, "pwritev", lambda *a: (time.sleep(0.05), write(*a))[1])
    for call in (
        lambda: transport.get("a", deadline_ms=75),
        lambda: transport.put("b", payload(30_000_000), deadline_ms=75),
    ):
        started = time.monotonic()
        with pytest.raises(TransportTimeout):
            call()
        assert time.monotonic() - started < 0.2
    assert [file.key for file in transport.files()] == ["a"]


def test_capacity(folder: Path) -> None:
    transport = ShmTransport(folder, capacity_bytes=250_000)
    transport.put("a", payload(), lifetime_ms=200)
    transport.put("b", payload())
    with pytest.raises(TransportError, match="capacity_bytes"):
        transport.put("c", payload())
    time.sleep(0.25)
    transport.put("c", payload())  # the janitor took the expired one
    assert sorted(file.key for file in transport.files()) == ["b", "c"]


def test_the_janitor_takes_only_what_expired(transport: ShmTransport, folder: Path) -> None:
    transport.put("new", payload())
    transport.put("old", payload(), lifetime_ms=1)
    (folder / "notes.txt").write_text("not ours")
    time.sleep(0.01)
    assert transport.sweep() == (1, 100_000)
    assert transport.sweep() == (0, 0)
    assert sorted(p.name for p in folder.iterdir()) == ["new.qkv", "notes.txt"]


def test_a_closed_transport_says_so(transport: ShmTransport) -> None:
    transport.close()
    transport.close()
    for call in (lambda: transport.get("a"), lambda: transport.put("b", payload())):
        with pytest.raises(TransportError):
            call()


CHILD = """
    import os, sys, time
    from qkvshare_agents.wire.payload import Payload
    from qkvshare_agents.transport import shm
    transport = shm.ShmTransport(sys.argv[1])
    when = sys.argv[2]
    def told():
        print("now", flush=True)
        time.sleep(60)
    if when == "before":
        link = os.link
        os.link = lambda *a, **k: told()
    if when == "read":
        read = os.preadv
        os.preadv = lambda *a: (read(*a), told())[0]
        transport.get("a", deadline_ms=60000)
    transport.put("b", Payload([bytes(5_000_000)]), deadline_ms=60000, lifetime_ms=1500)
    told()
"""


@pytest.mark.parametrize("when", ["before", "after", "read"])
def test_kill_9(transport: ShmTransport, folder: Path, when: str) -> None:
    """Of a sender before and after it published, and of a reader: nothing stays beyond the lifetime."""
    transport.put("a", payload(), deadline_ms=LONG_MS)
    code = textwrap.dedent(CHILD)
    child = subprocess.Popen([sys.executable, "-c", code, str(folder), when], stdout=subprocess.PIPE)
    try:
        assert child.stdout and child.stdout.readline() == b"now\n"
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    assert sorted(p.name for p in folder.iterdir()) == (["a.qkv", "b.qkv"] if when == "after" else ["a.qkv"])
    if when == "after":
        assert transport.get("b", deadline_ms=LONG_MS).nbytes == 5_000_000
        time.sleep(1.6)
        transport.sweep()
    with pytest.raises(PackageNotFound):
        transport.get("b")
    assert [file.key for file in transport.files()] == ["a"]
    assert transport.get("a").nbytes == 100_000


RACER = """
    import sys
    from qkvshare_agents.errors import TransportError
    from qkvshare_agents.wire.payload import Payload
    from qkvshare_agents.transport.shm import ShmTransport
    transport, mine = ShmTransport(sys.argv[1]), sys.argv[2]
    sys.stdin.readline()
    for index in range(50):
        try:
            transport.put(f"k{index}", Payload([mine.encode() * 50_000]), deadline_ms=60000)
            print(index)
        except TransportError as error:
            assert "published already" in str(error), error
"""


def test_processes_that_write_the_same_keys(transport: ShmTransport, folder: Path) -> None:
    """Each key has one winner, whose package is whole."""
    command = [sys.executable, "-c", textwrap.dedent(RACER), str(folder)]
    racers = [
        subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for name in "abcd"
    ]
    for racer in racers:
        print(file=racer.stdin, flush=True)
    won = {name: racer.communicate(timeout=60)[0].split() for name, racer in zip("abcd", racers, strict=True)}
    assert all(racer.returncode == 0 for racer in racers)
    assert sorted(index for indices in won.values() for index in indices) == sorted(str(i) for i in range(50))
    for name, indices in won.items():
        for index in indices:
            assert bytes(transport.get(f"k{index}", deadline_ms=LONG_MS).pieces[0]) == name.encode() * 50_000


def test_many_handoffs_leave_nothing(transport: ShmTransport, folder: Path) -> None:
    """10,000 at `qkvshare bench transport`; 1,000 here: descriptors, files and memory stay as they were."""

    def resident_kb() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4

    def handoffs(count: int) -> None:
        for _ in range(count):
            transport.put("a", payload(1_000_000), deadline_ms=LONG_MS)
            assert transport.get("a", deadline_ms=LONG_MS).nbytes == 1_000_000
            transport.delete("a")

    handoffs(50)
    before = descriptors(), resident_kb()
    handoffs(1000)
    assert descriptors() == before[0]
    assert resident_kb() - before[1] < 20_000
    assert list(folder.iterdir()) == []
