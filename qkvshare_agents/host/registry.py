"""Hosts of this process, by name.

Frameworks copy, serialise and load model clients (`load_component` makes one client per agent even where one
was shared), so that a client holds only names and settings, and clients of the same name share one host.
"""

import hashlib
import os
import threading
from dataclasses import asdict, fields

from qkvshare_agents.errors import HostConflict
from qkvshare_agents.host.host import Host
from qkvshare_agents.host.sharing_host import SharingHost
from qkvshare_agents.model import loaded
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.settings import HostSettings

_hosts: dict[str, Host] = {}
_users: dict[str, int] = {}
_kept: dict[str, Host] = {}  # by keep_host
_lock = threading.Lock()
_SECRET = {f.name for f in fields(HostSettings) if not f.repr}


def open_host(settings: HostSettings, name: str | None = None, *, engine: Engine | None = None) -> Host:
    """The host called `name` (by default one per settings), made if there is none. Weights load on first use.

    engine: a model that is loaded already. Each call is one use, which `release_host` ends. Raises
    HostConflict if the name is taken by a host with other settings.
    """
    name = name or default_name(settings)
    with _lock:
        host = _hosts.get(name)
        if host is None:
            _check_alone(settings.model)
            host = _hosts[name] = (SharingHost if settings.share else Host)(settings, engine)
        elif engine is not None and engine is not host.engine:
            raise HostConflict(f"host {name!r} is open with another loaded model; use another host name")
        elif host.settings != settings:
            theirs, ours = asdict(host.settings), asdict(settings)
            differ = ", ".join(
                f"{k}={theirs[k]!r} (not {ours[k]!r})" for k in ours if theirs[k] != ours[k] and k not in _SECRET
            )
            raise HostConflict(
                f"host {name!r} is open with {differ or 'another salt, secret or share'}; use the same settings "
                "or another host name"
            )
        _users[name] = _users.get(name, 0) + 1
        return host


def _check_alone(model: str) -> None:
    """Two hosts would switch adapters and windows of one model under each other's feet."""
    other = next((name for name, host in _hosts.items() if host.settings.model == model), None)
    if other is not None and loaded.find(model):
        raise HostConflict(f"model {model!r} was loaded by you and is in use by host {other!r}; one host can use it")


def release_host(settings: HostSettings, name: str | None = None) -> None:
    """End one use; the last one closes the host and frees its model and pages."""
    name = name or default_name(settings)
    with _lock:
        _users[name] = _users.get(name, 0) - 1
        host = _hosts.pop(name, None) if _users[name] <= 0 else None
        if _users[name] <= 0:
            del _users[name]
    if host:
        host.close()


def keep_host(settings: HostSettings, name: str | None = None) -> Host:
    """The host called `name`, opened on the first call and kept until `drop_host`, however often this is called.

    For objects that frameworks copy and forget, which can't end a use. Raises HostConflict like `open_host`.
    """
    name = name or default_name(settings)
    with _lock:
        host = _kept.get(name)
        if host is not None and _hosts.get(name) is host and host.settings == settings:
            return host
    host = open_host(settings, name)
    with _lock:
        if _kept.get(name) is host:  # another thread was first: its use is the one that counts
            _users[name] -= 1
        _kept[name] = host
    return host


def drop_host(settings: HostSettings, name: str | None = None) -> None:
    """End the use that `keep_host` began, if any."""
    name = name or default_name(settings)
    with _lock:
        host = _kept.pop(name, None)
        ours = host is not None and _hosts.get(name) is host
    if ours:
        release_host(settings, name)


def _forget_parents() -> None:
    """After a fork: hosts of the parent answer nobody here, so the child opens its own under the same names."""
    global _lock
    _lock = threading.Lock()  # whoever held it is not here any more
    for known in (_hosts, _users, _kept):
        known.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parents)


def default_name(settings: HostSettings) -> str:
    """A name that two hosts share exactly if their settings are equal."""
    return f"{settings.model}#{hashlib.sha256(repr(sorted(asdict(settings).items())).encode()).hexdigest()[:8]}"
