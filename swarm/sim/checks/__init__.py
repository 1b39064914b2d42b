"""Checks: the invariants at every event, and the result of every request at the end (the list is in ``audit``)."""
