"""Files that are larger than memory, by random access."""
