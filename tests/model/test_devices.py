"""Layers that are not all on one device in memory: on disk, in memory but brought for each forward only, elsewhere."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import tiny_model, tiny_tokenizer

from qkvshare_agents import Host, HostSettings, Sampling, Turn
from qkvshare_agents.errors import InvalidSetting, UnsupportedModel
from qkvshare_agents.eval import doctor
from qkvshare_agents.kv import page
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.prompt.layout import Message
from qkvshare_agents.prompt.members import Member

pytest.importorskip("accelerate", reason="accelerate is not installed (extra gguf)")
DISK = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk",
        "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}  # fmt: skip
FIRST_ON_DISK = {**DISK, "model.embed_tokens": "disk", "model.layers.0": "disk"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> Engine:
    return Engine.load(str(checkpoint))


def placed(checkpoint: Path, device_map: object, folder: Path) -> Engine:
    return Engine.load(str(checkpoint), device_map=device_map, offload_folder=str(folder))


def ids_of_length(count: int) -> list[int]:
    return torch.randint(3, 600, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def behind_pages(engine: Engine, ids: list[int], at: int) -> torch.Tensor:
    assert engine.shape
    source, target = KVCache(engine.shape), KVCache(engine.shape)
    engine.feed(engine.begin(source), ids[:at])
    target.load([(page.keep_native(source.span(0, at)), at)])
    logits = engine.feed(engine.begin(target), ids[at:])
    assert logits is not None
    return logits


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, DISK, FIRST_ON_DISK, {"": "disk"}], ids=str)
def test_layers_on_disk_hand_over_what_layers_in_memory_do(
    checkpoint: Path, whole: Engine, device_map: object, tmp_path: Path
) -> None:
    engine = placed(checkpoint, device_map, tmp_path)
    assert engine.refusal is None and engine.devices == {torch.device("cpu")}
    assert engine.fingerprint == whole.fingerprint, "the same weights, wherever they are"
    ids = ids_of_length(100)
    assert torch.equal(behind_pages(engine, ids, 64), behind_pages(whole, ids, 64))
    assert doctor.is_exact(doctor.examine(engine, packed=False))


def test_weights_that_are_brought_for_a_forward_only_are_those_of_the_model(whole: Engine) -> None:
    import accelerate

    model = accelerate.cpu_offload(tiny_model(), execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    engine = Engine.of(model, tiny_tokenizer())
    before = engine.fingerprint
    assert engine.refusal is None and before.weights == whole.fingerprint.weights
    held = model.model.layers[1].mlp.up_proj._hf_hook.weights_map["weight"]
    with torch.no_grad():
        held[0, 0] += 1
    assert engine.fingerprint.differences(before) == ["weights"], "a change in place is noticed"


def test_a_file_that_was_written_anew_is_another_model(checkpoint: Path, tmp_path: Path) -> None:
    import os
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    engine = placed(copy, DISK, tmp_path)
    before = engine.fingerprint
    assert engine.fingerprint is before
    (tmp_path / "other").mkdir()
    tiny_model(seed=1).save_pretrained(tmp_path / "other")
    os.replace(tmp_path / "other" / "model.safetensors", copy / "model.safetensors")
    assert engine.fingerprint.differences(before) == ["weights"]


def turn(*messages: Message) -> Turn:
    return Turn(Member("a", "a", "You are a."), "", messages, Sampling(max_tokens=90))


def test_processes_with_other_placements_continue_from_each_other(checkpoint: Path, tmp_path: Path) -> None:
    one, other = (
        Host(HostSettings(str(checkpoint), device_map=device_map, offload_folder=str(tmp_path)))
        for device_map in (None, DISK)
    )
    task = Message("user", "Say a lot.", "user")
    try:
        answer = one.submit(turn(task)).result()
        more = turn(task, Message("assistant", answer.text, "a"), Message("user", "And more.", "user"))
        assert other.adopt(one.export(more), ("a",)) == ()
        assert other.submit(more).result().text == one.submit(more).result().text
        assert other.reports[-1].reused_tokens == one.reports[-1].reused_tokens > 64
    finally:
        one.close()
        other.close()


def test_a_weight_without_values_is_refused() -> None:
    model = tiny_model()
    model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(torch.empty(64, 48, device="meta"))
    host = Host(HostSettings("tiny"), Engine.of(model, tiny_tokenizer()))
    try:
        with pytest.raises(UnsupportedModel, match=r"layers\.1\.mlp\.up_proj\.weight has no values"):
            _ = host.engine
    finally:
        host.close()


def test_a_place_that_does_not_exist_is_one_line(checkpoint: Path) -> None:
    with pytest.raises(UnsupportedModel, match="can't be loaded here"):
        Engine.load(str(checkpoint), device_map={"": "nowhere"})
    with pytest.raises(InvalidSetting, match="give one of them"):
        HostSettings("tiny", device="cpu", device_map="auto")


def test_layers_on_two_devices_hand_over_what_layers_on_one_do() -> None:
    """With a second device that is made up, but whose tensors can't meet others: keys and values lie with their layer,
    and pages, packages and what `joint` measures come together from both. Several GPUs were not at hand."""
    if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip(f"torch {torch.__version__} can't be given a device in Python")
    script = Path(__file__).parents[1] / "second_device.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.stdout.split()[-1:] == ["equal"], done.stderr[-2000:]
