"""Short conversations of two to four agents, with an answer that keeps to the speaker's instruction and one that does
not: `data/scenarios.json`, written for this project."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

Shape = Literal["handoff", "again"]
SHAPES: tuple[Shape, ...] = ("handoff", "again")


@dataclass(frozen=True)
class Scenario:
    """A conversation up to the speaker's turn.

    agents: instructions by name. turns: (name, answer) so far. gold: an answer that obeys the speaker's instruction;
    previous: one that obeys the instruction of the agent that answered last.
    """

    name: str
    task: str
    agents: Mapping[str, str]
    turns: tuple[tuple[str, str], ...]
    speaker: str
    gold: str
    previous: str

    @property
    def shape(self) -> Shape:
        """`handoff`: the speaker is new. `again`: it has answered before."""
        return "again" if self.speaker in dict(self.turns) else "handoff"

    @property
    def own_instruction(self) -> str:
        """What the speaker is told."""
        return self.agents[self.speaker]

    @property
    def others_instruction(self) -> str:
        """What the agent was told that answered last."""
        return self.agents[self.turns[-1][0]]


def all_scenarios() -> tuple[Scenario, ...]:
    """In a fixed order; all kinds of tasks in both shapes."""
    text = (files("qkvshare_agents.eval") / "data" / "scenarios.json").read_text(encoding="utf-8")
    return tuple(Scenario(**{**entry, "turns": tuple(map(tuple, entry["turns"]))}) for entry in json.loads(text))
