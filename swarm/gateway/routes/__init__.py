"""Routes of the APIs that need more than a few; ``app`` has the others and puts all together. ``asking`` has what all
conversations go through."""
