"""Child processes: started, watched, ended. Notices a death within a tenth of a second and a scheduler that stands still within `stuck_after_s`.

Standing still = no `HealthTick` (they come from the scheduler's own loop, once a second) AND no processor time used, for `stuck_after_s`. So a
long prefill, which sends no tick but works, is left alone up to `HARD_LIMIT_S`; a stopped or deadlocked process is not. Time in which the server
itself did not run (a machine that slept, Ctrl-Z and `fg`) is nobody's silence.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from rootlet.core.clock import Clock
from rootlet.core.log import logger

STUCK_AFTER_S = 20.0
HARD_LIMIT_S = 600.0
_WORKING_CPU_S = 0.02  # processor seconds between two looks that count as work
_LOOK_EVERY_S = 0.5
_ASK_WITHIN_S = 2.0  # whoever asks does so ten times a second; more than this between two times, and we did not run either

_log = logger("supervisor")


class Watchdog:
    """`tick()` at each sign of life; `stuck()` asks. `cpu_s` = processor seconds the process has used, None when it is gone."""

    def __init__(self, clock: Clock, cpu_s: Callable[[], float | None], *, stuck_after_s: float = STUCK_AFTER_S) -> None:
        self._clock = clock
        self._cpu_s = cpu_s
        self._stuck_after_s = stuck_after_s
        self._asked_s = self._looked_s = self._worked_s = self._ticked_s = clock.now()
        self._last_cpu_s = cpu_s() or 0.0

    def tick(self) -> None:
        self._ticked_s = self._clock.now()

    def stuck(self) -> str | None:
        """Why the process counts as stuck, or None. Cheap: looks at the process twice a second at most."""
        now_s = self._clock.now()
        lost_s, self._asked_s = now_s - self._asked_s, now_s
        if lost_s > _ASK_WITHIN_S:
            self._ticked_s, self._worked_s = min(self._ticked_s + lost_s, now_s), min(self._worked_s + lost_s, now_s)
        if now_s - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now_s
            cpu_s = self._cpu_s() or 0.0
            if cpu_s - self._last_cpu_s >= _WORKING_CPU_S:
                self._worked_s = now_s
            self._last_cpu_s = cpu_s
        silent_s = now_s - self._ticked_s
        idle_s = now_s - max(self._ticked_s, self._worked_s)
        if idle_s > self._stuck_after_s:
            return f"the scheduler gave no sign of life and did no work for {idle_s:.0f} s"
        if silent_s > HARD_LIMIT_S:
            return f"the scheduler gave no sign of life for {silent_s:.0f} s"
        return None


class Supervisor:
    """Owns the children. Everything here is called from the thread that outlives them: the kernel ties PDEATHSIG to the starting thread."""

    def __init__(self) -> None:
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: str, launch_file: Path) -> None:
        """A fresh interpreter in a session of its own (a terminal's Ctrl-C reaches the parent only); its stdin is the lifeline.

        -P: nothing is imported from whatever folder the server was started in.
        """
        command = [sys.executable, "-P", "-m", "rootlet.engine.processes", role, str(launch_file)]
        self._children[role] = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        _log.info("started", role=role, pid=self._children[role].pid)

    def pids(self) -> dict[str, int]:
        return {role: child.pid for role, child in self._children.items()}

    def exit_code(self, role: str) -> int | None:
        """None while it runs or was never started; negative = the signal that killed it."""
        child = self._children.get(role)
        return child.poll() if child is not None else None

    def first_death(self) -> tuple[str, int] | None:
        for role in self._children:
            code = self.exit_code(role)
            if code is not None:
                return role, code
        return None

    def cpu_s(self, role: str) -> float | None:
        child = self._children.get(role)
        if child is None:
            return None
        try:
            times = psutil.Process(child.pid).cpu_times()
        except psutil.Error:
            return None
        return float(times.user + times.system)

    def kill_all(self) -> None:
        """SIGKILL, and wait: works on stopped processes too, leaves no zombie."""
        for child in self._children.values():
            if child.poll() is None:
                child.send_signal(signal.SIGKILL)
        for child in self._children.values():
            child.wait()
            if child.stdin is not None:
                child.stdin.close()
        self._children.clear()


def describe_death(role: str, code: int) -> str:
    if code < 0:
        return f"the {role} process was killed by {signal.Signals(-code).name}"
    return f"the {role} process ended with exit code {code}"


def lower_own_priority(by: int = 10) -> None:
    """HTTP and tokenizing yield to the kernel team: a third busy thread of equal priority would halve its speed on a small machine."""
    try:
        os.nice(by)
    except OSError as error:
        _log.debug("priority_unchanged", error=error)
