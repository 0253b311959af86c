"""How much of a context a prompt may take, and spans of its tokens.

Cuts grow in coarse steps of the room, so that one serves several turns.
"""

from dataclasses import dataclass

_STEPS = 8  # in which a cut grows, to the context's room for the prompt


@dataclass(frozen=True)
class Room:
    """context: tokens in all. answer: those of them that are left to the answer."""

    context: int
    answer: int

    @property
    def prompt(self) -> int:
        return self.context - self.answer

    @property
    def step(self) -> int:
        return max(1, self.prompt // _STEPS)

    def lacks(self, prompt_tokens: int) -> int:
        """How many tokens of a prompt are too many; 0 if it fits."""
        return max(0, prompt_tokens - self.prompt)


def room_for(context: int, max_tokens: int | None) -> Room:
    """An answer gets what it asked for, up to half of the context."""
    return Room(context, min(max_tokens or context // _STEPS, context // 2))
