"""Routes of the APIs that need more than a few; ``app`` has the others and puts all together."""
