"""How much several agents read in a conversation that grows: with handoff, with own caches only, by text replay."""

import platform
from typing import Any

import torch
import transformers

from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.eval import corpus
from qkvshare_agents.host.host import Host
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.prompt.layout import Message
from qkvshare_agents.prompt.sampling import Sampling
from qkvshare_agents.settings import HostSettings
from qkvshare_agents.turns.access import Access
from qkvshare_agents.turns.request import Answer, Turn

_DUTIES = ("Answer the question.", "Say what is missing in the answer.", "Sum up what was said so far.")


def run(
    *,
    model: str = "smollm2-135m",
    agents: int = 3,
    turns: int = 6,
    tokens: int = 128,
    answer_tokens: int = 48,
    preset: str = "safe",
    engine: Engine | None = None,
) -> dict[str, Any]:
    """`agents` answer in a circle; before each of the `turns`, a human adds about `tokens` tokens of text.

    Per turn: conversation_tokens, all there is behind it, delimiters included; prefilled_tokens and reused_tokens of
    its prompt with handoff; replay_prefilled_tokens, measured on the same messages without handoff;
    isolated_prefilled_tokens, measured on a conversation of its own in which every agent has its own system message
    first and keeps its own cache. computed_per_token: tokens read or generated with handoff, per token of the
    conversation. Raises InvalidSetting for sizes below 1 or a model that can't hand KV over.
    """
    if min(agents, turns, tokens, answer_tokens) < 1:
        raise InvalidSetting("agents, turns, tokens and answer_tokens must be at least 1")
    engine = engine or Engine.load(model)
    if engine.refusal:
        raise InvalidSetting(f"{engine.name} can't hand KV over: {engine.refusal}")
    shared = _Conversation(HostSettings(model, precision=preset), engine, answer_tokens)
    alone = _Conversation(HostSettings(model, precision=preset, layout="stock"), engine, answer_tokens)
    replay = _Conversation(HostSettings(model, precision=preset, handoff=False), engine, answer_tokens)
    encoder, rows = engine.template.encoder, list[dict[str, Any]]()
    text = corpus.tokens(encoder, tokens * turns)
    for turn in range(turns):
        asked = Message("user", encoder.decode(text[turn * tokens : (turn + 1) * tokens]), "user")
        name, duty = f"agent{turn % agents + 1}", _DUTIES[turn % agents % len(_DUTIES)]
        replay.messages = [*shared.messages]
        replay.host.ledger = shared.host.ledger
        handed, again, own = (c.turn(name, duty, asked).report for c in (shared, replay, alone))
        rows.append(
            {
                "turn": turn + 1,
                "agent": name,
                "conversation_tokens": handed.prompt_tokens + handed.generated_tokens,
                "prefilled_tokens": handed.prefilled_tokens,
                "reused_tokens": handed.reused_tokens,
                "replay_prefilled_tokens": again.prefilled_tokens,
                "isolated_prefilled_tokens": own.prefilled_tokens,
                "first_token_ms": handed.first_token_ms,
                "replay_first_token_ms": again.first_token_ms,
                "isolated_first_token_ms": own.first_token_ms,
            }
        )
    for conversation in (shared, alone, replay):
        conversation.host.close()
    computed = sum(report.prefilled_tokens + report.generated_tokens for report in shared.host.reports)
    return {
        "model": engine.name,
        "preset": preset,
        "agents": agents,
        "turns": rows,
        "computed_per_token": computed / rows[-1]["conversation_tokens"],
        "dtype": str(engine.model.dtype),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def show(result: dict[str, Any]) -> None:
    """Print the result of `run` as a table, and what it adds up to."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    title = f"{result['agents']} agents in a circle: {result['model']}, {result['preset']}"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    columns = ["turn", "agent", "conversation_tokens", "reused_tokens", "prefilled_tokens"]
    columns += ["isolated_prefilled_tokens", "replay_prefilled_tokens"]
    for column in columns:
        table.add_column(column.replace("_", "\n"), justify="left" if column == "agent" else "right")
    for row in result["turns"]:
        table.add_row(*(str(row[column]) for column in columns))
    sums = [str(sum(row[column] for row in result["turns"])) for column in columns[4:]]
    table.add_section()
    table.add_row("all", "", "", "", *sums)
    console = Console()
    console.print(table)
    console.print(f"with handoff each token of the conversation is computed {result['computed_per_token']:.2f} times")
    console.print("isolated: each agent has its own system message first and keeps its own cache")


class _Conversation:
    """Messages, and the host that answers them."""

    def __init__(self, settings: HostSettings, engine: Engine, answer_tokens: int) -> None:
        self.host = Host(settings, engine)
        self.messages: list[Message] = []
        self._sampling = Sampling(max_tokens=answer_tokens)

    def turn(self, name: str, duty: str, asked: Message) -> Answer:
        """The answer of `name`, which joins the conversation."""
        self.messages.append(asked)
        member = self.host.roster.learn("", name, duty)
        alone = self.host.settings.layout == "stock"
        access = Access((name,), frozenset({name})) if alone else Access()
        turn = Turn(member, "", tuple(self.messages), self._sampling, access=access)
        answer = self.host.submit(turn).result()
        self.messages.append(Message("assistant", answer.text, name))
        return answer
