"""The broker: takes requests in, runs them through the stages, and keeps its word while workers and itself die.

``core`` decides: ``handle(event, now) -> actions``. ``service`` is the process around it: sockets, timers, threads;
``reception`` its doors.
``actions`` and ``events`` are its words; ``settings`` connects the user's settings. Rooms, each may use those above
it::

    planner     which layers on which device: a search over plain values
    state       all that the broker knows
    drafts      from members to a plan that could be made
    steps       who joins the next step, who has room
    reports     what is counted and told; decides nothing
    recovery    from a loss to the resumed sequence
    requests    from a client's submission to the last token it acknowledges
    members     workers: who is in, who is well, who is believed
    questions   what clients and ``swarmctl`` may ask
    journal     the durable record, a shell of its own, which uses state, reports, actions and events only
"""
