"""How a process lives under a service manager, which is systemd: what it tells it, and what it is handed.

In come the variables that systemd sets (``NOTIFY_SOCKET``, ``WATCHDOG_USEC``, ``LISTEN_FDS``); out go datagrams to its
socket, and the doors that it kept open. Rules: nothing here waits, nothing here fails a process that is well, and
without systemd nothing is said at all. ``units`` are the files that ``swarm systemd install`` puts in place.
"""
