"""Members of a group, as their calls, the user and the graph tell of them."""

from collections.abc import Mapping

from qkvshare_adapters.langchain.caller import Caller
from qkvshare_adapters.langchain.messages import Schemas
from qkvshare_adapters.langgraph.tools import find_tools
from qkvshare_agents.host.host import Host
from qkvshare_agents.prompt.members import Member


def speaker(
    host: Host, caller: Caller, instruction: str, tools: Schemas, declared: Mapping[str, str], *, learn: bool
) -> Member:
    """The caller as a member. In a group, the others are noted as far as they are known, so that prompts don't change
    when their calls come through.

    declared: instructions by name. learn: False leaves the host's roster as it is.
    """
    name, known = caller.name, host.roster.members(caller.scope)
    if not caller.shared or not learn:
        return Member(name, name, instruction or declared.get(name, ""), tools)
    graph_tools = find_tools(caller.group)
    for other in {*graph_tools, *filter(caller.sees, declared)} - known.keys():
        host.roster.learn(caller.scope, other, declared.get(other), graph_tools.get(other, ()))
    own = None if not instruction and name in declared else instruction
    return host.roster.learn(caller.scope, name, own, tools, named=bool(name))
