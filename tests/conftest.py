"""For all tests."""

from __future__ import annotations

import signal

# Who starts tests in the background of a script, or so that they outlive a terminal, starts them deaf to these signals;
# and so would be every process that a test starts and then interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
