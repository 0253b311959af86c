"""Text to ids and back, for markup and for what people and models wrote."""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache

from tokenizers import Tokenizer

from qkvshare_agents.ids import Ids

ANCHOR = "\n"  # stands for unknown text before a segment
_ANCHORS = (ANCHOR, "a")
_KEPT_CHARACTERS = 2_000_000  # of texts whose ids are remembered


class Encoder:
    """Encodes on copies of the tokenizer's backend, without shared switches: thread-safe.

    markup: the delimiters. Added tokens in them are control tokens, like all that the tokenizer calls special.
    control: control tokens and their ids.
    """

    def __init__(self, backend: Tokenizer, markup: str = "") -> None:
        spec = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
        self._markup = Tokenizer.from_str(json.dumps(spec))
        for token in spec["added_tokens"]:
            token["special"] |= token["content"] in markup
        self._text = Tokenizer.from_str(json.dumps(spec))
        self._text.encode_special_tokens = True
        self.control: dict[str, int] = {t["content"]: t["id"] for t in spec["added_tokens"] if t["special"]}
        self.control_ids = frozenset(self.control.values())
        cuts = (f"(?<={re.escape(t[0])})(?={re.escape(t[1:])})" for t in self.control if len(t) > 1)
        self._cuts = re.compile("|".join(cuts) or r"\Z\A")
        # SentencePiece puts a space before a string's first word; behind a control token it may do so too
        self._spaces_start = self._ids(self._text, "\na") != self._ids(self._text, "\n") + self._ids(self._text, "a")
        starts = next((t for t, i in self.control.items() if self._ids(self._markup, t) == (i,)), "")
        alone = self._ids(self._markup, "a")
        self._behind_control = "" if self._ids(self._markup, starts + "a")[-len(alone) :] == alone else ANCHOR
        self.markup = lru_cache(maxsize=1024)(self._markup_ids)
        self._encoded = _Encoded()

    def text(self, text: str, before: str = ANCHOR) -> Ids:
        """Ids of what somebody wrote: `<|im_end|>` in a message is plain text and can't end its turn.

        before: what stands in front of it, see `context`; by default, text that it continues. What was encoded lately
        is not encoded again: a conversation is laid out anew for every turn, and most of it was there before.
        """
        return self._encoded.get(text, before, self._text_ids)

    def _text_ids(self, text: str, before: str) -> Ids:
        ids = self._segment(self._text, text, before)
        if self.control_ids.isdisjoint(ids):
            return ids
        # The vocabulary has a control token as a word, too: encode the halves of the word.
        first, *rest = self._cuts.split(text)
        return sum((self._segment(self._text, part, ANCHOR) for part in rest), self._segment(self._text, first, before))

    def context(self, markup: str) -> str:
        """How text behind this markup has to be encoded: `before` for `text`."""
        ids = self.markup(markup)
        return markup[-1:] if ids and ids[-1] not in self.control_ids else self._behind_control

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        return self._markup.decode(list(ids), skip_special_tokens=not keep_special)

    def _markup_ids(self, markup: str, before: str = "") -> Ids:
        """Ids of delimiters: control tokens are recognised. before: "" at the start of a prompt."""
        return self._segment(self._markup, markup, before)

    def _segment(self, backend: Tokenizer, text: str, before: str) -> Ids:
        if not text:
            return ()
        if before and self._spaces_start:
            for anchor in (before, *_ANCHORS):
                known, ids = self._ids(backend, anchor), self._ids(backend, anchor + text)
                if ids[: len(known)] == known:  # else the two grew together
                    return ids[len(known) :]
        return self._ids(backend, text)

    @staticmethod
    def _ids(backend: Tokenizer, text: str) -> Ids:
        try:
            text.encode()
        except UnicodeEncodeError:  # halves of surrogate pairs, as JSON may bring them
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return tuple(backend.encode(text, add_special_tokens=False).ids)


class _Encoded:
    """Ids of texts, those used last, within a number of characters. Thread-safe."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], Ids] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    def get(self, text: str, before: str, encode: Callable[[str, str], Ids]) -> Ids:
        key = text, before
        with self._lock:
            if (known := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return known
        ids = encode(text, before)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = ids
                self._characters += len(text)
            while self._characters > _KEPT_CHARACTERS:
                (oldest, _), _ = self._kept.popitem(last=False)
                self._characters -= len(oldest)
        return ids
