"""Whether the layout of a prompt costs answer quality: how much likelier an answer is that obeys the speaker's
instruction than one that obeys the instruction of the agent before it."""

import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import transformers

from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.eval.scenarios import SHAPES, Scenario, all_scenarios
from qkvshare_agents.ids import Ids
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.model.run import Run
from qkvshare_agents.prompt.chat_template import Template
from qkvshare_agents.prompt.cue import REPEATED_TOKENS
from qkvshare_agents.prompt.layout import Layout, Message, lay_out
from qkvshare_agents.prompt.ledger import Ledger
from qkvshare_agents.prompt.members import Member

MEASURES = ("nll", "margin", "instruction_effect", "prompt_tokens")
_DRAWS = 10_000
_LEVEL = 0.95


@dataclass(frozen=True)
class Arm:
    """One way to lay out a prompt. labels: `name: ` stands before every answer, and the speaker continues its own; an
    experiment, which the product does not offer."""

    name: str
    layout: Layout
    repeat_instruction_tokens: int = REPEATED_TOKENS
    labels: bool = False

    def answer(self, agent: str, text: str) -> str:
        """An earlier answer as it stands in the prompt."""
        return f"{agent}: {text}" if self.labels else text


STOCK = Arm("stock", "stock")
RELAY = Arm("relay", "relay")
SHORT = Arm("relay, short cues", "relay", repeat_instruction_tokens=0)
LABELLED = Arm("relay, author labels", "relay", labels=True)
ARMS = (STOCK, SHORT, RELAY, LABELLED)
_AGAINST = ((SHORT, STOCK), (RELAY, STOCK), (LABELLED, STOCK), (RELAY, SHORT), (LABELLED, RELAY))


def run(
    *, model: str = "smollm2-135m", scenarios: Sequence[Scenario] | None = None, engine: Engine | None = None
) -> dict[str, Any]:
    """Every scenario in every layout: {"header", "rows", "differences", "scenarios"}.

    Rows: model, layout and shape; means over its scenarios of nll, nats per token of the answer that obeys the
    speaker's instruction; margin, by how many nats per token an answer in the previous agent's role is less likely;
    margin_minus_stock, paired by scenario, with low and high, its 95 % bootstrap interval; instruction_effect, the
    margin less what it is when the speaker is told what the previous agent was told. Differences: of every measure
    between two layouts, with intervals. Scenarios: what each of them gave.

    All on the ids that the product lays out, in one forward for each answer. Raises InvalidSetting without scenarios
    of both shapes.
    """
    engine = engine or Engine.load(model)
    scenarios = all_scenarios() if scenarios is None else scenarios
    if missing := [shape for shape in SHAPES if shape not in {scenario.shape for scenario in scenarios}]:
        raise InvalidSetting(f"scenarios of both shapes are needed; there is none of {', '.join(missing)}")
    nll = cache(partial(_nll, engine))  # two layouts are one where nobody has answered twice
    measured = [_measure(nll, engine.template, scenario, arm) for scenario in scenarios for arm in ARMS]
    return {
        "header": _header(engine, scenarios),
        "rows": [_row(engine.name, measured, arm, shape) for arm in ARMS for shape in SHAPES],
        "differences": [
            {"layout": arm.name, "against": other.name, "shape": shape, "measure": measure}
            | _with_interval(paired(measured, arm, other, shape, measure))
            for arm, other in _AGAINST
            for shape in SHAPES
            for measure in MEASURES
        ],
        "scenarios": measured,
    }


def prompt_ids(scenario: Scenario, arm: Arm, template: Template, instruction: str) -> Ids:
    """The prompt for the speaker, which is told `instruction`, up to where its answer begins."""
    agents = {**scenario.agents, scenario.speaker: instruction}
    members = {name: Member(name, name, told) for name, told in agents.items()}
    said = (Message("assistant", arm.answer(name, text), name) for name, text in scenario.turns)
    prompt = lay_out(
        [Message("user", scenario.task, "user"), *said],
        members[scenario.speaker],
        members,
        template=template,
        ledger=Ledger(),
        layout=arm.layout,
        repeat_instruction_tokens=arm.repeat_instruction_tokens,
    )
    return prompt.ids + (template.answer(f"{scenario.speaker}:") if arm.labels else ())


def paired(measured: Sequence[dict[str, Any]], arm: Arm, other: Arm, shape: str, measure: str) -> list[float]:
    """What `arm` has more of a measure than `other`, scenario by scenario."""
    ours, theirs = (
        {row["name"]: row[measure] for row in measured if (row["layout"], row["shape"]) == (a.name, shape)}
        for a in (arm, other)
    )
    return [ours[name] - theirs[name] for name in ours]


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Bootstrap interval of the mean: `values` are drawn anew, with repetition (Efron 1979; percentiles)."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(values), (_DRAWS, len(values)), generator=generator)
    means = torch.tensor(values, dtype=torch.float64)[drawn].mean(1)
    low, high = means.quantile(torch.tensor([(1 - _LEVEL) / 2, (1 + _LEVEL) / 2], dtype=torch.float64)).tolist()
    return low, high


def show(result: dict[str, Any]) -> None:
    """Print the result of `run` as a table of at most 80 columns."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    header = result["header"]
    counts = ", ".join(f"{header[shape]} {shape}" for shape in SHAPES)
    title = f"{header['model']}: {counts}; nats per token"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False, collapse_padding=True)
    for name in ("layout", "shape"):
        table.add_column(name, no_wrap=True)
    for name in ("nll", "margin", "minus\nstock", "interval", "effect"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["rows"]:
        cells = (
            row["nll"],
            row["margin"],
            row["margin_minus_stock"],
            row["low"],
            row["high"],
            row["instruction_effect"],
        )
        nll, margin, difference, low, high, effect = (f"{cell:+.2f}" for cell in cells)
        table.add_row(row["layout"], row["shape"], nll[1:], margin, difference, f"{low} to {high}", effect)
    Console(width=80).print(table)


def _measure(nll: Callable[[Ids, Ids], float], template: Template, scenario: Scenario, arm: Arm) -> dict[str, Any]:
    own = prompt_ids(scenario, arm, template, scenario.own_instruction)
    others = prompt_ids(scenario, arm, template, scenario.others_instruction)
    gold, previous = (_answer_ids(text, arm, template) for text in (scenario.gold, scenario.previous))
    margin = nll(own, previous) - nll(own, gold)
    return {
        "name": scenario.name,
        "layout": arm.name,
        "shape": scenario.shape,
        "nll": nll(own, gold),
        "margin": margin,
        "instruction_effect": margin - (nll(others, previous) - nll(others, gold)),
        "prompt_tokens": len(own),
    }


def _answer_ids(text: str, arm: Arm, template: Template) -> Ids:
    return template.encoder.text(" " + text) if arm.labels else template.answer(text)


def _nll(engine: Engine, prompt: Ids, answer: Ids) -> float:
    """Nats per token of `answer` behind `prompt`."""
    with torch.inference_mode():
        logits = engine.driver.read(Run(None, None, 0), (*prompt, *answer[:-1]), len(answer))  # needs no cache
    return torch.nn.functional.cross_entropy(logits.cpu(), torch.tensor(answer)).item()


def _row(model: str, measured: list[dict[str, Any]], arm: Arm, shape: str) -> dict[str, Any]:
    rows = [row for row in measured if (row["layout"], row["shape"]) == (arm.name, shape)]
    nll, margin, effect = (statistics.fmean(row[name] for row in rows) for name in MEASURES[:3])
    against = _with_interval(paired(measured, arm, STOCK, shape, "margin"))
    return {
        "model": model,
        "layout": arm.name,
        "shape": shape,
        "nll": nll,
        "margin": margin,
        "margin_minus_stock": against["difference"],
        "low": against["low"],
        "high": against["high"],
        "instruction_effect": effect,
    }


def _with_interval(differences: list[float]) -> dict[str, float]:
    low, high = interval(differences)
    return {"difference": statistics.fmean(differences), "low": low, "high": high}


def _header(engine: Engine, scenarios: Sequence[Scenario]) -> dict[str, Any]:
    return {
        "model": engine.name,
        **{shape: sum(scenario.shape == shape for scenario in scenarios) for shape in SHAPES},
        "dtype": str(engine.model.dtype),
        "repeat_instruction_tokens": REPEATED_TOKENS,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
