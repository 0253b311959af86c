"""Glue for agent frameworks; each module needs its framework installed (extras `autogen`, `langgraph`)."""
