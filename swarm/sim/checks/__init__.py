"""What must hold: the invariants at every event, and what must have come of every request at the end."""
