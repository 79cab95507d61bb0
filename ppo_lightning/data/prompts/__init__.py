"""Prompts: where they come from, how a model reads them, in what order they are taken."""
