"""Redis over a link of its own that loses, delays and breaks: two network namespaces, root only."""

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import PASSWORD, free_port, valkey_binary

from qkvshare_agents.errors import TransportTimeout
from qkvshare_agents.transport.redis import RedisTransport
from qkvshare_agents.wire.payload import Payload

HERE, THERE = "10.231.77.1", "10.231.77.2"
LONG_MS = 30_000


def system(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def link(tmp_path_factory) -> Iterator[tuple[str, str]]:
    """(name of our end, url of a server at the other end)."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("network namespaces need root, ip and tc")
    space, end = f"qkv{os.getpid()}", f"qkv{os.getpid() % 10_000}"
    made = system("ip", "netns", "add", space)
    if made.returncode:
        pytest.skip(f"the kernel forbids network namespaces here: {made.stderr.strip()}")
    server = None
    try:
        for command in (
            f"ip link add {end} type veth peer name {end}p",
            f"ip link set {end}p netns {space}",
            f"ip addr add {HERE}/24 dev {end}",
            f"ip link set {end} up",
            f"ip netns exec {space} ip addr add {THERE}/24 dev {end}p",
            f"ip netns exec {space} ip link set {end}p up",
        ):
            if (done := system(*command.split())).returncode:
                pytest.skip(f"no link can be made here: {command}: {done.stderr.strip()}")
        folder, port = tmp_path_factory.mktemp("link"), free_port()
        options = ["--bind", THERE, "--port", str(port), "--save", "", "--requirepass", PASSWORD, "--dir", str(folder)]
        with Path(folder, "log").open("w") as log:
            command = ["ip", "netns", "exec", space, valkey_binary(), *options]
            server = subprocess.Popen(command, stdout=log, stderr=log)
        yield end, f"redis://:{PASSWORD.replace(' ', '%20')}@{THERE}:{port}/0"
    finally:
        if server:
            server.kill()
            server.wait()
        system("ip", "link", "del", end)
        system("ip", "netns", "del", space)


@contextlib.contextmanager
def netem(end: str, *rules: str) -> Iterator[None]:
    done = system("tc", "qdisc", "add", "dev", end, "root", "netem", *rules)
    if done.returncode:
        pytest.skip(f"no netem in this kernel: {done.stderr.strip()}")
    try:
        yield
    finally:
        system("tc", "qdisc", "del", "dev", end, "root")


@pytest.fixture
def transport(link) -> Iterator[RedisTransport]:
    made = RedisTransport(link[1], unencrypted=True, chunk_bytes=2**18)
    for _ in range(100):
        with contextlib.suppress(Exception):
            made.missing(["a"], deadline_ms=LONG_MS)
            break
        time.sleep(0.05)
    yield made
    made.close()


def payload(count: int) -> Payload:
    return Payload([bytes(i % 251 for i in range(1000)) * (count // 1000)])


def moves(transport: RedisTransport, key: str, count: int) -> None:
    transport.put(key, payload(count), deadline_ms=LONG_MS)
    assert b"".join(transport.get(key, deadline_ms=LONG_MS).pieces) == payload(count).pieces[0]
    transport.delete(key, deadline_ms=LONG_MS)


def test_a_sound_link(transport: RedisTransport) -> None:
    moves(transport, "sound", 5_000_000)


@pytest.mark.parametrize(
    "rules", [("delay", "30ms"), ("loss", "2%"), ("delay", "5ms", "reorder", "25%", "50%")], ids=str
)
def test_a_poor_link(link, transport: RedisTransport, rules: tuple[str, ...]) -> None:
    with netem(link[0], *rules):
        moves(transport, "poor", 1_000_000)


def test_a_link_that_is_cut_in_mid_transfer(link, transport: RedisTransport) -> None:
    """The deadline holds, nothing half-written is found afterwards, and the transport works again."""
    transport.put("whole", payload(100_000_000), deadline_ms=LONG_MS)
    for call in (
        lambda: transport.put("cut", payload(100_000_000), deadline_ms=900),
        lambda: transport.get("whole", deadline_ms=900),
    ):
        cut = threading.Timer(0.02, system, ["ip", "link", "set", link[0], "down"])
        started = time.monotonic()
        cut.start()
        try:
            with pytest.raises(TransportTimeout):
                call()
            assert time.monotonic() - started < 1.5
        finally:
            cut.join()
            system("ip", "link", "set", link[0], "up")
    assert transport.missing(["cut", "whole"], deadline_ms=LONG_MS) == ["cut"]
    assert transport.get("whole", deadline_ms=LONG_MS).nbytes == 100_000_000
    assert not [thread for thread in threading.enumerate() if thread.name == "qkvshare-transport"]
