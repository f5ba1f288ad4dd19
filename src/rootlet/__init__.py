"""Rootlet: LLM serving with a radix tree over token prefixes at its heart."""

__version__ = "0.1.0"
