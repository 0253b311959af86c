"""What prompt layouts cost: rows and pairing, that the ids are the product's, and that no preference shows none."""

import json
import statistics
from dataclasses import replace

import pytest
import torch
from support import tiny_engine
from typer.testing import CliRunner

from qkvshare_agents.cli import app
from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.eval import layout
from qkvshare_agents.eval.layout import ARMS, LABELLED, RELAY, SHORT, STOCK, Arm
from qkvshare_agents.eval.scenarios import SHAPES, Scenario, all_scenarios
from qkvshare_agents.host.host import Host
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.prompt.layout import Message
from qkvshare_agents.prompt.sampling import Sampling
from qkvshare_agents.settings import HostSettings
from qkvshare_agents.turns.request import Turn

SCENARIOS = [*all_scenarios()[:4], *all_scenarios()[-3:]]
ROW = {"model", "layout", "shape", "nll", "margin", "margin_minus_stock", "low", "high", "instruction_effect"}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()


@pytest.fixture(scope="module")
def result(engine: Engine) -> dict:
    return layout.run(scenarios=SCENARIOS, engine=engine)


def test_scenarios_are_what_they_say() -> None:
    found = all_scenarios()
    assert len({scenario.name for scenario in found}) == len(found)
    assert {scenario.shape for scenario in found} == set(SHAPES)
    for scenario in found:
        assert {scenario.speaker, *dict(scenario.turns)} <= scenario.agents.keys(), scenario.name
        assert scenario.own_instruction != scenario.others_instruction, scenario.name
        assert scenario.turns[-1][0] != scenario.speaker, scenario.name
        assert len({scenario.gold, scenario.previous, ""}) == 3, scenario.name


def test_rows_are_of_every_layout_and_shape(result: dict, engine: Engine) -> None:
    rows = result["rows"]
    assert [(row["layout"], row["shape"]) for row in rows] == [(arm.name, shape) for arm in ARMS for shape in SHAPES]
    for row in rows:
        assert row.keys() == ROW and row["model"] == engine.name
        assert row["nll"] > 0 and row["low"] <= row["margin_minus_stock"] <= row["high"]
    assert result["header"]["handoff"] == 4 and result["header"]["again"] == 3
    assert json.loads(json.dumps(result)) == result


def test_differences_are_paired_by_scenario(result: dict) -> None:
    rows = {(row["layout"], row["shape"]): row for row in result["rows"]}
    single = {(row["name"], row["layout"]): row for row in result["scenarios"]}
    for shape in SHAPES:
        names = [scenario.name for scenario in SCENARIOS if scenario.shape == shape]
        for arm in ARMS:
            pairs = [single[name, arm.name]["margin"] - single[name, "stock"]["margin"] for name in names]
            row = rows[arm.name, shape]
            assert layout.paired(result["scenarios"], arm, STOCK, shape, "margin") == pairs
            assert row["margin_minus_stock"] == pytest.approx(statistics.fmean(pairs))
            assert row["margin"] - rows["stock", shape]["margin"] == pytest.approx(row["margin_minus_stock"], abs=1e-6)
            assert min(pairs) <= row["low"] <= row["high"] <= max(pairs)


def test_the_interval_narrows_with_the_scenarios_and_is_the_same_twice() -> None:
    values = torch.randn(400, generator=torch.Generator().manual_seed(1)).tolist()
    (low, high), (few_low, few_high) = layout.interval(values), layout.interval(values[:25])
    assert layout.interval(values) == (low, high) and 0.15 < high - low < 0.25, "3.92 / sqrt(400)"
    assert few_high - few_low > 3 * (high - low)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("arm", [STOCK, SHORT, RELAY], ids=lambda arm: arm.name)
def test_the_ids_are_those_that_a_host_feeds(scenario: Scenario, arm: Arm, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, fed = tiny_engine(), list[int]()
    feed = engine.driver.feed
    monkeypatch.setattr(engine.driver, "feed", lambda run, ids, *a, **k: fed.extend(ids) or feed(run, ids, *a, **k))
    settings = HostSettings("tiny", handoff=False, layout=arm.layout)
    host = Host(replace(settings, repeat_instruction_tokens=arm.repeat_instruction_tokens), engine)
    for name, instruction in scenario.agents.items():
        member = host.roster.learn("", name, instruction)
    member = host.roster.members("")[scenario.speaker]
    # as AutoGen shows them: what others said is the user's
    said = [Message("assistant" if n == scenario.speaker else "user", text, n) for n, text in scenario.turns]
    messages = (Message("user", scenario.task, "user"), *said)
    fed.clear()
    answer = host.submit(Turn(member, "", messages, Sampling(max_tokens=1))).result()
    host.close()
    prompt = layout.prompt_ids(scenario, arm, engine.template, scenario.own_instruction)
    assert answer.prompt_tokens == len(prompt) and tuple(fed[: len(prompt)]) == prompt


def test_each_answer_is_measured_in_one_forward(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[tuple[int, ...]] = []
    read = engine.driver.read
    monkeypatch.setattr(engine.driver, "read", lambda run, ids, count: fed.append(tuple(ids)) or read(run, ids, count))
    layout.run(scenarios=SCENARIOS[-1:] + SCENARIOS[:1], engine=engine)
    scenario, template = SCENARIOS[-1], engine.template
    for text in (scenario.gold, scenario.previous):
        for told in (scenario.own_instruction, scenario.others_instruction):
            whole = (*layout.prompt_ids(scenario, RELAY, template, told), *template.answer(text))
            assert fed.count(whole[:-1]) == 1
    assert len(fed) == 4 * (len(ARMS) + len(ARMS) - 1), "short cues are no other prompt where nobody answered twice"


def test_labels_stand_before_every_answer(engine: Engine) -> None:
    scenario = SCENARIOS[-1]
    ids = layout.prompt_ids(scenario, LABELLED, engine.template, scenario.own_instruction)
    text = engine.template.encoder.decode(ids, keep_special=True)
    assert text.endswith(f"<|im_start|>assistant\n{scenario.speaker}:")
    assert all(f"<|im_start|>assistant\n{name}: {said}<|im_end|>" in text for name, said in scenario.turns)


def test_a_likelihood_is_that_of_the_answer_token_by_token(engine: Engine, result: dict) -> None:
    scenario, template = SCENARIOS[0], engine.template
    run = engine.begin(None)
    logits = engine.feed(run, layout.prompt_ids(scenario, RELAY, template, scenario.own_instruction))
    nats = []
    for token in template.answer(scenario.gold):
        nats.append(-float(logits.log_softmax(-1)[token]))
        logits = engine.feed(run, [token])
    row = next(r for r in result["scenarios"] if (r["name"], r["layout"]) == (scenario.name, "relay"))
    assert row["nll"] == pytest.approx(statistics.fmean(nats), abs=1e-4)


def test_a_model_without_preference_has_no_margin() -> None:
    engine = tiny_engine()
    with torch.no_grad():
        engine.model.get_output_embeddings().weight.zero_()  # all tokens are as likely, behind any prompt
    for row in layout.run(scenarios=SCENARIOS, engine=engine)["rows"]:
        assert row["nll"] == pytest.approx(torch.tensor(640.0).log().item())
        assert row["low"] - 1e-6 <= 0 <= row["high"] + 1e-6
        assert abs(row["margin"]) < 1e-5 and abs(row["instruction_effect"]) < 1e-5


def test_a_random_model_prefers_no_layout(result: dict) -> None:
    assert all(row["low"] <= 0 <= row["high"] for row in result["rows"])


def test_scenarios_of_one_shape_are_not_enough(engine: Engine) -> None:
    with pytest.raises(InvalidSetting, match="none of again"):
        layout.run(scenarios=SCENARIOS[:2], engine=engine)
    with pytest.raises(InvalidSetting, match="none of handoff, again"):
        layout.run(scenarios=[], engine=engine)


def test_the_command_prints_json_or_80_columns(result: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "run", lambda **settings: result)
    assert json.loads(CliRunner().invoke(app.app, ["eval", "layout", "--json"]).stdout) == result
    shown = CliRunner().invoke(app.app, ["eval", "layout"]).stdout
    assert all(len(line) <= 80 for line in shown.splitlines()) and "…" not in shown
    assert all(arm.name in shown for arm in ARMS)
