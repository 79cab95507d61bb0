"""Records of files, tables and lists: what prompts, demonstrations and pairs are made from."""
