"""The examples on a tiny model: they end, also by ctrl-C, and whoever is killed, the tester continues from KV."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from servers import free_port, valkey  # noqa: F401
from support import tiny_model, tiny_tokenizer

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kill", ["coder", "tester"])
def test_across_processes(model: str, kill: str) -> None:
    said = run("across_processes.py", "--model", model, "--kill", kill)
    assert said.count("-- TEXT:") == 1 and said.count("-- KV:") == 1
    assert f"the {kill} was killed" in said


def test_across_machines(model: str, valkey: str) -> None:  # noqa: F811
    """Three processes on this machine: AutoGen's gRPC host and two workers, each with a model."""
    pytest.importorskip("autogen_ext.runtimes.grpc", reason="autogen-ext[grpc] is not installed")
    address = f"localhost:{free_port()}"
    said = run("across_machines.py", "--model", model, "--redis", valkey, "--address", address)
    assert said.count("-- TEXT:") == 1 and said.count("-- KV:") == 1


@pytest.mark.parametrize("name", ["coder_tester_autogen.py", "coder_tester_langgraph.py"])
def test_ctrl_c_ends_the_turn_that_runs_and_says_so_in_a_line(model: str, name: str) -> None:
    """Not the turns after it: 500 of them take minutes."""
    command = [sys.executable, "-u", str(EXAMPLES / name), "--model", model, "--turns", "500", "--no-replay"]
    started = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert started.stdout
    try:
        while "coder" not in (line := started.stdout.readline()):
            assert line, started.communicate()[1]
        started.send_signal(signal.SIGINT)
        said, complaint = started.communicate(timeout=60)
    finally:
        started.kill()
    assert (started.returncode, complaint.strip()) == (1, "stopped")
    assert "Handoffs" not in said
