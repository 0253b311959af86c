"""Imports run one way: rooms name only the rooms that the table lets them, `TYPE_CHECKING` included."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = ROOT / "qkvshare_agents"
TURN = {"root", "prompt", "kv", "model", "store", "budget", "settings", "wire", "transport"}
# room -> what its files may import beside their own room; a single file is named by its dotted path
ROOMS: dict[str, set[str]] = {
    "root": set(),
    "prompt": {"root"},
    "kv": {"root"},
    "model": {"root", "prompt", "kv"},
    "store": {"root", "kv", "model.canary"},
    "wire": {"root", "kv", "store.runs", "model.fingerprint", "model.canary"},
    "transport": {"root", "wire.payload"},
    "budget": {"root", "kv", "model"},
    "settings": {"root", "prompt", "kv", "model", "wire.integrity"},
    "turns": TURN | {"context"},
    "context": TURN | {"turns"},
    "exchange": TURN | {"turns", "context"},
    "host": TURN | {"turns", "context", "exchange"},
    "eval": TURN | {"turns", "context", "exchange", "host"},
    "cli": TURN | {"turns", "context", "exchange", "host", "eval"},
}
ROOT_FILES = {"errors", "ids", "spans"}
KNOW_TRANSFORMERS = {"model", "eval", "budget", "context"}
FRAMEWORKS = {"autogen_core", "autogen_agentchat", "langgraph", "langchain", "langchain_core"}
FILES = sorted(path for path in CORE.rglob("*.py") if path != CORE / "__init__.py")


def imports(path: Path) -> list[str]:
    """Dotted names of all that a file imports, wherever it does so."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def room_of(module: str) -> str:
    """`kv` of `kv.page`, `root` of `errors`."""
    first = module.split(".")[0]
    return "root" if first in ROOT_FILES else first


def module_of(path: Path) -> str:
    parts = path.relative_to(CORE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def ours(path: Path) -> list[str]:
    """Modules of the core that a file imports: `kv.page`."""
    known = {module_of(p) for p in FILES}
    found = []
    for name in imports(path):
        top, _, rest = name.partition(".")
        if top == "qkvshare_agents":
            parts = rest.split(".")
            longest = next(
                (".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in known), None
            )
            if longest:
                found.append(longest)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: module_of(p))
def test_rooms_import_what_the_table_allows(path: Path) -> None:
    module = module_of(path)
    room = room_of(module)
    assert room in ROOMS, f"{module} is in no room of the table"
    for other in ours(path):
        allowed = room_of(other) in {room, *ROOMS[room]} or other in ROOMS[room]
        assert allowed, f"{module} imports {other}: {room} may import {sorted(ROOMS[room])}"
    for name in imports(path):
        top = name.split(".")[0]
        assert top not in FRAMEWORKS | {"qkvshare_adapters"}, f"{module} imports {top}"
        if top == "transformers":
            assert room in KNOW_TRANSFORMERS, f"{module} imports transformers"


def test_no_file_waits_for_itself() -> None:
    """No circles, between rooms neither, but for turns and context, which know each other's protocols."""
    files = {module_of(path): set(ours(path)) - {module_of(path)} for path in FILES}
    try:
        list(TopologicalSorter(files).static_order())
    except CycleError as error:
        pytest.fail(f"files import each other in a circle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("path", FILES, ids=lambda p: module_of(p))
def test_underscore_files_stay_in_their_room(path: Path) -> None:
    foreign = [m for m in ours(path) if m.split(".")[-1].startswith("_") and room_of(m) != room_of(module_of(path))]
    assert not foreign, f"{module_of(path)} imports {foreign}"


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").rglob("*.py")), ids=lambda p: p.name)
def test_kernels_import_nothing_of_ours(path: Path) -> None:
    assert not [n for n in imports(path) if n.startswith(("qkvshare_agents", "qkvshare_adapters", "transformers"))]


@pytest.mark.parametrize("path", sorted((ROOT / "adapters").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_adapters_import_the_doors_only(path: Path) -> None:
    rooms = {room_of(m) for m in ours(path)}
    assert rooms <= {"root", "host", "turns", "prompt", "settings"}, f"{path.name} imports {rooms}"


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")], ids=lambda p: p.name)
def test_pages_link_to_what_is_there(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing, f"{page.name} links to {missing}"


def test_the_design_names_every_room() -> None:
    design = (ROOT / "docs/design.md").read_text()
    missing = [room for room in ROOMS if room != "root" and f"`{room}" not in design]
    assert not missing, f"docs/design.md does not name {missing}"


def test_files_stay_small() -> None:
    folders = ("qkvshare_agents", "kernels", "adapters", "examples")
    sizes = {p: len(p.read_text().splitlines()) for f in folders for p in (ROOT / f).rglob("*.py")}
    assert not {p.name: n for p, n in sizes.items() if n > 400}, "which concept is missing?"
    assert sorted(sizes.values())[len(sizes) // 2] <= 150, "the median file"
    assert all(n <= 120 for p, n in sizes.items() if p.parent.name == "examples")
