"""A model's directory is data: no code of it runs, nobody is asked, and no pickle of it is read."""

import builtins
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import tiny_model, tiny_tokenizer

from qkvshare_agents.errors import ModelNotFound, UnsupportedModel
from qkvshare_agents.model import loading

CODE = """open({mark!r}, "w").write("ran")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class EvilConfig(LlamaConfig):
    model_type = {kind!r}
class EvilModel(LlamaForCausalLM):
    config_class = EvilConfig
class EvilTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    for path in whole.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(prompt: str = "") -> str:
        raise AssertionError(f"asked at the terminal: {prompt}")

    monkeypatch.setattr(builtins, "input", asked)


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def pickled_model(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(tiny_model().state_dict(), folder / "pytorch_model.bin")


def pickled_shards(folder: Path) -> None:
    pickled_model(folder)
    (folder / "pytorch_model.bin").rename(folder / "pytorch_model-00001-of-00001.bin")
    names = dict.fromkeys(tiny_model().state_dict(), "pytorch_model-00001-of-00001.bin")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))


def pickled_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "target_modules": ["q_proj"]}))
    torch.save({}, folder / "adapter_model.bin")


def named_pickle(folder: Path) -> None:
    torch.save(tiny_model().state_dict(), folder / "adapter_model.bin")
    edit(folder / "config.json", transformers_weights="adapter_model.bin")


@pytest.mark.parametrize("damage", [pickled_model, pickled_shards, pickled_adapter, named_pickle])
def test_pickles_are_not_read(copy: Path, damage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> None:
    damage(copy)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was read"))
    with pytest.raises(UnsupportedModel, match=r"pickled \(.*safetensors.*save_pretrained"):
        loading.load(str(copy))


def test_safetensors_beside_a_pickle_are_read(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({}, copy / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was read"))
    model, _ = loading.load(str(copy), device="cpu")
    assert model.config.model_type == "llama"


def test_no_weights_at_all_is_what_it_says(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="can't be loaded"):
        loading.load(str(copy))


@pytest.mark.parametrize(
    ("kind", "file", "names"),
    [
        ("evil", "config.json", {"AutoConfig": "code.EvilConfig", "AutoModelForCausalLM": "code.EvilModel"}),
        ("llama", "config.json", {"AutoModelForCausalLM": "code.EvilModel"}),
        ("llama", "tokenizer_config.json", {"AutoTokenizer": [None, "code.EvilTokenizer"]}),
    ],
)
def test_code_beside_a_model_never_runs(copy: Path, kind: str, file: str, names: dict[str, object]) -> None:
    mark = copy / "mark"
    (copy / "code.py").write_text(CODE.format(mark=str(mark), kind=kind))
    edit(copy / "config.json", model_type=kind)
    edit(copy / "tokenizer_config.json", tokenizer_class="EvilTokenizer" if "tokenizer" in file else None)
    edit(copy / file, auto_map=names)
    try:
        loading.load(str(copy), device="cpu")  # where transformers has a class of its own, it takes that
    except UnsupportedModel as error:
        assert "use_model" in str(error) and "trust_remote_code" not in str(error)
        assert "Evil" in (copy / "tokenizer_config.json").read_text() or kind == "evil"
    assert not mark.exists()
