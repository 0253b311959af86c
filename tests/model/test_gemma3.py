"""A real model with sliding windows, when its user has pulled it: docs/precision.md says how."""

import os

import pytest
import torch

from qkvshare_agents.errors import ModelNotFound
from qkvshare_agents.eval import corpus
from qkvshare_agents.eval.packing import bring, kl_divergence, seal_all
from qkvshare_agents.kv import page
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model import catalog, key_calibration
from qkvshare_agents.model.engine import Engine


@pytest.fixture(scope="module")
def gemma() -> Engine:
    try:
        catalog.resolve("gemma3-270m")
    except ModelNotFound:
        pytest.skip("gemma3-270m is not pulled; its terms are for the user to accept, so nothing brings it by itself")
    if os.environ.get("CI"):
        pytest.skip("a gigabyte of float32 weights; CI runs the family's tiny model instead")
    return Engine.load("gemma3-270m", dtype="float32")


@pytest.fixture(scope="module")
def ids(gemma: Engine) -> tuple[int, ...]:
    return corpus.tokens(gemma.template.encoder, 700)  # beyond the window of 512


def behind(engine: Engine, ids: tuple[int, ...], preset: str) -> torch.Tensor:
    """Logits of the last 20 positions behind 680 tokens that were stored and opened again."""
    assert engine.shape
    kv, working = KVCache(engine.shape), KVCache(engine.shape)
    engine.feed(engine.begin(kv), ids[:680])
    store = seal_all(kv, ids[:680], key_calibration.settle(page.preset(preset), engine))
    bring(store, ids[:680], working)
    return engine.logits(working, ids[680:], 20)


def replayed(engine: Engine, ids: tuple[int, ...]) -> torch.Tensor:
    return engine.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -20:].float()


@torch.inference_mode()
def test_a_handoff_beyond_the_window_is_exact_and_the_presets_stay_close(gemma: Engine, ids: tuple[int, ...]) -> None:
    assert gemma.refusal is None and gemma.shape and 512 in gemma.shape.windows
    expected = replayed(gemma, ids)
    assert (behind(gemma, ids, "native") - expected).norm() / expected.norm() < 1e-4
    for preset, limit in (("safe", 5e-3), ("compact", 5e-2), ("small", 0.2), ("tiny", 0.4)):
        got = behind(gemma, ids, preset)
        kl = sum(kl_divergence(a, b) for a, b in zip(expected, got, strict=True)) / len(expected)
        assert 0 < kl < limit, preset


def test_its_keys_are_better_rotated_if_they_are_balanced(gemma: Engine) -> None:
    rotate, balance = key_calibration.probed(gemma)
    assert rotate and balance
    balanced = key_calibration.divergence(gemma, rotate_keys=True, balance=balance)
    plain = key_calibration.divergence(gemma, rotate_keys=False)
    assert 1.5 * balanced < plain < key_calibration.divergence(gemma, rotate_keys=True)
