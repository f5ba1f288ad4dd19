"""A child process must never outlive its parent, however the parent ends. Three strings, because each alone has a hole.

1. PR_SET_PDEATHSIG (Linux): the kernel kills the child, even a stopped one. 2. The parent's id, checked after 1: the parent may have died before.
3. A pipe that only the parent holds open (the child's stdin): end of file means that it is gone. Works everywhere.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Call first in a child's main, before anything slow. Ends the process at once when the parent is already gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)
    threading.Thread(target=_end_with_stdin, name="lifeline", daemon=True).start()


def _end_with_stdin() -> None:
    while os.read(0, 1):
        continue
    os._exit(1)
