"""Digests of what travels, and the proof that whoever wrote it knows the secret.

SHA-256 and HMAC-SHA256, or BLAKE3 and keyed BLAKE3 when the package `blake3` is installed (a third of the time).
"""

import hashlib
import hmac
from collections.abc import Iterable
from typing import Any

from qkvshare_agents.errors import InvalidSetting, PackageError

_installed: Any = None
try:
    from blake3 import blake3 as _installed
except ImportError:  # the extra `blake3` is optional
    pass

ALGORITHMS = ("sha256", "blake3")
SHORTEST_SECRET_BYTES = 16
_DOMAIN = b"qkvshare package 2\0"
_CONTEXT = "qkvshare package 2 mac key"


def preferred() -> str:
    """The fastest algorithm that is installed."""
    return "blake3" if _installed else "sha256"


def check_secret(secret: str) -> None:
    """Raises InvalidSetting for a secret that can be guessed; "" means none."""
    if secret and len(secret.encode()) < SHORTEST_SECRET_BYTES:
        raise InvalidSetting(
            f"the secret has {len(secret.encode())} bytes; use at least {SHORTEST_SECRET_BYTES}, e.g. "
            "python -c 'import secrets; print(secrets.token_hex(32))', or leave it empty"
        )


def digest(algorithm: str, parts: Iterable[memoryview | bytes]) -> bytes:
    """32 bytes over the concatenation of `parts`. Raises PackageError if the algorithm is not installed."""
    return _run(_hasher(algorithm), parts)


def mac(algorithm: str, secret: str, head: bytes) -> bytes:
    """32 bytes over the head of a package: keyed by the secret, or a plain digest if that is empty."""
    parts = (_DOMAIN, head)
    if not secret:
        return digest(algorithm, parts)
    if algorithm == "blake3":
        key = _blake3()(secret.encode(), derive_key_context=_CONTEXT).digest()
        return _run(_blake3()(key=key), parts)
    return _run(hmac.new(secret.encode(), digestmod=hashlib.sha256), parts)


def equal(a: bytes, b: bytes) -> bool:
    """Compared in constant time."""
    return hmac.compare_digest(a, b)


def _hasher(algorithm: str) -> Any:
    if algorithm not in ALGORITHMS:
        raise PackageError(f"no digest {algorithm[:20]!r}; the digests are {', '.join(ALGORITHMS)}")
    return _blake3()() if algorithm == "blake3" else hashlib.sha256()


def _blake3() -> Any:
    if _installed is None:
        raise PackageError("the package uses BLAKE3, which is not installed here: pip install blake3")
    return _installed


def _run(hasher: Any, parts: Iterable[memoryview | bytes]) -> bytes:
    for part in parts:
        hasher.update(part)
    return bytes(hasher.digest())
