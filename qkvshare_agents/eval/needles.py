"""Facts hidden in a long text, and questions about them (needle in a haystack, Kamradt 2023)."""

import random
from dataclasses import dataclass

from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.eval import corpus
from qkvshare_agents.ids import Ids
from qkvshare_agents.prompt.chat_template import Template

_CITIES = ("Lisbon", "Oslo", "Nairobi", "Lima", "Hanoi", "Prague", "Quito", "Dublin", "Ankara", "Seoul")


@dataclass(frozen=True)
class Needle:
    """A question, complete with the beginning of its answer, and the ids that answer it."""

    question: Ids
    answer: Ids


def haystack(template: Template, tokens: int, count: int, seed: int = 0) -> tuple[Ids, list[Needle]]:
    """`tokens` ids of prose with `count` facts at even depths, and a question about each.

    Raises InvalidSetting if the facts take more than a quarter of the text.
    """
    draw, text = random.Random(seed), template.encoder.text
    if not 1 <= count <= len(_CITIES):
        raise InvalidSetting(f"between 1 and {len(_CITIES)} needles, not {count}")
    facts = [(city, "".join(draw.choices("123456789", k=5))) for city in draw.sample(_CITIES, count)]
    hidden = [text(f"\n\nThe magic number of {city} is {number}.\n\n") for city, number in facts]
    opening = template.head("")
    room = tokens - len(opening) - sum(map(len, hidden))
    if room < 3 * sum(map(len, hidden)):
        raise InvalidSetting(f"{tokens} tokens are too few to hide {count} facts in")
    hay = corpus.tokens(template.encoder, room)
    ids = list(opening)
    for index, fact in enumerate(hidden):
        ids += hay[index * room // count : (2 * index + 1) * room // (2 * count)]
        ids += fact
        ids += hay[(2 * index + 1) * room // (2 * count) : (index + 1) * room // count]
    needles = []
    for city, number in facts:
        asked = text(f"\n\nWhat is the magic number of {city}?") + template.turn
        begun = f"The magic number of {city} is"
        needles.append(Needle(asked + text(begun), text(f"{begun} {number}")[len(text(begun)) :]))
    return tuple(ids), needles
