"""What a caller can act on.

Every error names the value it met, the choices that would have worked and the remedy. AutoGen keeps only
the text of an exception that leaves an agent, so the text carries everything.
"""


class QKVShareError(Exception):
    """Base of every error that this library raises on purpose."""


class InvalidSetting(QKVShareError, ValueError):
    """A setting or argument has a value that can't be used."""


class InvalidMessage(QKVShareError, ValueError):
    """A message can't be laid out for this model (an image, an unknown role, no content at all)."""


class ContextOverflow(QKVShareError, ValueError):
    """The prompt does not fit into the model's context."""


class UnsupportedModel(QKVShareError):
    """The model or its chat template lacks something that can't be worked around."""


class ModelNotFound(QKVShareError, FileNotFoundError):
    """A model is neither a local directory, nor a pulled model, nor on a reachable Hub."""


class MissingDependency(QKVShareError, ImportError):
    """An optional package is needed; the text says which extra brings it."""


class HostConflict(QKVShareError):
    """A host of this name is open with other settings."""


class HostClosed(QKVShareError):
    """The host was closed and can't run another turn."""


class HostBusy(QKVShareError, RuntimeError):
    """A callback of a turn waits for what the host can only do when that turn has ended."""


class ModelFault(QKVShareError, ArithmeticError):
    """The model's logits are no numbers; nothing of the turn was kept."""


class CodecError(QKVShareError, ValueError):
    """Values that can't be encoded (NaN, Inf, beyond the scale's range) or codes that can't be decoded."""


class Cancelled(QKVShareError):
    """The turn was cancelled between two tokens; nothing was kept."""


class PackageError(QKVShareError, ValueError):
    """Bytes that are no package of ours, or one that this host may not use: damaged, of another model, expired."""


class TransportError(QKVShareError, OSError):
    """A package could not be moved: store unreachable, full, or not safe to use. The text can be replayed."""


class PackageNotFound(TransportError):
    """Nothing is stored under this key: never published, expired, evicted or deleted."""


class TransportTimeout(TransportError):
    """The deadline passed before the package was moved."""


def printable(text: str) -> str:
    """Others' text in one line of ours, without anything that a terminal or a log would obey."""
    return "".join(c if c.isprintable() else "?" for c in text)
