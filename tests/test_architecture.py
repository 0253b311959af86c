"""Imports run one way: each module names only modules of a lower rank."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Rank of every module; a module may import only lower ranks.
RANKS = {
    "sensitivity": 1, "budget": 0, "observation": 5, "residents": 7, "status": 8, "admission": 7,
    "errors": 0, "encoder": 0, "access": 0, "report": 3, "planner": 1, "sampling": 1, "fingerprint": 2, "toolcall": 1,
    "grammar": 1, "models": 1, "configuration": 1, "template": 1, "ledger": 2, "detokenizer": 3,
    "cue": 3, "transcript": 4, "answer_stream": 2,
    "codec": 1, "page": 3, "snapshot": 3, "page_store": 6, "kv_cache": 4, "layers": 5, "settings": 5, "engine": 7,
    "turn": 7, "rotation": 8, "speech": 8, "payload": 1, "integrity": 1, "container": 3,
    "manifest_extras": 4, "manifest": 5,
    "transport": 3, "package": 6, "shared_store": 7, "start": 8, "runner": 13, "inspection": 8, "exchange": 13,
    "host": 14, "courier": 15, "drift": 1, "sharing": 16, "registry": 17, "eval": 18, "cli_eval": 19, "cli_budget": 19,
    "cli": 20, "packed_cache": 5, "packed_attention": 8, "lean_cache": 7, "lookout": 1, "attention": 2,
    "fitting": 1, "rotary": 5, "assembly": 7, "splice": 8, "fitter": 8, "composer": 11, "summary": 11,
    "projector": 8, "projection": 12, "lora": 8, "replay": 8, "keeping": 9, "identity": 3, "verdicts": 3, "probed": 6,
    "cuts": 5, "shortening": 8,
    "weights": 1, "loaded": 2, "checkpoint": 3, "run": 5, "driver": 5.5, "probe": 5.6,  "decoding": 9,
    "account": 9, "workspace": 10, "working": 11, "prefixes": 1, "turnstile": 0, "shelf": 5, "lookback": 5,
    "span": 1, "checks": 1, "balance": 0, "part": 2, "prefix_tree": 4,  # what pages, packages and the store are made of
}  # fmt: skip
FRAMEWORKS = {"autogen_core", "autogen_agentchat", "langgraph", "langchain", "langchain_core"}
KNOW_TRANSFORMERS = {
    "engine", "observation", "configuration", "layers", "models", "packed_attention", "eval", "fingerprint",
    "attention", "lookout", "identity", "probed", "checkpoint", "run", "probe", "decoding", "driver",
}  # fmt: skip


def imports(path: Path) -> list[str]:
    """Top-level and nested imports of a file, except those for type checkers only."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.dump(branch.test)
        for node in ast.walk(branch)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def module_of(path: Path) -> str:
    inside = path.relative_to(ROOT / "qkvshare_agents").parts
    return inside[0].removesuffix(".py")


CORE = sorted(p for p in (ROOT / "qkvshare_agents").rglob("*.py") if p.name != "__init__.py")


@pytest.mark.parametrize("path", CORE, ids=lambda p: str(p.relative_to(ROOT)))
def test_core_modules_import_downwards(path: Path) -> None:
    module = module_of(path)
    assert module in RANKS, f"{path.name} has no rank; add it to RANKS and to the tree in docs/design.md"
    for name in imports(path):
        top, _, rest = name.partition(".")
        assert top not in FRAMEWORKS, f"{module} imports the framework {top}"
        assert top != "qkvshare_adapters", f"{module} imports an adapter"
        if top == "transformers":
            assert module in KNOW_TRANSFORMERS, f"{module} imports transformers; only the engine knows it"
        if top == "qkvshare_agents" and rest:
            other = rest.split(".")[0]
            if other in RANKS and other != module:
                assert RANKS[other] < RANKS[module], f"{module} imports {other}, which is not below it"


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").rglob("*.py")), ids=lambda p: p.name)
def test_kernels_import_nothing_of_ours(path: Path) -> None:
    assert not [n for n in imports(path) if n.startswith(("qkvshare_agents", "qkvshare_adapters", "transformers"))]


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")], ids=lambda p: p.name)
def test_pages_link_to_what_is_there(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing, f"{page.name} links to {missing}"


def test_files_stay_small() -> None:
    folders = ("qkvshare_agents", "kernels", "adapters", "examples")
    sizes = {p: len(p.read_text().splitlines()) for f in folders for p in (ROOT / f).rglob("*.py")}
    assert not {p.name: n for p, n in sizes.items() if n > 400}
    assert sorted(sizes.values())[len(sizes) // 2] <= 150, "the median file"
    assert all(n <= 120 for p, n in sizes.items() if p.parent.name == "examples")
