"""Loads a model's weights and tokenizer, or takes those that the caller has loaded under a name."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from qkvshare_agents import loaded, models
from qkvshare_agents.errors import InvalidSetting, MissingDependency, ModelNotFound, UnsupportedModel


def load(
    model: str,
    *,
    dtype: str = "auto",
    device: str | None = None,
    device_map: str | dict[str, int | str] | None = None,
    offload_folder: str | None = None,
    attn_implementation: str | None = None,
) -> tuple[Any, Any]:
    """(model, tokenizer) of a local directory, a pulled model's name, a Hub id, or a name given to `use_model`.

    dtype: `auto` takes what the checkpoint has. device_map: as in transformers, for layers on several devices or on
    disk. Raises ModelNotFound if there is no such model or files are missing, InvalidSetting for settings that a
    loaded model can't follow any more, MissingDependency for a package that its weights need, UnsupportedModel for
    weights that can't be loaded here.
    """
    if dtype not in models.DTYPES:
        raise InvalidSetting(f"no dtype {dtype!r}; choose from {', '.join(models.DTYPES)}")
    if (held := loaded.find(model)) is not None:
        asked = {"device": device, "device_map": device_map, "attn_implementation": attn_implementation}
        asked |= {"dtype": None if dtype == "auto" else dtype}
        if given := [f"{name}={value!r}" for name, value in asked.items() if value is not None]:
            raise InvalidSetting(f"model {model!r} was loaded by you: {', '.join(given)} can't be changed any more")
        return held
    source = models.resolve(model)
    options: dict[str, Any] = {"attn_implementation": attn_implementation} if attn_implementation else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        quantized = getattr(AutoConfig.from_pretrained(source), "quantization_config", None) is not None
        placed = device_map or ({"": device} if quantized and device else None)
        if placed is not None:
            options |= {"device_map": placed, "offload_folder": offload_folder}
        weights: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)
    except OSError as error:  # not on the Hub, Hub out of reach, or files missing
        raise ModelNotFound(f"model {model!r} can't be loaded: {_first_line(error)}") from error
    except ImportError as error:  # of what quantized weights need, or of accelerate
        raise MissingDependency(f"model {model!r} needs a package: {_first_line(error)}") from error
    except Exception as error:  # whatever a quantizer, a configuration or accelerate raises
        raise UnsupportedModel(f"model {model!r} can't be loaded here: {_first_line(error)}") from error
    if not (placed or quantized):
        weights = weights.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return weights, tokenizer


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
