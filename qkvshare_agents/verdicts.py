"""What a probe of a model found, kept in the cache directory: one small JSON file each."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from qkvshare_agents import models


def recall(kind: str, name: str) -> dict[str, Any]:
    """What was kept under the name; nothing if there is none, or the file is not readable."""
    try:
        found = json.loads((directory() / kind / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def keep(kind: str, name: str, verdict: dict[str, Any]) -> None:
    """Whole or not at all; a cache directory that can't be written to costs the next load a probe."""
    folder = directory() / kind
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as file:
            json.dump(verdict, file)
        os.replace(file.name, folder / f"{name}.json")
    except OSError:
        return


def directory() -> Path:
    return models.models_directory().parent
