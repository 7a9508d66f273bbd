"""Private utilities that every layer may import."""
