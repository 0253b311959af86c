import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may wait for a hub
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run without a GPU; triton looks when it is imported

from qkvshare_agents.errors import ModelNotFound
from qkvshare_agents.model import catalog, verdicts
from qkvshare_agents.model.engine import Engine

# Some tests share helpers of a test file in another room
sys.path += [str(folder) for folder in Path(__file__).parent.iterdir() if folder.is_dir()]

# Files whose tests start processes and servers, load real models, or go through many model families
SLOW = {
    "test_autogen_teams", "test_courier", "test_cuts", "test_decoding", "test_devices", "test_dtypes", "test_endurance",
    "test_examples", "test_families", "test_fitting", "test_kernels_triton", "test_langchain_standard",
    "test_langgraph_handoff", "test_langgraph_state", "test_lean_cache", "test_lora", "test_network", "test_notebooks",
    "test_package", "test_projector", "test_quantized", "test_redis_faults", "test_restart", "test_sharing",
    "test_shm_faults", "test_state_exchange", "test_windows",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what `make test` leaves out."""
    for item in items:
        if "demo_engine" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.model)
        if item.path.stem in SLOW or item.path.parent.name == "eval":
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def no_verdicts_in_the_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a probe found in a test is kept for the session only, and nothing is taken from earlier ones."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("verdicts")
        patch.setattr(verdicts, "directory", lambda: folder)
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))  # where hosts say what they hold
        yield


@pytest.fixture(scope="session")
def demo_engine() -> Engine:
    """The demo model. CI must have it; elsewhere its tests are skipped with the remedy."""
    try:
        catalog.resolve("smollm2-135m")
    except ModelNotFound:
        if os.environ.get("CI"):
            raise
        pytest.skip("the demo model is not here; `make model` brings it")
    return Engine.load("smollm2-135m", dtype="float32")


@pytest.fixture
def chat(request):
    """Makes LangChain models on hosts of their own: `make(script, engine=..., **options)`."""
    from scripted import ScriptedHost, install, uninstall

    from qkvshare_agents import ChatQKVShare

    made = []

    def make(script, *, engine=None, precision="native", **options):
        name = f"host-{request.node.name}-{len(made)}"
        layout = {"layout": options["layout"]} if "layout" in options else {}
        install(ScriptedHost(script, engine=engine, precision=precision, **layout), name)
        made.append(name)
        return ChatQKVShare(model="scripted", host=name, precision=precision, **options)

    yield make
    for name in made:
        uninstall(name)
