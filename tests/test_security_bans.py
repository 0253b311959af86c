"""Nothing in the product runs or unpickles what it received: an AST walk over every source file."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("qkvshare_agents", "kernels", "adapters", "examples")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
BANNED_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
BANNED_BUILTINS = {"eval", "exec", "compile", "__import__"}
# The package's own lazy exports: the table must be a literal, which `test_lazy_exports_are_literal` checks.
LAZY_EXPORTS = ROOT / "qkvshare_agents" / "__init__.py", "import_module(_PLACES[name])"
DYNAMIC_IMPORTS = {"import_module", "run_module", "run_path", "spec_from_file_location"}


def called(node):
    """The last name of what a call calls: `f` of `f()` and of `a.b.f()`."""
    return getattr(node.func, "attr", getattr(node.func, "id", None))


def offences(tree, allowed_call=None):
    """`(line, text)` of everything banned in a parsed file, except for one call given as text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""] + [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            names = []
        for name in names:
            if name.split(".")[0] in BANNED_MODULES or name == "torch.load":
                yield node.lineno, f"import {name}"
        if isinstance(node, ast.Attribute) and node.attr == "load":
            if isinstance(node.value, ast.Name) and node.value.id == "torch":
                yield node.lineno, "torch.load"
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in BANNED_BUILTINS:
            yield node.lineno, f"{node.func.id}()"
        if called(node) in DYNAMIC_IMPORTS and ast.unparse(node) != allowed_call:
            first = node.args[0] if node.args else None
            if called(node) != "import_module" or not isinstance(first, ast.Constant):
                yield node.lineno, f"{called(node)}() of something that is not a constant"
        for keyword in node.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if keyword.arg in ("trust_remote_code", "allow_pickle") and value is not False:
                yield node.lineno, f"{keyword.arg}={ast.unparse(keyword.value)}"
        yield from unsafe_loads(node)


def unsafe_loads(call):
    """What a call that loads from a model's directory must say and does not: by default transformers asks at the
    terminal whether to run code that lies there, and reads pickles."""
    if called(call) not in ("from_pretrained", "from_config"):
        return
    said = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    of = ast.unparse(call.func)
    if said.get("trust_remote_code") != "False":
        yield call.lineno, f"{of} without trust_remote_code=False"
    if "Model" in of and called(call) == "from_pretrained" and said.get("use_safetensors") != "True":
        yield call.lineno, f"{of} without use_safetensors=True"


def test_files_were_found():
    assert len(FILES) > 5


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_nothing_banned(path):
    allowed_call = LAZY_EXPORTS[1] if path == LAZY_EXPORTS[0] else None
    found = list(offences(ast.parse(path.read_text(encoding="utf-8")), allowed_call))
    assert not found, f"{path.relative_to(ROOT)}: {found}"


def test_lazy_exports_are_literal():
    tree = ast.parse(LAZY_EXPORTS[0].read_text(encoding="utf-8"))
    stores = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == "_PLACES"]
    assigned = [n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "_PLACES"]
    assert len(assigned) == 1 and sum(isinstance(n.ctx, ast.Store) for n in stores) == 1
    places = ast.literal_eval(assigned[0].value)
    assert {place.split(".")[0] for place in places.values()} <= {"qkvshare_agents", "qkvshare_adapters"}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "from torch import load",
        "import torch\ntorch.load('x')",
        "load = torch.load",
        "import marshal",
        "import shelve",
        "eval('1')",
        "exec(text)",
        "import importlib\nimportlib.import_module(name)",
        "import_module(name='x' + y)",
        "from_pretrained(x, trust_remote_code=True)",
        "AutoConfig.from_pretrained(x)",
        "AutoModel.from_config(x)",
        "AutoTokenizer.from_pretrained(x, **options)",
        "AutoModel.from_pretrained(x, trust_remote_code=False)",
        "AutoModel.from_pretrained(x, trust_remote_code=False, use_safetensors=flag)",
        "np.load(x, allow_pickle=flag)",
    ],
)
def test_the_walk_sees(source):
    assert list(offences(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "import importlib\nimportlib.import_module('torch')",
        "model.eval()",
        "re.compile('x')",
        "AutoTokenizer.from_pretrained(x, trust_remote_code=False)",
        "AutoModel.from_pretrained(x, trust_remote_code=False, use_safetensors=True, **options)",
    ],
)
def test_the_walk_allows(source):
    assert not list(offences(ast.parse(source)))
