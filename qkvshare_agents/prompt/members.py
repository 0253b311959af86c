"""Who takes part in a conversation, and what each member was told."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

Author = tuple[str, str]  # (scope, name) of a member


@dataclass(frozen=True)
class Member:
    """An agent of a conversation.

    label: how cues call it; "" when it was first met without a name, which its later cues must repeat.
    instruction: its system message. tools: OpenAI-style function schemas.
    """

    name: str
    label: str
    instruction: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()


Members = Mapping[str, Member]


_KEPT_SCOPES = 1000


_MOST_MEMBERS = 256  # of a scope: outside of a team, all agents are in one


_GONE = 64  # calls of others


@dataclass
class Roster:
    """Members per scope (one scope per team), declared or learnt when their call comes through.

    Scopes that learnt nothing for longest are forgotten first, and so are a scope's earliest members: then they are
    learnt anew, a shorter match. Tools of a member that let 64 calls of others pass by are forgotten, too: it may be
    gone, renamed for instance, and its tools would stand in the header that the others share, but not in the headers
    of those who never met it.
    """

    _scopes: OrderedDict[str, dict[str, Member]] = field(default_factory=OrderedDict)
    _unheard: dict[str, dict[str, int]] = field(default_factory=dict)  # calls of others since a member's last
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def members(self, scope: str) -> Members:
        """A snapshot, so that a prompt can't change while it is laid out."""
        with self._lock:
            return MappingProxyType(dict(self._scopes.get(scope, {})))

    def learn(
        self,
        scope: str,
        name: str,
        instruction: str | None,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        named: bool = True,
    ) -> Member:
        """Note what a member's call showed. An empty tool list (a reflection call) does not take tools away."""
        with self._lock:
            members = self._scopes.setdefault(scope, {})
            self._scopes.move_to_end(scope)
            while len(self._scopes) > _KEPT_SCOPES:
                self._unheard.pop(self._scopes.popitem(last=False)[0], None)
            known = members.get(name) or Member(name, name if named else "")
            if instruction is not None:
                known = replace(known, instruction=instruction)
            if tools:
                known = replace(known, tools=tuple(tools))
            members[name] = known
            self._miss_others(scope, name)
            if len(members) > _MOST_MEMBERS:
                earliest = next(iter(members))
                del members[earliest]
                self._unheard[scope].pop(earliest, None)
            return known

    def _miss_others(self, scope: str, name: str) -> None:
        members, unheard = self._scopes[scope], self._unheard.setdefault(scope, {})
        unheard.pop(name, None)
        for other in [m for m in members.values() if m.tools and m.name != name]:
            unheard[other.name] = unheard.get(other.name, 0) + 1
            if unheard[other.name] >= _GONE:
                del unheard[other.name]
                members[other.name] = replace(other, tools=())

    def identify(
        self,
        scope: str,
        instruction: str,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        told: str | None = None,
        running: str | None = None,
        last: str | None = None,
    ) -> tuple[str, bool]:
        """Who is calling: (name, whether the name may stand in cues).

        told: named by the caller or by the framework. running: the agent that the framework's runtime is running,
        or another one that this agent runs: whoever spoke last, or has the running one's instruction and tools, is
        it. last: source of the newest assistant message, which can be another member's after a handoff by tool call.
        Without any of them the instruction decides; where it is that of several, nobody is named.
        """
        if told:
            return told, True
        nameless = f"#{hash_name(instruction)}"
        with self._lock:
            members = self._scopes.get(scope, {})
            if running is not None:
                known = members.get(running)
                alike = known is not None and (known.instruction, known.tools) == (instruction, tuple(tools))
                if known is None or alike or last == running:
                    return running, True
            same = [m.name for m in members.values() if instruction and m.instruction == instruction]
            if last in members and last not in same and same:
                last = None  # it handed off to a member that is known by its instruction
            if last is None:
                certain = len(same) == 1 and same != [running]
                return (same[0], True) if certain else (nameless, False)
            if nameless in members:  # met before it had said anything: keep its cues as they were
                met = members.pop(nameless)
                members.setdefault(last, replace(met, name=last))
            return last, True


def hash_name(instruction: str) -> str:
    """A short stable name for an agent of which only the instruction is known."""
    return hashlib.sha256(instruction.encode()).hexdigest()[:8]
