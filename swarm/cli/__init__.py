"""The ``swarm`` program: commands that run processes. ``app`` lists them; each imports what it needs when called."""
