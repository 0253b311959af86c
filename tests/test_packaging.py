"""What users meet before any model: import cost, the command line, metadata."""

import importlib.metadata
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "autogen_core", "langgraph", "langchain_core", "huggingface_hub")
PACKAGES = ("qkvshare_agents", "qkvshare_kernels", "qkvshare_adapters")
RUN_MAIN = "import sys; from qkvshare_agents.cli import main; sys.argv[0] = 'qkvshare'; main()"


def python(code, *args, **env):
    """Run `code` in a fresh interpreter outside the checkout; the checkout's path settings don't leak in."""
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(sys.prefix),
        env=os.environ | {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "120"} | env,
        check=False,
    )


@pytest.mark.parametrize("module", ["qkvshare_agents", "qkvshare_agents.cli", "qkvshare_agents.model.catalog"])
def test_import_is_light(module):
    done = python(f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])")
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_and_are_typed(package):
    code = f"import {package}, pathlib; print((pathlib.Path({package}.__file__).parent / 'py.typed').is_file())"
    done = python(code)
    assert done.stdout.strip() == "True", done.stderr


def test_checkout_folders_are_not_importable():
    """transformers takes an importable folder `kernels` for the package of that name."""
    done = python("import importlib.util as u; print(u.find_spec('kernels'), u.find_spec('adapters'))")
    assert done.returncode == 0 and "Namespace" not in done.stdout, done.stdout


def test_help_is_quick_and_light():
    code = f"import atexit; atexit.register(lambda: print([n for n in {HEAVY} if n in sys.modules])); "
    started = time.perf_counter()
    done = python("import sys; " + code + RUN_MAIN, "--help")
    seconds = time.perf_counter() - started
    assert done.returncode == 0 and "models" in done.stdout and "bench" in done.stdout, done.stderr
    assert done.stdout.rstrip().endswith("[]"), done.stdout
    assert seconds < 1.5


def test_error_is_one_line(tmp_path):
    done = python(RUN_MAIN, "models", "pull", "nobody", QKVSHARE_HOME=str(tmp_path))
    assert done.returncode == 1
    assert done.stdout == "" and done.stderr.startswith("error: no model 'nobody'")
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


def test_list_shows_what_is_missing(tmp_path):
    done = python(RUN_MAIN, "models", "list", QKVSHARE_HOME=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "smollm2-135m\tnot pulled\n"), done.stderr


def test_metadata():
    metadata = importlib.metadata.metadata("qkvshare-agents")
    assert metadata["Version"] == "0.1.0"
    assert metadata["License-Expression"] == "Apache-2.0"
    extras = {"autogen", "langgraph", "triton", "redis", "gguf", "dev"}
    assert extras <= set(metadata.get_all("Provides-Extra"))
    scripts = importlib.metadata.entry_points(group="console_scripts", name="qkvshare")
    assert [script.value for script in scripts] == ["qkvshare_agents.cli:main"]
