"""The command `qkvshare`."""

from qkvshare_agents.cli.app import main

__all__ = ["main"]
