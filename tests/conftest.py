import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may wait for a hub
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run without a GPU; triton looks when it is imported

from qkvshare_agents.errors import ModelNotFound
from qkvshare_agents.model import catalog, verdicts
from qkvshare_agents.model.engine import Engine


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
