"""What `qkvshare top` shows of hosts in other processes: only this user's, only what is true now, no terminal codes."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support import tiny_engine
from typer.testing import CliRunner

from qkvshare_agents import status
from qkvshare_agents.cli import app
from qkvshare_agents.errors import QKVShareError
from qkvshare_agents.host import Host, HostSettings
from qkvshare_agents.ledger import Member
from qkvshare_agents.sampling import Sampling
from qkvshare_agents.transcript import Message
from qkvshare_agents.turn import Turn


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def answer(host: Host, name: str = "coder", words: int = 40):
    messages = (Message("user", "Write add. " * words, "user"),)
    return host.submit(Turn(Member(name, name, ""), "team", messages, Sampling(max_tokens=8))).result()


def test_a_running_host_is_seen_and_a_closed_one_is_not(runtime: Path) -> None:
    host = Host(HostSettings("tiny", precision="default", budget_bytes=10**7), tiny_engine())
    assert status.running() == []
    got = answer(host)
    (seen,) = status.running()
    assert seen == json.loads(json.dumps(host.status() | {"time_s": seen["time_s"]}))
    assert seen["pid"] == os.getpid() and seen["budget_bytes"] == 10**7 and seen["stored_bytes"] == host.store.nbytes
    (agent,) = seen["agents"]
    assert agent["agent"] == "coder" and agent["tokens"] == got.prompt_tokens + got.completion_tokens - 1
    assert agent["key_bits"] == [4, 4, 4] and agent["average_bits"] == 4 and agent["turns"] == 1
    answer(host)
    answer(host, "tester")
    (seen,) = status.running()
    assert [(row["agent"], row["turns"]) for row in seen["agents"]] == [("coder", 2), ("tester", 1)]
    host.close()
    assert status.running() == [] and not list(status.directory().iterdir())


def test_files_are_private_and_carry_no_text(runtime: Path) -> None:
    host = Host(HostSettings("tiny", secret="s" * 40), tiny_engine())
    answer(host)
    folder = status.directory()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "Write add" not in file.read_text() and "sssss" not in file.read_text()
    host.close()


def test_a_directory_that_others_can_enter_is_refused(runtime: Path) -> None:
    folder = status.directory()
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    host = Host(HostSettings("tiny"), tiny_engine())
    answer(host)
    assert not list(folder.iterdir()), "a host leaves it alone"
    with pytest.raises(QKVShareError, match="0700"):
        status.running()
    host.close()


def test_a_directory_that_can_not_be_made_costs_no_turn(runtime: Path) -> None:
    (runtime / "qkvshare").write_text("in the way")
    host = Host(HostSettings("tiny"), tiny_engine())
    assert answer(host).report.mode.value == "TEXT"
    assert status.running() == []
    host.close()


def test_what_dead_processes_left_is_deleted_and_rubbish_is_passed_over(runtime: Path) -> None:
    folder = status.directory()
    folder.mkdir(parents=True, mode=0o700)
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    left = folder / f"{dead.stdout.strip()}-1.json"
    left.write_text(json.dumps({"agents": []}))
    for name, text in (("1", "no json"), ("2", "[1]"), ("3", '{"agents": 7}')):
        (folder / f"{os.getpid()}-{name}.json").write_text(text)
    assert status.running() == [] and not left.exists()


def test_top_shows_agents_and_budget_and_obeys_no_terminal_codes(runtime: Path) -> None:
    run = CliRunner().invoke
    assert "no host is running" in run(app, ["top"]).output
    host = Host(
        HostSettings("tiny", precision="joint", average_bits=3, budget_bytes=10**7), tiny_engine(hidden_size=64)
    )
    answer(host, "co\x1b[2Jder", words=120)
    shown = run(app, ["top"]).output
    assert "\x1b" not in shown and "co?[2Jder" in shown
    assert "of 10.0 MB" in shown and "tiny (pid" in shown and "joint" in shown
    widths = host.status()["agents"][0]["key_bits"]
    assert "keys " + ("".join(map(str, widths)) if len(set(widths)) > 1 else str(widths[0])) in shown
    (listed,) = json.loads(run(app, ["top", "--json"]).output)
    assert listed["agents"][0]["agent"] == "co\x1b[2Jder"
    host.close()


def test_native_hosts_are_described_too(runtime: Path) -> None:
    host = Host(HostSettings("tiny", precision="native"), tiny_engine())
    answer(host)
    (seen,) = status.running()
    assert seen["agents"][0]["average_bits"] is None
    assert any("native" in line for line in status.lines(seen))
    host.close()
