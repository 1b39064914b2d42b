"""Schedules: what is played.

``schedule`` has the values, ``draw`` makes them from a seed, ``variations`` adds further behaviour and faults,
``faults`` applies faults.
"""
