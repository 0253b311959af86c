"""One memory budget for all agents: how wide each one's next pages are."""
