"""What was read from JSON is what it should be: names, kinds and sizes. Everything here raises PackageError."""

from dataclasses import fields
from typing import Any

from qkvshare_agents.errors import PackageError


def table(entry: Any, kind: type, what: str, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """A table with the fields of `kind`, all but those in `without`."""
    names = {field.name for field in fields(kind)}.difference(without)
    if not isinstance(entry, dict) or entry.keys() != names:
        given = sorted(str(name)[:20] for name in entry)[:20] if isinstance(entry, dict) else type(entry).__name__
        raise PackageError(f"{what} has {given}; this version of the format has exactly {sorted(names)}")
    return entry


def entries(entry: Any, longest: int, what: str) -> list[Any]:
    if not isinstance(entry, list) or len(entry) > longest:
        raise PackageError(f"{what} must be a list of at most {longest:,} entries")
    return entry


def exactly(entry: list[Any], count: int) -> list[Any]:
    if len(entry) != count:
        raise PackageError(f"a ledger entry has {len(entry)} parts, not {count}")
    return entry


def whole(value: Any, least: int, most: int, what: str) -> int:
    if type(value) is not int or not least <= value <= most:  # a bool is an int to Python
        raise PackageError(f"{what} is {_shown(value)}; it must be a whole number in {least} ... {most}")
    return value


def choice(value: Any, choices: tuple[Any, ...], what: str) -> None:
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        raise PackageError(f"{what} is {_shown(value)}; the choices are {', '.join(map(str, choices))}")


def hexadecimal(value: Any, digits: int, what: str) -> None:
    if not isinstance(value, str) or len(value) != digits or not set(value) <= set("0123456789abcdef"):
        raise PackageError(f"{what} must be {digits} lower-case hex digits")


def string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise PackageError(f"{what} must be a string")
    utf8(value)
    return value


def utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise PackageError("text with half of a surrogate pair, which no UTF-8 can hold") from None


def _shown(value: Any) -> str:
    return repr(value)[:40] if isinstance(value, int | str) else type(value).__name__
