"""The cue: the words of a user turn that name the member that answers next and carry its instruction."""

import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from qkvshare_agents.prompt.encoder import Encoder
from qkvshare_agents.prompt.members import Member

REPEATED_TOKENS = 96  # of an instruction, in every cue behind its first one
_SENTENCE_ENDS = re.compile(r"(?<=[.!?])\s+|\n+|(?<=[。！？])")
_OPENING = re.compile(r"[\[［﹇]")  # brackets that NFKC makes one
_WORD_ENDS = re.compile(r"\s+")


@dataclass
class Cues:
    """The cues of one prompt, asked for in the order in which they stand there.

    A member's first cue of the prompt carries its whole instruction, whatever an earlier prompt held: where the
    messages behind that cue were dropped, the next one that is left is the first. labels: whom cues may name.
    handoffs: by (source, target), what a cue says besides behind an answer of the source. repeat_tokens: of the
    instruction, in later cues.
    """

    encoder: Encoder
    labels: frozenset[str]
    handoffs: Mapping[tuple[str, str], str]
    repeat_tokens: int
    _repeated: dict[str, str] = field(default_factory=dict)

    def instructs(self, member: Member) -> bool:
        """Whether the member's next cue says more of its instruction than those behind it will."""
        said = member.instruction
        return member.name not in self._repeated and repeated(said, self.repeat_tokens, self.encoder) != said

    def next(self, member: Member, behind: str | None, *, beside_text: bool) -> str:
        """The cue of `member`. behind: whose answer it follows, None if none. beside_text: its user turn has other
        text, too."""
        # An agent that was never instructed and talks to people only is not given a name, either.
        alone = not member.instruction and beside_text and self._repeated.keys() <= {member.name}
        label = f"[{member.label}]" if member.label and not alone else ""
        instruction = self._repeated.get(member.name)
        if instruction is None:
            instruction = member.instruction
            self._repeated[member.name] = repeated(instruction, self.repeat_tokens, self.encoder)
        handoff = "" if behind is None else self.handoffs.get((behind, member.name), "")
        return " ".join(filter(None, (label, instruction, handoff)))

    def quoted(self, text: str) -> str:
        """`text` that somebody wrote, so that it begins no line like a cue."""
        return quoted(text, self.labels)


def quoted(text: str, labels: Iterable[str]) -> str:
    """`text` with `> ` before each line that begins like a cue of one of the `labels`: only the layout writes cues.

    In whatever case, width and spacing, and with invisible characters, since a tokenizer may normalize them away.
    Whatever follows the bracket: the tokens up to there would be those of a cue.
    """
    names = [re.escape(_normal(label)) for label in sorted(labels) if label.strip()]
    if not names or not _OPENING.search(text):
        return text
    like_a_cue = re.compile(rf"\s*\[\s*(?:{'|'.join(names)})\s*\]")
    lines = text.splitlines(keepends=True)
    return "".join(f"> {line}" if like_a_cue.match(_normal(line)) else line for line in lines)


def _normal(text: str) -> str:
    visible = text if text.isascii() else "".join(c for c in text if unicodedata.category(c) != "Cf")
    return unicodedata.normalize("NFKC", visible).casefold()


def repeated(instruction: str, most_tokens: int, encoder: Encoder) -> str:
    """What a member's later cues say of its instruction: all of it, or its first sentences that fit.

    A first sentence that does not fit is cut behind a word. most_tokens: 0 repeats nothing.
    """
    for ends in (_SENTENCE_ENDS, _WORD_ENDS):
        if found := _beginning(instruction, ends, most_tokens, encoder):
            return found
    return ""


def _beginning(text: str, ends: re.Pattern[str], most_tokens: int, encoder: Encoder) -> str:
    """The longest beginning of `text` that stops where a part of it ends and has at most `most_tokens` tokens."""
    fitting = ""
    for stop in (*(end.start() for end in ends.finditer(text)), len(text)):
        if len(encoder.text(text[:stop])) > most_tokens:
            break
        fitting = text[:stop]
    return fitting
