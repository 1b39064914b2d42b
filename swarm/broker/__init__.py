"""Broker: accepts requests, runs them through the stages, and keeps its promises while workers and the broker itself
die.

``core`` decides: ``handle(event, now) -> actions``. ``service`` is the process around it: sockets, timers, threads;
``message_server`` its sockets, ``auth`` its keys. ``events`` and ``actions`` are the core's inputs and outputs;
``settings`` maps the user's settings. Packages, each may import those above it::

    planner     which layers on which device: a search over plain values
    state       all data of the core
    planning    from members to a plan that could be made
    steps       which sequences join the next step, which get KV capacity
    reports     statistics and traces; decides nothing
    recovery    from a loss to the resumed sequence
    requests    from a client's submission to the last token it acknowledges
    members     workers: membership, health, integrity
    admin       queries and commands of clients and ``swarmctl``
    journal     the durable record, a shell of its own, which uses state, reports, actions and events only
"""
