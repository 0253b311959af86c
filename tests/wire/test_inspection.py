"""`qkvshare inspect`, `ls` and `gc`: what is there, without opening it."""

import json
import time
from dataclasses import fields, replace

import pytest
from packages import PRECISIONS, SECRET, flat, package, pages, state
from typer.testing import CliRunner

from qkvshare_agents.cli import inspection
from qkvshare_agents.cli.app import app
from qkvshare_agents.errors import InvalidSetting, PackageError, PackageNotFound
from qkvshare_agents.model.fingerprint import Fingerprint
from qkvshare_agents.transport import shm
from qkvshare_agents.transport.shm import ShmTransport
from qkvshare_agents.wire.package import Package
from qkvshare_agents.wire.payload import Payload

WORD = "a-word-of-the-conversation"


def sent(**fields: object) -> Package:
    return package(pages(PRECISIONS[1]), ledger=((WORD, 1, 4),), handoff=WORD, metadata={"goal": WORD}, **fields)


def invoke(*arguments: str, code: int = 0, **env: str) -> str:
    done = CliRunner().invoke(app, arguments, env=env)
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(shm, "default_directory", lambda: tmp_path / "packages")
    return tmp_path / "packages"


def test_recurrent_state_is_described(tmp_path) -> None:
    path = tmp_path / "package.qkv"
    path.write_bytes(flat(sent(state=state(37)).write()))
    described = json.loads(invoke("inspect", str(path), "--json"))
    assert described["state"][1] == {"layer": 0, "name": "recurrent_states.0", "dtype": "F32", "shape": [1, 2, 3, 5]}
    assert "recurrent state of 2 layers in 3 tensors" in invoke("inspect", str(path))


def test_a_file_is_described(tmp_path) -> None:
    path = tmp_path / "package.qkv"
    path.write_bytes(flat(sent(omit=(1,)).write(secret=SECRET)))
    described = json.loads(invoke("inspect", str(path), "--json", QKVSHARE_SECRET=SECRET))
    assert described["signature"] == "valid"
    assert described["nbytes"] == path.stat().st_size
    assert described["covered_tokens"] == 37 and described["tokens"] == 39
    bits = [
        run["keys"][0]["plane"] and run["keys"][0]["plane"]["bits"] if run["keys"] else None
        for run in described["runs"]
    ]
    assert bits == [4, None, None]
    assert [run["digest"] is None for run in described["runs"]] == [False, True, False]
    text = invoke("inspect", str(path), QKVSHARE_SECRET="")
    assert "not checked" in text and "4/channel rotated" in text and "left out" in text
    assert "wrong" in invoke("inspect", str(path), QKVSHARE_SECRET="another secret, long enough")
    assert WORD not in text + json.dumps(described)


def test_a_key_is_described(folder) -> None:
    transport = ShmTransport()
    transport.put("abc", sent().write())
    assert json.loads(invoke("inspect", "abc", "--json"))["signature"] == "not signed"
    with pytest.raises(PackageNotFound):
        inspection.find("nothing")
    with pytest.raises(InvalidSetting, match="neither a file nor a key"):
        inspection.find("../nothing")


def test_damaged_files_are_errors(tmp_path) -> None:
    path = tmp_path / "x"
    for data in (b"", b"x", flat(sent().write())[:-1]):
        path.write_bytes(data)
        with pytest.raises(PackageError):
            inspection.describe(inspection.find(str(path)))


def test_whatever_a_package_says_can_be_shown(tmp_path) -> None:
    """Markup, control characters and dates that no calendar has."""
    path = tmp_path / "x"
    odd = Fingerprint(*("[/b]\x1b[2J\r\n" for _ in fields(Fingerprint)))
    for made in (replace(sent(), fingerprint=odd), sent(expires_ms=2**53), sent(expires_ms=0), sent(created_ms=2**53)):
        path.write_bytes(flat(made.write()))
        shown = invoke("inspect", str(path))
        assert "package " in shown and "\x1b[2J" not in shown
        json.loads(invoke("inspect", str(path), "--json"))


def test_names_that_can_not_be_read_are_errors(tmp_path) -> None:
    for name in ("x" * 5000, str(tmp_path), "a\0b", "../" * 40, "[/b]"):
        with pytest.raises((PackageError, InvalidSetting)):
            inspection.find(name)


def test_packages_are_listed_and_collected(folder) -> None:
    transport = ShmTransport()
    transport.put("stays", Payload([b"x" * 100]))
    transport.put("goes", Payload([b"x" * 50]), lifetime_ms=1)
    time.sleep(0.01)
    listed = json.loads(invoke("ls", "--json"))
    assert [(p["key"], p["nbytes"]) for p in listed["packages"]] == [("goes", 50), ("stays", 100)]
    assert "expired" in invoke("ls") and "2 packages" in invoke("ls")
    assert "deleted 1 packages, 50 bytes" in invoke("gc")
    assert json.loads(invoke("gc", "--all", "--json", "--directory", str(folder)))["nbytes"] == 100
    assert "0 packages" in invoke("ls")
