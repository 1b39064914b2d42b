"""Governing a swarm, whoever does it: ``swarmctl`` and the gateway's console share what is here. Pure.

``rows`` reads tables of reports, ``events`` tells what happened between two looks, ``orders`` makes the broker's
messages of words, and says what is wrong with them.
"""
