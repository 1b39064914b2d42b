"""Schedules: what is played. ``schedule`` has the values, ``draw`` makes them of a seed, ``habits`` adds what clients
do, ``faults`` strikes."""
