"""Children that others left to us, as to the first process of a container, are let go."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A process to which orphans come; two children of its own and one that its child left: who has ended, and who is left
# to wait for, after the orphan was let go.
ORPHANED = """
import ctypes, os, time
from swarm.cli.up.processes import reap_orphans
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER
reap_orphans(())  # nobody is there
reads, writes = os.pipe()
child = os.fork()
if child == 0:
    if os.fork() == 0:
        os.write(writes, os.getpid().to_bytes(4, "big"))
    os._exit(0)
orphan = int.from_bytes(os.read(reads, 4), "big")
os.waitpid(child, 0)
os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT)  # it has ended, and is still there
lives = os.fork()
if lives == 0:
    time.sleep(60)
reap_orphans([lives])
assert not os.path.exists(f"/proc/{orphan}")
os.kill(lives, 9)
os.waitid(os.P_PID, lives, os.WEXITED | os.WNOWAIT)
reap_orphans([lives])
print(os.waitstatus_to_exitcode(os.waitpid(lives, 0)[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="orphans come to a process of our choice only there")
def test_orphans_are_let_go_and_own_children_are_not() -> None:
    """An orphan that ended is gone; one's own child keeps its exit code for who waits for it."""
    done = subprocess.run([sys.executable, "-c", ORPHANED], capture_output=True, text=True, check=False, timeout=60)
    assert (done.stderr, done.stdout) == ("", "-9\n")
