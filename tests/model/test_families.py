"""Model families: what the committed table says holds, and conversations on models with recurrent state are exact."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from scripted import ScriptedHost
from support import tiny_tokenizer
from typer.testing import CliRunner

from qkvshare_agents.cli import app
from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.eval import doctor, families
from qkvshare_agents.kv.state import Snapshot
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model import cache_layers
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.prompt.layout import Message
from qkvshare_agents.prompt.sampling import Sampling
from qkvshare_agents.store.state_store import SnapshotStore
from qkvshare_agents.turns.request import Turn

TABLE = (Path(__file__).parents[1].parent / "docs/families.md").read_text()
REPRESENTATIVE = (
    "llama", "mistral", "gpt2", "bloom", "gemma3_text", "gemma4_text", "llama4_text", "gpt_oss", "deepseek_v3",
    "qwen3_5_text", "lfm2", "mamba", "mamba2", "falcon_h1", "jamba", "nemotron_h", "gptj", "longcat_flash", "olmoe",
    "deepseek_v32", "glm_moe_dsa", "qwen4_exp_text", "deepseek_v4", "kimi_linear", "minimax", "rwkv", "recurrent_gemma",
)  # fmt: skip
STATEFUL = ("qwen3_5_text", "lfm2", "falcon_h1", "mamba", "mamba2", "jamba", "qwen4_exp_text", "deepseek_v4")
INDEXED = ("deepseek_v32", "glm_moe_dsa", "qwen4_exp_text")
TASK = Message("user", "Say something long enough to fill a page or two of the cache, please.", "user")


def engine_of(family: str) -> Engine:
    return Engine.of(families.tiny_model(family), tiny_tokenizer(), name=family)


@pytest.mark.parametrize("family", REPRESENTATIVE)
def test_the_committed_table_says_what_is_found(family: str) -> None:
    row = next((line for line in TABLE.splitlines() if line.startswith(f"| {family} |")), None)
    assert row is not None, "run `qkvshare matrix` and commit its table"
    assert row == families.markdown(families.matrix([family])).splitlines()[-1]


def test_the_table_has_every_family() -> None:
    named = re.findall(r"^\| ([a-z0-9_]+) \| (?:attention|recurrent|parallel|indexed)", TABLE, re.M)
    assert named == list(families.FAMILIES)


def test_an_unknown_family_names_the_known_ones() -> None:
    with pytest.raises(InvalidSetting, match="no family gpt5; the families are llama"):
        families.matrix(["gpt5"])


def test_the_commands_print_json() -> None:
    result = CliRunner().invoke(app.app, ["matrix", "llama", "--json"])
    found = json.loads(result.stdout)["llama"]
    assert found["one_token"] and found["kl"]["native"] < found["kl"]["tiny"] < found["kl"]["no context"]


@pytest.mark.parametrize("family", [*STATEFUL, *INDEXED[:2]])
def test_a_conversation_over_recurrent_state_and_indexers_is_exact(family: str) -> None:
    h = ScriptedHost(lambda prompt: f"The answer number {len(prompt)} in some words.", engine=engine_of(family))
    messages = [TASK]
    for i in range(5):
        member = h.roster.learn("", "ab"[i % 2], f"You are {'ab'[i % 2]}.")
        answer = h.submit(Turn(member, "", tuple(messages), Sampling(max_tokens=30))).result()
        messages.append(Message("user", answer.text, member.name))
    assert h.modes == ["TEXT", *["KV"] * 4]
    h.assert_exact()


@pytest.mark.parametrize("family", STATEFUL)
def test_another_answer_to_the_same_prompt_resumes_before_the_cue(family: str) -> None:
    h = ScriptedHost(lambda prompt: f"The answer number {len(prompt)} in some words.", engine=engine_of(family))
    a, b = (h.roster.learn("", name, f"You are {name}, and answer like {name} does.") for name in "ab")
    said = h.submit(Turn(a, "", (TASK,), Sampling(max_tokens=30))).result().text
    history = (TASK, Message("user", said, "a"))
    first = h.submit(Turn(b, "", history, Sampling(max_tokens=30))).result().report
    own = (TASK, Message("assistant", said, "a"))
    again = h.submit(Turn(a, "", own, Sampling(max_tokens=30))).result().report  # another cue, same history
    assert first.mode.value == again.mode.value == "KV" and again.reused_tokens == h.prompts[-1].settled
    h.assert_exact()


def test_where_state_is_missing_the_text_is_read_and_the_report_says_so() -> None:
    h = ScriptedHost(lambda prompt: f"The answer number {len(prompt)} in some words.", engine=engine_of("qwen3_5_text"))
    member = h.roster.learn("", "a", "You are a.")
    messages = [TASK]
    for _ in range(3):
        answer = h.submit(Turn(member, "", tuple(messages), Sampling(max_tokens=30))).result()
        messages.append(Message("assistant", answer.text, "a"))
    h.load().snapshots.clear()
    report = h.submit(Turn(member, "", tuple(messages), Sampling(max_tokens=30))).result().report
    assert report.mode.value == "TEXT" and "state and windows are kept only where turns end" in report.reasons[0]
    h.assert_exact()


def test_payload_counts_the_state() -> None:
    engine = engine_of("mamba2")
    h = ScriptedHost(lambda prompt: "Yes, that is so.", engine=engine)
    member = h.roster.learn("", "a", "You are a.")
    said = h.submit(Turn(member, "", (TASK,), Sampling(max_tokens=30))).result().text
    history = (TASK, Message("assistant", said, "a"))
    report = h.submit(Turn(member, "", history, Sampling(max_tokens=30))).result().report
    kept = max(h.load().snapshots._kept.values(), key=lambda snapshot: snapshot.tokens)
    assert report.payload_bytes == kept.nbytes > 0 and report.payload_ratio == pytest.approx(2.0)


@pytest.mark.parametrize("family", STATEFUL)
def test_a_snapshot_is_not_changed_by_whoever_continues_from_it(family: str) -> None:
    engine = engine_of(family)
    assert engine.shape
    kv = KVCache(engine.shape)
    run = engine.begin(kv)
    ids = [(7 * i) % 600 for i in range(40)]
    engine.feed(run, ids)
    kv.state = engine.snapshot(run)
    assert kv.state and kv.tokens == 40
    first, second = (engine.logits(kv, [5, 6, 7, 8], 4) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("family", INDEXED)
@pytest.mark.parametrize("fault", ["forgets", "shifted"])
def test_an_indexer_with_wrong_keys_is_seen_by_the_probe(
    family: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it picks more tokens than a probe reads: it is made to pick fewer for as long."""
    wide = {"index_topk": 2048} if family != "qwen4_exp_text" else {"indexer_budget": 2048}
    assert Engine.of(families.tiny_model(family, **wide), tiny_tokenizer()).refusal is None
    original = cache_layers._IndexedLayer.update_indexer

    def wrong(self: cache_layers._IndexedLayer, states: torch.Tensor) -> torch.Tensor:
        found = original(self, states)
        before = found.shape[1] - states.shape[1]
        if before and fault == "forgets":
            found[:, :before] = 0
        return found if fault == "forgets" or not before else found.roll(1, 1)

    monkeypatch.setattr(cache_layers._IndexedLayer, "update_indexer", wrong)
    refusal = Engine.of(families.tiny_model(family, **wide), tiny_tokenizer()).refusal
    assert refusal and "continues differently" in refusal


def test_layers_that_use_an_earlier_ones_choice_have_no_indexer() -> None:
    shape = engine_of("glm_moe_dsa").shape
    assert shape and shape.layers == 4 + len(shape.indexed) and 0 < len(shape.indexed) < 4


@pytest.mark.parametrize(("precision", "bits"), [("tiny", {3, 2, 8}), ("safe", {8}), ("native", set())])
def test_what_indexers_keep_has_eight_bits(precision: str, bits: set[int]) -> None:
    h = ScriptedHost(lambda _: "Yes, so it is.", engine=engine_of("deepseek_v32"), precision=precision)
    h.submit(Turn(h.roster.learn("", "a", "You are a."), "", (TASK,), Sampling(max_tokens=30))).result()
    pages = h.store.match(h.prompts[0].ids).pages
    parts = [part for page in pages for part in page.parts if part.packed]
    assert {part.packed.bits for part in parts} == bits
    assert {part.packed.bits for part in parts if min(part.layers) >= 3} == bits & {8}


def test_a_packed_history_is_not_for_indexers() -> None:
    h = ScriptedHost(lambda _: "Yes, so it is.", engine=engine_of("deepseek_v32"), packed_history=True)
    member, messages = h.roster.learn("", "a", "You are a."), [TASK]
    for _ in range(2):
        answer = h.submit(Turn(member, "", tuple(messages), Sampling(max_tokens=30))).result()
        messages.append(Message("assistant", answer.text, "a"))
    assert h.modes == ["TEXT", "KV"]
    h.assert_exact()


def test_a_model_that_is_not_exact_is_seen_by_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("qwen3_5_text")
    assert doctor.is_exact(doctor.examine(engine, packed=False))
    original = Engine.snapshot
    stale = Snapshot(0, ())
    monkeypatch.setattr(Engine, "snapshot", lambda self, run: stale and original(self, run) and stale)
    assert not doctor.is_exact(doctor.examine(engine, packed=False))


def a_snapshot(tokens: int, size: int = 100) -> Snapshot:
    return Snapshot(tokens, ({"recurrent_states": {0: torch.zeros(size)}},))


def test_the_longest_snapshot_of_exactly_these_ids_is_found() -> None:
    store = SnapshotStore(10**6)
    for ids in ((1, 2), (1, 2, 3, 4), (1, 2, 9, 4, 5)):
        store.keep(ids, a_snapshot(len(ids)))
    assert [s.tokens if (s := store.longest(ids)) else 0 for ids in ((1,), (1, 2, 3), (1, 2, 3, 4, 5), (2, 1))] == [
        0, 2, 4, 0,
    ]  # fmt: skip


def test_snapshots_stay_within_their_budget_and_the_last_used_stays() -> None:
    store = SnapshotStore(3 * 400)
    for first in range(3):
        store.keep((first,), a_snapshot(1))
    store.longest((0, 5))
    store.keep((7,), a_snapshot(1))
    assert store.nbytes == 1200 and store.longest((0,)) and not store.longest((1,))
    store.keep((8,), a_snapshot(1, size=10_000))
    assert store.nbytes == 0, "one that is larger than the budget is not kept"


def test_snapshots_are_plain_values() -> None:
    """They can be sent later: nothing in them but tensors, numbers and names."""
    engine = engine_of("falcon_h1")
    assert engine.shape
    run = engine.begin(KVCache(engine.shape))
    engine.feed(run, [1, 2, 3])
    snapshot = engine.snapshot(run)
    assert snapshot and dataclasses.is_dataclass(snapshot)
    for layer in snapshot.layers:
        assert {"conv_states", "recurrent_states"} <= layer.keys() and "_kv" not in layer and "keys" not in layer
