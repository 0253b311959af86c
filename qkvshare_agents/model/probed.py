"""What the probe of a model found, so that the next load of the very same model need not probe again.

Only what can be handed over is remembered: a refusal may have had a passing cause.
"""

import hashlib
from typing import Any

import torch
import transformers

from qkvshare_agents.kv.shape import KVShape, LayerGroup
from qkvshare_agents.model import verdicts
from qkvshare_agents.model.driver import Feeding
from qkvshare_agents.model.fingerprint import Fingerprint
from qkvshare_agents.model.probe import Verdict


def keep(fingerprint: Fingerprint, model: Any, found: Verdict) -> None:
    """Remember a verdict; a refusal is not."""
    shape = found.shape
    if found.refusal or shape is None:
        return
    verdict = {
        "groups": [[list(g.layers), g.heads, g.key_dim, g.value_dim] for g in shape.groups],
        "windows": shape.windows,
        "indexed": shape.indexed,
        "dtype": str(shape.dtype),
        "device": str(shape.device),
        "devices": list(map(str, shape.devices)),
        "has_state": found.has_state,
        "feeding": found.feeding,
        "tolerance": found.tolerance,
    }
    verdicts.keep("probe", _name(fingerprint, model), verdict)


def recall(fingerprint: Fingerprint, model: Any) -> Verdict | None:
    """What was kept of this model, under these versions; None if nothing, or something else."""
    found = verdicts.recall("probe", _name(fingerprint, model))
    try:
        groups = tuple(LayerGroup(tuple(map(int, layers)), *map(int, sizes)) for layers, *sizes in found["groups"])
        windows = tuple(None if window is None else int(window) for window in found["windows"])
        indexed = tuple(map(int, found["indexed"]))
        devices = tuple(map(torch.device, found["devices"]))
        feeding: Feeding = "steps" if found["feeding"] == "steps" else "chunks"
        if (found["dtype"], found["device"]) != (str(model.dtype), str(model.device)):
            return None
        shape = KVShape(groups, model.dtype, model.device, windows, devices, indexed)
        return Verdict(None, shape, bool(found["has_state"]), feeding, float(found["tolerance"]))
    except (KeyError, TypeError, ValueError, RuntimeError):
        return None


def _name(fingerprint: Fingerprint, model: Any) -> str:
    """Changes with whatever may change the verdict: the model, and what runs it."""
    attention = getattr(model.config, "_attn_implementation", "")
    placed = sorted((name, str(place)) for name, place in getattr(model, "hf_device_map", {}).items())
    by = (transformers.__version__, torch.__version__, str(model.device), str(attention), placed)
    return hashlib.sha256(fingerprint.digest + repr(by).encode()).hexdigest()
