"""Clients of one process share hosts by name or settings, and the tenant's salt is never shown."""

import logging
import threading
from collections.abc import Iterator

import pytest
from support import tiny_engine

from qkvshare_agents.errors import HostClosed, HostConflict, InvalidSetting
from qkvshare_agents.host import registry
from qkvshare_agents.host.registry import default_name, open_host, release_host
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.prompt.layout import Message
from qkvshare_agents.prompt.members import Member
from qkvshare_agents.prompt.sampling import Sampling
from qkvshare_agents.settings import HostSettings
from qkvshare_agents.turns.request import Turn

SALT = "tenant-7-s3cret"
PLAIN = HostSettings("tiny")
TURN = Turn(Member("coder", "coder"), "", (Message("user", "Hello"),), Sampling(max_tokens=3))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()


@pytest.fixture(autouse=True)
def only_what_the_test_opens() -> Iterator[None]:
    hosts, users = dict(registry._hosts), dict(registry._users)
    yield
    for name in registry._hosts.keys() - hosts.keys():
        registry._hosts.pop(name).close()
        registry._users.pop(name)
    assert registry._users == users, "a use outlived its host"


def test_equal_settings_share_a_host(engine: Engine) -> None:
    first = open_host(PLAIN, engine=engine)
    assert open_host(HostSettings("tiny")) is first
    assert open_host(PLAIN, default_name(PLAIN)) is first
    assert first.submit(TURN).result(timeout=30).completion_tokens >= 0


@pytest.mark.parametrize(
    "other",
    [
        HostSettings("another"),
        HostSettings("tiny", precision="native"),
        HostSettings("tiny", salt=SALT),
        HostSettings("tiny", budget_bytes=1),
    ],
)
def test_other_settings_get_their_own_host(engine: Engine, other: HostSettings) -> None:
    assert open_host(other, engine=engine) is not open_host(PLAIN, engine=engine)
    assert default_name(other) != default_name(PLAIN)


def test_two_salts_are_two_hosts_with_two_stores(engine: Engine) -> None:
    hosts = [open_host(HostSettings("tiny", salt=salt), engine=engine) for salt in ("a", "b", "a")]
    assert hosts[0] is hosts[2] is not hosts[1]
    for host in hosts[:2]:
        report = host.submit(TURN).result(timeout=30).report
        assert report.reused_tokens == 0, "the other tenant's pages were found"
    assert hosts[2].submit(TURN).result(timeout=30).report.reused_tokens > 0


def test_a_name_shares_a_host_too(engine: Engine) -> None:
    assert open_host(PLAIN, "mine", engine=engine) is open_host(PLAIN, "mine")
    assert open_host(PLAIN, "mine") is not open_host(PLAIN, engine=engine)


def test_a_taken_name_says_what_differs(engine: Engine) -> None:
    open_host(PLAIN, "mine", engine=engine)
    with pytest.raises(HostConflict) as caught:
        open_host(HostSettings("other", precision="native"), "mine")
    text = str(caught.value)
    assert "'mine'" in text and "model='tiny' (not 'other')" in text and "precision='safe' (not 'native')" in text
    assert "budget_bytes" not in text and "another host name" in text


@pytest.mark.parametrize("salts", [("", SALT), (SALT, ""), (SALT, SALT + "x")])
@pytest.mark.parametrize("precision", ["safe", "native"])
def test_a_conflict_never_shows_a_salt(engine: Engine, salts: tuple[str, str], precision: str) -> None:
    open_host(HostSettings("tiny", salt=salts[0]), "mine", engine=engine)
    with pytest.raises(HostConflict) as caught:
        open_host(HostSettings("tiny", precision=precision, salt=salts[1]), "mine")
    assert "s3cret" not in str(caught.value)
    assert ("another salt" in str(caught.value)) == (precision == "safe")


def test_a_conflict_is_not_a_use(engine: Engine) -> None:
    host = open_host(PLAIN, "mine", engine=engine)
    with pytest.raises(HostConflict):
        open_host(HostSettings("other"), "mine")
    release_host(PLAIN, "mine")
    with pytest.raises(HostClosed):
        host.submit(TURN)


def test_the_salt_is_nowhere_to_be_seen(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    settings = HostSettings("tiny", salt=SALT)
    host = open_host(settings, engine=engine)
    answer = host.submit(TURN).result(timeout=30)
    keys = [node.key for node in host.store.match(host.prompt(TURN).ids).nodes]
    assert keys
    shown = [repr(settings), str(settings), default_name(settings), repr(host), repr(answer), caplog.text]
    assert not any("s3cret" in text for text in shown)
    assert not any(SALT.encode() in key for key in keys)


def test_the_last_release_closes_the_host(engine: Engine) -> None:
    host = open_host(PLAIN, engine=engine)
    open_host(PLAIN)
    release_host(PLAIN)
    host.submit(TURN).result(timeout=30)
    release_host(PLAIN)
    with pytest.raises(HostClosed, match="tiny"):
        host.submit(TURN)
    again = open_host(PLAIN, engine=engine)
    assert again is not host
    again.submit(TURN).result(timeout=30)


def test_releasing_more_than_was_opened_is_harmless(engine: Engine) -> None:
    release_host(PLAIN)
    release_host(PLAIN, "never opened")
    host = open_host(PLAIN, engine=engine)
    release_host(PLAIN)
    release_host(PLAIN)
    assert open_host(PLAIN, engine=engine) is not host
    open_host(PLAIN)
    release_host(PLAIN)
    open_host(PLAIN).submit(TURN).result(timeout=30)


def test_threads_that_open_and_release_at_once_leave_nothing_behind(engine: Engine) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                host = open_host(PLAIN, "shared", engine=engine)
                host.submit(TURN).cancel()
                release_host(PLAIN, "shared")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert not errors
    assert "shared" not in registry._hosts and "shared" not in registry._users


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int7"}, "the presets are safe, compact, small, tiny, native"),
        ({"layout": "sideways"}, "the layouts are relay, stock"),
        ({"budget_bytes": -1}, "budget_bytes must not be negative: -1"),
    ],
)
def test_bad_settings_are_refused_when_they_are_made(options: dict, message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        HostSettings("tiny", **options)


def test_a_name_with_another_loaded_model_is_a_conflict() -> None:
    settings = HostSettings("tiny")
    engine = tiny_engine()
    try:
        assert open_host(settings, "loaded", engine=engine) is open_host(settings, "loaded", engine=engine)
        with pytest.raises(HostConflict, match="another loaded model"):
            open_host(settings, "loaded", engine=tiny_engine(seed=1))
    finally:
        release_host(settings, "loaded")
        release_host(settings, "loaded")
