"""Models by name: found at a hub, fetched file by file."""
