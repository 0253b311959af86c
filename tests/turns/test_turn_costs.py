"""What a turn costs does not grow with what it has nothing to do with: operations are counted, not time."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import tiny_engine, tiny_model

from qkvshare_agents.host.host import Host
from qkvshare_agents.host.sharing_host import SharingHost
from qkvshare_agents.model.adapters import Identity
from qkvshare_agents.model.weights import named_weights, plain_tensors
from qkvshare_agents.prompt.encoder import Encoder
from qkvshare_agents.prompt.layout import Message
from qkvshare_agents.prompt.ledger import Ledger
from qkvshare_agents.prompt.members import Member, Roster
from qkvshare_agents.prompt.sampling import Sampling
from qkvshare_agents.settings import HostSettings
from qkvshare_agents.transport import shm
from qkvshare_agents.turns import workspace
from qkvshare_agents.turns.request import Turn

TASK = Message("user", "Write add, and its tests. Several agents work on this conversation in turn.", "user")


def talk(host: Host, turns: int) -> list[Counter[str]]:
    """A conversation of two members; of each turn, how often was done what `counted` counts."""
    messages, spent = [TASK], []
    for turn in range(turns):
        name = "ab"[turn % 2]
        before = Counter(DONE)
        member = Member(name, name, f"You are {name}.")
        answer = host.submit(Turn(member, "team", tuple(messages), Sampling(max_tokens=6))).result()
        messages += [Message("assistant", answer.text, name), Message("user", f"Go on, number {turn}.", "user")]
        spent.append(DONE - before)
    host.close()
    return spent


DONE: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    DONE.clear()
    monkeypatch.setattr(shm, "default_directory", lambda: tmp_path / "shm")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def count(owner: object, name: str, kind: Callable[[Any], Any] = lambda function: function) -> None:
        done = getattr(owner, name)

        def counting(*args: object, **options: object) -> object:
            DONE[name] += 1
            return done(*args, **options)

        monkeypatch.setattr(owner, name, kind(counting))

    count(Encoder, "_ids", staticmethod)
    count(workspace, "lay_out")
    count(Identity, "_stamp")


@pytest.mark.parametrize(
    "settings",
    [
        HostSettings("tiny"),
        HostSettings("tiny", precision="joint"),
        HostSettings("tiny", fit="summarise"),
        HostSettings("tiny", lora="share_base"),
        HostSettings("tiny", layout="stock", splice=True),
        HostSettings("tiny", share="shm"),
    ],
    ids=["plain", "joint", "summarise", "lora", "splice", "share"],
)
def test_a_turn_is_laid_out_once_and_looks_at_the_weights_once(settings: HostSettings) -> None:
    spent = talk((SharingHost if settings.share else Host)(settings, tiny_engine()), 5)
    for turn in spent[1:]:  # the first one loads
        assert turn["lay_out"] == 1 and turn["_stamp"] == 1, spent


@pytest.mark.parametrize("share", ["", "shm"])
def test_only_new_text_is_encoded_however_long_the_conversation_is(share: str) -> None:
    host = (SharingHost if share else Host)(HostSettings("tiny", share=share), tiny_engine())
    spent = [turn["_ids"] for turn in talk(host, 16)]
    assert len(set(spent[4:])) == 1 and spent[4] <= 3, spent


def test_texts_are_remembered_within_a_number_of_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = tiny_engine().template.encoder
    monkeypatch.setattr("qkvshare_agents.prompt.encoder._KEPT_CHARACTERS", 100)
    for number in range(50):
        assert encoder.text(f"text number {number}") == encoder.text(f"text number {number}")
    assert len(encoder._encoded._kept) <= 100 // len("text number 1")
    before = DONE["_ids"]
    encoder.text("text number 49")
    assert DONE["_ids"] == before
    encoder.text("text number 0")
    assert DONE["_ids"] > before
    assert encoder.text("x" * 1000) == encoder.text("x" * 1000), "also one that is too long to be kept"


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
def test_weights_are_found_without_their_names_too(kind: str) -> None:
    model = tiny_model(kind)
    named = sorted(weight.data_ptr() for _, weight in named_weights(model))
    found = plain_tensors(model)
    assert found is not None and sorted({t.data_ptr() for t in found}) == sorted(set(named))


def test_what_is_known_of_teams_and_what_they_said_is_bounded() -> None:
    roster, ledger = Roster(), Ledger()
    for number in range(60_000):
        ledger.record(f"answer {number}", [number])
        if number < 10_000:
            roster.learn(f"team {number}", "a", "text")
            roster.learn("", f"agent {number}", "an agent outside of any team")
    known = [number for number in range(60_000) if ledger.find(f"answer {number}")]
    assert len(known) <= 50_000 and known[-1] == 59_999
    assert sum(bool(roster.members(f"team {number}")) for number in range(10_000)) < 1000
    assert len(roster.members("")) <= 256 and "agent 9999" in roster.members("")
