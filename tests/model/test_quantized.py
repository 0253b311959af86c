"""Quantized weights: what they compute is handed over exactly, and each quantization is a model of its own.

`pip install -c constraints.txt -e ".[quantized]"` brings the packages; tests of one that is not there are skipped.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from qkvshare_agents.errors import MissingDependency, UnsupportedModel
from qkvshare_agents.eval import doctor
from qkvshare_agents.kv import page
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.model.weights import named_weights


def bits_and_bytes(**options: object) -> Any:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (extra quantized)")
    pytest.importorskip("accelerate", reason="accelerate is not installed (extra quantized)")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**options)


def torchao(make: Callable[[Any], Any]) -> Any:
    pytest.importorskip("torchao", reason="torchao is not installed (extra quantized)")
    import torchao.quantization
    from transformers import TorchAoConfig

    return TorchAoConfig(make(torchao.quantization))


def quanto() -> Any:
    pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    from transformers import QuantoConfig

    return QuantoConfig(weights="int8")


QUANTIZED = {
    "nf4": lambda: bits_and_bytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "nf4 twice": lambda: bits_and_bytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "fp4": lambda: bits_and_bytes(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "llm.int8": lambda: bits_and_bytes(load_in_8bit=True),
    "torchao int8": lambda: torchao(lambda q: q.Int8WeightOnlyConfig()),
    "torchao int4": lambda: torchao(
        lambda q: q.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=q.PerGroup(32))
    ),
    "torchao int8 activations": lambda: torchao(lambda q: q.Int8DynamicActivationInt8WeightConfig()),
    "quanto int8": quanto,
}
NOISY = {"llm.int8", "torchao int8 activations"}  # activations are quantized, too


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    tiny_model("llama", **sizes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def load(checkpoint: Path, how: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, quantization_config=QUANTIZED[how]())


def ids_of_length(count: int) -> list[int]:
    return torch.randint(3, 600, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def read(engine: Engine, kv: KVCache | None, *pieces: list[int]) -> torch.Tensor:
    run = engine.begin(kv)
    for piece in pieces:
        logits = engine.feed(run, piece)
    assert logits is not None
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", QUANTIZED)
def test_a_handoff_is_what_the_model_says_when_it_goes_on_itself(
    checkpoint: Path, how: str, dtype: torch.dtype
) -> None:
    """Behind native pages, bit for bit what transformers' own cache gives for the same calls."""
    engine = Engine.of(load(checkpoint, how, dtype), tiny_tokenizer())
    assert engine.refusal is None and engine.shape is not None
    ids, source, target = ids_of_length(100), KVCache(engine.shape), KVCache(engine.shape)
    engine.feed(engine.begin(source), ids[:64])
    target.load([(page.keep_native(source.span(0, 64)), 64)])
    handed_over = read(engine, target, ids[64:])
    assert torch.equal(handed_over, read(engine, None, ids[:64], ids[64:]))
    whole = read(engine, None, ids)
    off = float((handed_over - whole).norm() / whole.norm())
    assert off <= engine.tolerance
    other = read(engine, None, ids[::-1])
    assert float((other - whole).norm() / whole.norm()) > 4 * engine.tolerance, "another text is told from noise"


@pytest.mark.parametrize("how", QUANTIZED)
def test_the_doctor_finds_it_exact(checkpoint: Path, how: str) -> None:
    engine = Engine.of(load(checkpoint, how), tiny_tokenizer())
    found = doctor.examine(engine, packed=False)
    assert doctor.is_exact(found), found
    assert engine.noisy and (engine.tolerance > 3e-2) == (how in NOISY)


def fingerprint_of(model: PreTrainedModel) -> str:
    return Engine.of(model, tiny_tokenizer()).fingerprint.weights


def test_no_two_quantizations_have_one_fingerprint(checkpoint: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (extra quantized)")
    pytest.importorskip("torchao", reason="torchao is not installed (extra quantized)")
    ways = [how for how in QUANTIZED if how != "quanto int8"]
    found = {fingerprint_of(load(checkpoint, how)) for how in ways}
    found.add(fingerprint_of(AutoModelForCausalLM.from_pretrained(checkpoint)))
    assert len(found) == len(ways) + 1


@pytest.mark.parametrize("how", QUANTIZED)
def test_the_same_quantization_has_the_same_fingerprint_before_and_after_it_was_used(
    checkpoint: Path, how: str
) -> None:
    """bitsandbytes packs its weights for the processor when they are first used."""
    first, second = (Engine.of(load(checkpoint, how), tiny_tokenizer()) for _ in range(2))
    fresh = first.fingerprint
    for _ in range(2):
        read(first, None, ids_of_length(20))
        assert first.fingerprint is fresh, "it is not taken again for nothing"
    assert second.fingerprint.digest == fresh.digest


@pytest.mark.parametrize("how", ["nf4", "torchao int8"])
def test_other_processes_get_the_same_fingerprint(checkpoint: Path, how: str) -> None:
    ours = Engine.of(load(checkpoint, how), tiny_tokenizer()).fingerprint.digest.hex()
    code = (
        "import sys; sys.path[:0] = [sys.argv[1], sys.argv[1] + '/model'];"
        "from pathlib import Path; import test_quantized as t;"
        "print(t.Engine.of(t.load(Path(sys.argv[2]), sys.argv[3]), t.tiny_tokenizer()).fingerprint.digest.hex())"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parents[1]), str(checkpoint), how]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1] == ours


def touch(tensor: torch.Tensor) -> None:
    at = tuple(n // 2 for n in tensor.shape)
    if tensor.dtype.is_floating_point:
        tensor[at] += 1
    else:
        tensor[at] ^= 1


@pytest.mark.parametrize("how", QUANTIZED)
def test_a_change_of_any_part_of_a_quantized_weight_is_noticed(checkpoint: Path, how: str) -> None:
    """Codes, and the scales beside them, in place."""
    engine = Engine.of(load(checkpoint, how), tiny_tokenizer())
    parts = [
        (name, weight)
        for name, weight in named_weights(engine.model)
        if "layers.1.mlp.up_proj" in name and isinstance(weight, torch.Tensor) and weight.numel()
    ]
    assert len(parts) > 1, "codes, and what scales them"
    for name, part in parts:
        before = engine.fingerprint
        with torch.no_grad():
            touch(part)
        assert engine.fingerprint.differences(before) == ["weights"], name


def test_taking_the_fingerprint_leaves_the_weights_as_they_are(checkpoint: Path) -> None:
    """`state_dict()` would not: it unpacks bitsandbytes' 4-bit weights and packs their scales anew."""
    engine = Engine.of(load(checkpoint, "nf4 twice"), tiny_tokenizer())
    before = {name: w.clone() for name, w in named_weights(engine.model) if isinstance(w, torch.Tensor)}
    _ = engine._identity._take(), engine.fingerprint
    after = dict(named_weights(engine.model))
    assert before.keys() == after.keys() and all(torch.equal(w, after[name]) for name, w in before.items())


@pytest.mark.parametrize("method", ["gptq", "awq", "eetq", "fbgemm_fp8"])
def test_a_checkpoint_that_can_not_be_loaded_here_is_one_line(checkpoint: Path, tmp_path: Path, method: str) -> None:
    import json
    import shutil

    folder = tmp_path / method
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 128}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises((MissingDependency, UnsupportedModel)) as caught:
        Engine.load(str(folder))
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
