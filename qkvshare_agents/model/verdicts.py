"""What a probe of a model found, kept in the cache directory: one small JSON file each.

What lies there decides how KV is read, so it is believed only in a directory that nobody else can write to, and only
with the digest that it was written with.
"""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from qkvshare_agents.model import catalog
from qkvshare_kernels import private

_log = logging.getLogger("qkvshare_agents")
_LARGEST_BYTES = 1 << 24
_warned: set[Path] = set()


def recall(kind: str, name: str) -> dict[str, Any]:
    """What was kept under the name; nothing if there is none, it is damaged, or others could have written it."""
    folder = directory() / kind
    try:
        with private.opened(folder, make=False, readable=True) as opened:
            found = json.loads(private.read(opened, f"{name}.json", _LARGEST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        _warn(folder, error)
        return {}
    if not isinstance(found, dict) or found.pop("sha256", None) != _digest(name, found):
        return {}
    return found


def keep(kind: str, name: str, verdict: dict[str, Any]) -> None:
    """Whole or not at all; a cache directory that can't be written to costs the next load a probe."""
    folder = directory() / kind
    try:
        with private.opened(folder, readable=True) as opened:
            data = json.dumps(verdict | {"sha256": _digest(name, verdict)}).encode()
            private.write(opened, f"{name}.json", data, lasting=False)
    except OSError as error:
        _warn(folder, error)


def directory() -> Path:
    return catalog.models_directory().parent


def _digest(name: str, verdict: dict[str, Any]) -> str:
    """Of what the verdict says, and of which model."""
    said = json.loads(json.dumps(verdict))  # tuples become lists
    return hashlib.sha256(json.dumps([name, said], sort_keys=True).encode()).hexdigest()


def _warn(folder: Path, error: Exception) -> None:
    if isinstance(error, private.NotPrivate) and folder not in _warned:
        _warned.add(folder)
        _log.warning("models are probed at every load: %s", error)
