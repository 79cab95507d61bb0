"""Answers to learn from, and which of their tokens are learned."""
