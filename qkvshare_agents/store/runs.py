"""Runs of consecutive tokens with their pages, as the store and packages name them."""

from dataclasses import dataclass

from qkvshare_agents.kv.page import Page


@dataclass(frozen=True)
class Step:
    """A run of tokens on the way from the root of a page store, with the page unless the receiver has it.

    key: the run's content address. sealed: else the unfilled page, which can only come last.
    """

    tokens: int
    key: bytes
    sealed: bool
    page: Page | None


Readers = frozenset[str]
