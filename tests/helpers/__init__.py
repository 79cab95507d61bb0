"""What several tests share: tiny models, readers of the source."""
