"""Integration with systemd: notifications to the service manager, and sockets that it passes to the process.

In: the variables that systemd sets (``NOTIFY_SOCKET``, ``WATCHDOG_USEC``, ``LISTEN_FDS``). Out: datagrams to its
socket, and the listening sockets that it kept open. Rules: nothing here blocks, nothing here ends a healthy process,
and without systemd nothing is sent. ``units`` are the files that ``swarm systemd install`` installs.
"""
