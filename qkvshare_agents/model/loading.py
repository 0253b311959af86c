"""Loads a model's weights and tokenizer, or takes those that the caller has loaded under a name."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from qkvshare_agents.errors import InvalidSetting, MissingDependency, ModelNotFound, QKVShareError, UnsupportedModel
from qkvshare_agents.model import catalog, loaded

_SAFE = (".safetensors", ".safetensors.index.json")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".bin.index.json")
_NO_PICKLES = (
    "only safetensors are loaded, since unpickling can run code; convert them where you trust them, with "
    "transformers' from_pretrained(...).save_pretrained(...)"
)


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
    weights that can't be loaded here, pickled ones among them, and for models that come with code of their own.
    """
    if dtype not in catalog.DTYPES:
        raise InvalidSetting(f"no dtype {dtype!r}; choose from {', '.join(catalog.DTYPES)}")
    if (held := loaded.find(model)) is not None:
        asked = {"device": device, "device_map": device_map, "attn_implementation": attn_implementation}
        asked |= {"dtype": None if dtype == "auto" else dtype}
        if given := [f"{name}={value!r}" for name, value in asked.items() if value is not None]:
            raise InvalidSetting(f"model {model!r} was loaded by you: {', '.join(given)} can't be changed any more")
        return held
    source = catalog.resolve(model)
    options: dict[str, Any] = {"attn_implementation": attn_implementation} if attn_implementation else {}
    try:
        # told nothing, transformers asks at the terminal whether to run code beside a model, and reads pickles
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        configuration = AutoConfig.from_pretrained(source, trust_remote_code=False)
        if pickled := _pickled(Path(source), configuration):
            raise UnsupportedModel(f"the weights of model {model!r} are pickled ({pickled}): {_NO_PICKLES}")
        quantized = getattr(configuration, "quantization_config", None) is not None
        placed = device_map or ({"": device} if quantized and device else None)
        if placed is not None:
            options |= {"device_map": placed, "offload_folder": offload_folder}
        weights: Any = AutoModelForCausalLM.from_pretrained(
            source, trust_remote_code=False, use_safetensors=True, dtype=dtype, **options
        )
    except QKVShareError:
        raise
    except Exception as error:  # whatever a quantizer, a configuration or accelerate raises
        raise _explained(model, error) from error
    if not (placed or quantized):
        weights = weights.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return weights, tokenizer


def _pickled(folder: Path, configuration: Any) -> str:
    """The name of a pickle that transformers would read from `folder` (no directory: from the Hub); "" if of none."""
    named = getattr(configuration, "transformers_weights", None)
    if named and not str(named).endswith(_SAFE):
        return str(named)
    for kind in ("adapter_model", "*"):  # an adapter's are looked for beside the model's own
        found = sorted(path.name for path in folder.glob(f"{kind}.*"))
        pickles = [name for name in found if name.endswith(_PICKLES)]
        if pickles and not any(name.endswith(_SAFE) for name in found):
            return pickles[0]
    return ""


def _explained(model: str, error: Exception) -> QKVShareError:
    """As an error of ours; transformers' own advice is to switch off what protects."""
    text = _first_line(error)
    if "trust_remote_code" in str(error):
        return UnsupportedModel(
            f"model {model!r} needs code of its own, which lies beside it and is never run: choose a model that "
            "transformers knows, or load it yourself where you trust that code, and name it with use_model"
        )
    if isinstance(error, OSError) and "use_safetensors" in str(error):
        return UnsupportedModel(f"model {model!r} has no weights in safetensors: {_NO_PICKLES}")
    if isinstance(error, OSError):  # not on the Hub, Hub out of reach, or files missing
        return ModelNotFound(f"model {model!r} can't be loaded: {text}")
    if isinstance(error, ImportError):  # of what quantized weights need, or of accelerate
        return MissingDependency(f"model {model!r} needs a package: {text}")
    return UnsupportedModel(f"model {model!r} can't be loaded here: {text}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
