"""A host whose words are scripted and whose KV is real.

The model runs on every token, so that pages, matches and injection are the real ones; only the choice of the
next token follows the script. Every turn is checked: the logits behind the handed-over KV must equal those of
one forward over the whole prompt.
"""

from collections.abc import Callable

import torch
from support import tiny_engine
from torch import Tensor

from qkvshare_agents.host import registry
from qkvshare_agents.host.host import Host, Loaded
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.model.run import Run
from qkvshare_agents.prompt.layout import Prompt, lay_out
from qkvshare_agents.prompt.ledger import Ledger
from qkvshare_agents.settings import HostSettings
from qkvshare_agents.turns.pipeline import Runner
from qkvshare_agents.turns.prefix import Start
from qkvshare_agents.turns.request import Answer, Turn
from qkvshare_agents.turns.workspace import Workspace

Script = Callable[[str], str]
MAX_DIFFERENCE = 1e-3


class ScriptedEngine:
    """Wraps an engine: after a prompt it says what the script answers to the prompt's text."""

    def __init__(self, engine: Engine, script: Script) -> None:
        self._engine, self._script = engine, script
        self.prompt: Prompt | None = None
        self.worst = 0.0
        self._words: list[int] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def feed(self, run: Run, ids: list[int], cancelled: Callable[[], bool] = lambda: False) -> Tensor | None:
        logits = self._engine.feed(run, ids, cancelled)
        if logits is None:
            return None
        encoder = self._engine.template.encoder
        if self.prompt is not None and self._engine.has_state and run.tokens < len(self.prompt.ids):
            return logits  # read in two parts, for the state before the cue
        if self.prompt is not None:
            prompt, self.prompt = self.prompt, None
            assert run.tokens == len(prompt.ids), "what was fed and reused is not the prompt"
            replayed = self._engine.feed(self._engine.begin(None), prompt.ids)
            self.worst = max(self.worst, float((logits - replayed).abs().max()))
            answer = self._script(encoder.decode(prompt.ids, keep_special=True))
            self._words = [*encoder.text(answer), min(self._engine.stop_ids)]
        if not self._words:  # read outside of a turn, to probe the model
            return logits
        scripted = torch.full_like(logits, -1e4)
        scripted[self._words.pop(0)] = 0.0
        return scripted


class ScriptedHost(Host):
    """Records prompts; hands each to the engine, which then knows what to say."""

    def __init__(self, script: Script, *, engine: Engine | None = None, **settings: object) -> None:
        settings = {"precision": "native", **settings}
        super().__init__(HostSettings("scripted", **settings), ScriptedEngine(engine or tiny_engine(), script))
        self.prompts: list[Prompt] = []
        self.restarts: list[tuple[str, str]] = []
        self.turns: list[Turn] = []

    def _run(self, turn: Turn, *rest: object) -> Answer:
        self.turns.append(turn)
        return super()._run(turn, *rest)

    def _set_up(self, engine: Engine) -> Loaded:
        host = self

        class ScriptedWorkspace(Workspace):
            def prompt(self, turn: Turn) -> Prompt:
                prompt = super().prompt(turn)
                host.note_restart(turn, prompt)
                return prompt

        class ScriptedRunner(Runner):
            def _begin(self, prompt: Prompt, *rest: object) -> Start:
                host.prompts.append(prompt)
                started = super()._begin(prompt, *rest)
                self._space.engine.prompt = prompt
                return started

        shared = {"ledger": self.ledger, "roster": self.roster, "reports": self.reports}
        return Loaded.of(ScriptedWorkspace(self.settings, engine, **shared), ScriptedRunner)

    def note_restart(self, turn: Turn, prompt: Prompt) -> None:
        members, own = self.roster.members(turn.scope), self.settings
        anew = lay_out(
            turn.messages,
            turn.speaker,
            members,
            template=self.engine.template,
            ledger=Ledger(),
            layout=own.layout,
            system=own.system,
            view=turn.view,
        )
        decode = self.engine.template.encoder.decode
        self.restarts.append((decode(prompt.ids, keep_special=True), decode(anew.ids, keep_special=True)))

    @property
    def texts(self) -> list[str]:
        return [self.engine.template.encoder.decode(p.ids, keep_special=True) for p in self.prompts]

    @property
    def modes(self) -> list[str]:
        return [report.mode.value for report in self.reports]

    def assert_exact(self) -> None:
        assert self.prompts, "no turn ran"
        for text, anew in self.restarts:
            assert "".join(text.split()) == "".join(anew.split()), "what the messages say is not what the prompt says"
        assert self.engine.worst <= MAX_DIFFERENCE, f"a handoff moved the logits by {self.engine.worst}"


def install(host: Host, name: str) -> None:
    """Let clients with `host=name` and equal settings find this host."""
    registry._hosts[name] = host
    registry._users[name] = 1


def uninstall(name: str) -> None:
    host = registry._hosts.pop(name, None)
    registry._users.pop(name, None)
    if host:
        host.close()
