"""What `qkvshare top` shows of hosts in other processes: only this user's, only what is true now, no terminal codes."""

import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import tiny_engine
from typer.testing import CliRunner

from qkvshare_agents.budget.agents import Residents
from qkvshare_agents.cli.app import app
from qkvshare_agents.errors import QKVShareError
from qkvshare_agents.host import status
from qkvshare_agents.host.host import Host
from qkvshare_agents.kv.page import Precision
from qkvshare_agents.prompt.layout import Message
from qkvshare_agents.prompt.members import Member
from qkvshare_agents.prompt.sampling import Sampling
from qkvshare_agents.settings import HostSettings
from qkvshare_agents.store.shared_store import SharedPageStore
from qkvshare_agents.turns.request import Turn


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def answer(host: Host, name: str = "coder", words: int = 40, scope: str = "team", tokens: int = 8):
    messages = (Message("user", f"{scope}: " + "Write add. " * words, "user"),)
    return host.submit(Turn(Member(name, name, ""), scope, messages, Sampling(max_tokens=tokens))).result()


def seen(expected: Callable[[dict[str, Any]], bool] = bool) -> dict[str, Any]:
    """What the one running host says, once it is as expected: it is written beside the turns."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        found = status.running()
        if len(found) == 1 and expected(found[0]):
            return found[0]
        time.sleep(0.01)
    raise AssertionError(f"not as expected: {status.running()}")


def turns(*counts: int) -> Callable[[dict[str, Any]], bool]:
    return lambda described: [row["turns"] for row in described["agents"]] == list(counts)


def test_a_running_host_is_seen_and_a_closed_one_is_not(runtime: Path) -> None:
    host = Host(HostSettings("tiny", precision="compact", budget_bytes=10**7), tiny_engine())
    assert status.running() == []
    got = answer(host)
    described = seen(turns(1))
    assert described == json.loads(json.dumps(host.status() | {"time_s": described["time_s"]}))
    assert described["pid"] == os.getpid() and described["budget_bytes"] == 10**7
    assert described["stored_bytes"] == host.store.nbytes
    (agent,) = described["agents"]
    assert agent["agent"] == "coder" and agent["tokens"] == got.prompt_tokens + got.completion_tokens - 1
    assert agent["key_bits"] == [4, 4, 4] and agent["average_bits"] == 4 and agent["turns"] == 1
    answer(host)
    answer(host, "tester")
    assert [row["agent"] for row in seen(turns(2, 1))["agents"]] == ["coder", "tester"]
    host.close()
    assert status.running() == [] and not list(status.directory().iterdir())


def test_files_are_private_and_carry_no_text(runtime: Path) -> None:
    host = Host(HostSettings("tiny", secret="s" * 40), tiny_engine())
    answer(host)
    seen()
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
    with pytest.raises(QKVShareError, match="0700"):
        status.running()
    host.close()
    assert not list(folder.iterdir()), "a host leaves it alone"


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
    seen()
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
    described = seen()
    assert described["agents"][0]["average_bits"] is None
    assert any("native" in line for line in status.lines(described))
    host.close()


def test_ten_thousand_agents_are_known_and_shown_like_a_few() -> None:
    known, sizes = Residents(Precision(), tiny_engine().shape), []
    for count in range(1, 10_001):
        known.note_turn((f"team {count} {'x' * 500}", f"agent {count} {'é' * 500}"), range(100), 64)
        if count in (100, 10_000):
            described = status.describe(known, None, 10**7, model="tiny", precision="safe", uniform_because="")
            sizes.append((len(known), len(described["agents"]), len(json.dumps(described)) // 1000))
    assert sizes[0] == sizes[1] and sizes[1][2] < 100
    assert described["others"] + described["forgotten"] + len(described["agents"]) == 10_000
    assert described["agents"][-1]["agent"].startswith("agent 10000 ")
    assert any("9968 that spoke earlier" in line for line in status.lines(described))


def test_a_turn_waits_for_no_description_and_weighs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(HostSettings("tiny"), tiny_engine())
    asked, go_on, weighed = threading.Event(), threading.Event(), []
    describe, weigh = status.describe, SharedPageStore.weigh

    def slow(*args: Any, **about: Any) -> dict[str, Any]:
        asked.set()
        assert go_on.wait(30)
        return describe(*args, **about)

    def counted(store: SharedPageStore, ids: Any) -> tuple[int, int]:
        weighed.append(threading.current_thread().name)
        return weigh(store, ids)

    monkeypatch.setattr(status, "describe", slow)
    monkeypatch.setattr(SharedPageStore, "weigh", counted)
    answer(host)
    assert asked.wait(30)
    for number in range(40):
        answer(host, scope=f"team {number}", words=1, tokens=1)
    assert not weighed
    go_on.set()
    described = seen(lambda d: len(d["agents"]) + d["others"] == 41)
    assert len(weighed) <= 2 * len(described["agents"]) and set(weighed) == {"qkvshare-status"}
    host.close()


def test_agents_whose_kv_is_gone_are_forgotten() -> None:
    host = Host(HostSettings("tiny", precision="native", budget_bytes=400_000), tiny_engine())
    for number in range(20):
        answer(host, f"agent {number}", words=number + 20, scope=str(number), tokens=1)
    described = host.status()
    assert described["evicted_pages"] and described["forgotten"]
    assert described["forgotten"] + len(described["agents"]) == 20 and described["agents"][-1]["agent"] == "agent 19"
    host.close()
