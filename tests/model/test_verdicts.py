"""What a probe found is believed only as it was written, of the model that it was written for, where nobody else can
write."""

import json
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from qkvshare_agents.model import verdicts

VERDICT = {"windows": [64, None], "tolerance": 1e-3, "balance": "00ff", "nested": {"a": (1, 2)}}
READ = json.loads(json.dumps(VERDICT))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(verdicts, "directory", lambda: tmp_path / "home")
    monkeypatch.setattr(verdicts, "_warned", set())
    return tmp_path / "home" / "probe"


def test_what_was_kept_is_found_in_a_directory_of_this_user(folder: Path) -> None:
    old = os.umask(0)
    try:
        verdicts.keep("probe", "a", VERDICT)
    finally:
        os.umask(old)
    assert verdicts.recall("probe", "a") == READ and verdicts.recall("probe", "b") == {}
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder.parent, folder, folder / "a.json")] == [
        *(0o700, 0o700, 0o600)
    ]
    assert [path.name for path in folder.iterdir()] == ["a.json"], "nothing else is left behind"


def test_every_damaged_byte_is_noticed(folder: Path) -> None:
    verdicts.keep("probe", "a", VERDICT)
    file = folder / "a.json"
    whole = file.read_bytes()
    for index in range(len(whole)):
        file.write_bytes(whole[:index])
        assert verdicts.recall("probe", "a") == {}
        file.write_bytes(whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :])
        assert verdicts.recall("probe", "a") in ({}, READ)  # JSON has spaces that say nothing
    file.write_bytes(b"[" * 100_000)
    assert verdicts.recall("probe", "a") == {}


def test_another_models_verdict_is_not_taken(folder: Path) -> None:
    verdicts.keep("probe", "a", VERDICT)
    (folder / "a.json").rename(folder / "b.json")
    assert verdicts.recall("probe", "b") == {}


OPEN = {
    "mode 0777": lambda folder: folder.chmod(0o777),
    "mode 0720": lambda folder: folder.chmod(0o720),
    "a link": lambda folder: folder.rename(folder.parent / "real") and folder.symlink_to(folder.parent / "real"),
    "another user's": lambda folder: os.chown(folder, 12345, 12345),
    "a file of another user": lambda folder: os.chown(folder / "a.json", 12345, 12345),
    "a file that others may write to": lambda folder: (folder / "a.json").chmod(0o666),
    "a fifo": lambda folder: (folder / "a.json").unlink() or os.mkfifo(folder / "a.json"),
}


@pytest.mark.parametrize("expose", OPEN.values(), ids=OPEN)
def test_what_others_could_have_written_is_not_believed(
    folder: Path, expose: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    verdicts.keep("probe", "a", VERDICT)
    try:
        expose(folder)
    except PermissionError:
        pytest.skip("only root can give files away")
    with caplog.at_level(logging.WARNING, "qkvshare_agents"):
        assert verdicts.recall("probe", "a") == verdicts.recall("probe", "a") == {}
    assert len(caplog.records) == 1 and "delete it" in caplog.text
    verdicts.keep("probe", "b", VERDICT)  # costs no turn
