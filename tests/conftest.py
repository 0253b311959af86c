import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may wait for a hub
