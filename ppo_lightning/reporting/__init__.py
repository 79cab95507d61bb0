"""Reports on runs: reading their logs, and telling what is in them."""

__all__ = []
