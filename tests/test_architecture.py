"""Imports run one way: each module names only modules of a lower rank."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Rank of every module; a module may import only lower ranks.
RANKS = {
    "sensitivity": 1, "budget": 0, "observation": 4, "residents": 5, "status": 6,
    "errors": 0, "encoder": 0, "access": 0, "report": 2, "planner": 1, "sampling": 1, "fingerprint": 1, "toolcall": 1,
    "grammar": 1, "models": 1, "configuration": 1, "template": 1, "ledger": 2, "detokenizer": 2, "transcript": 3,
    "codec": 1, "page": 2, "snapshot": 2, "page_store": 4, "kv_cache": 3, "layers": 4, "settings": 4, "engine": 5,
    "turn": 5, "rotation": 6, "speech": 6, "payload": 1, "memory": 1, "integrity": 1, "container": 2, "manifest": 3,
    "transport": 2, "package": 4, "shared_store": 5, "start": 6, "runner": 8, "inspection": 6, "exchange": 8,
    "host": 9, "courier": 10, "drift": 1, "sharing": 11, "registry": 12, "eval": 13, "cli_eval": 14, "cli_budget": 14,
    "cli": 15, "packed_cache": 4, "packed_attention": 6, "lean_cache": 5,
    "fitting": 1, "attention": 1, "rotary": 4, "assembly": 4.5, "splice": 5, "fitter": 5, "composer": 7, "summary": 7,
    "projector": 6, "projection": 7, "lora": 6, "keeping": 7, "identity": 2, "verdicts": 2, "probed": 4,
    "span": 1, "checks": 1, "part": 1.5, "prefix_tree": 3,  # what pages, packages and the store are made of
}  # fmt: skip
FRAMEWORKS = {"autogen_core", "autogen_agentchat", "langgraph", "langchain", "langchain_core"}
KNOW_TRANSFORMERS = {
    "engine", "observation", "configuration", "layers", "models", "packed_attention", "eval", "fingerprint",
    "attention", "identity", "probed",
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
    assert module in RANKS, f"{path.name} has no rank; add it to RANKS and to the README's tree"
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


def test_every_module_is_in_the_readme_tree() -> None:
    readme = (ROOT / "README.md").read_text()
    missing = [p.name for p in CORE if p.name not in readme]
    assert not missing, f"README's tree lacks {missing}"


def test_files_stay_small() -> None:
    folders = ("qkvshare_agents", "kernels", "adapters", "examples")
    sizes = {p: len(p.read_text().splitlines()) for f in folders for p in (ROOT / f).rglob("*.py")}
    assert not {p.name: n for p, n in sizes.items() if n > 300}
    assert sorted(sizes.values())[len(sizes) // 2] <= 150, "the median file"
    assert all(n <= 120 for p, n in sizes.items() if p.parent.name == "examples")
