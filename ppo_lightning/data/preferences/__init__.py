"""Pairs of answers of which one is better, and people's choices on the way there."""
