"""For all tests."""

from __future__ import annotations

import signal

from swarm.stage.waiting import wait_passively

wait_passively()  # before torch: the cores are shared

from hypothesis import settings  # noqa: E402

# Who starts tests in the background of a script, or so that they outlive a terminal, starts them deaf to these signals;
# and so would be every process that a test starts and then interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Machines are shared and noisy: an example that takes long once says nothing.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")
