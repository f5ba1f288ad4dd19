"""When a scheduler counts as stuck: no tick and no work, for long enough; a long step that works is left alone."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from rootlet.core.clock import SystemClock, VirtualClock
from rootlet.engine.supervisor import HARD_LIMIT_S, Supervisor, Watchdog, describe_death


class Cpu:
    def __init__(self) -> None:
        self.seconds: float | None = 0.0

    def __call__(self) -> float | None:
        return self.seconds


def _watch() -> tuple[VirtualClock, Cpu, Watchdog]:
    clock, cpu = VirtualClock(), Cpu()
    return clock, cpu, Watchdog(clock, cpu, stuck_after_s=20.0)


def test_ticks_keep_it_quiet() -> None:
    clock, _, watchdog = _watch()
    for _ in range(100):
        clock.advance(1.0)
        watchdog.tick()
        assert watchdog.stuck() is None


def test_row_89_a_long_step_that_works_is_not_stuck() -> None:
    clock, cpu, watchdog = _watch()
    for _ in range(300):
        clock.advance(1.0)
        assert cpu.seconds is not None
        cpu.seconds += 0.9
        assert watchdog.stuck() is None


def test_row_87_a_stopped_process_is_stuck_after_the_documented_time() -> None:
    clock, _, watchdog = _watch()
    for _ in range(40):
        clock.advance(0.5)
        assert watchdog.stuck() is None
    clock.advance(0.5)
    assert "no sign of life" in (watchdog.stuck() or "")


def test_while_we_stood_still_ourselves_nobody_was_silent() -> None:
    """A machine that slept, or Ctrl-Z and fg: the first look comes before the ticks that wait to be read."""
    clock, _, watchdog = _watch()
    clock.advance(3600.0)
    assert watchdog.stuck() is None
    for _ in range(40):
        clock.advance(0.5)
        assert watchdog.stuck() is None, "what was lost counts for neither side"
    clock.advance(0.5)
    assert watchdog.stuck() is not None


def test_a_stray_blip_of_work_is_not_life() -> None:
    clock, cpu, watchdog = _watch()
    for _ in range(45):
        clock.advance(0.5)
        assert cpu.seconds is not None
        cpu.seconds += 0.001
        why = watchdog.stuck()
    assert why is not None


def test_endless_spinning_ends_at_the_hard_limit() -> None:
    clock, cpu, watchdog = _watch()
    stuck_at = None
    for second in range(1, int(HARD_LIMIT_S) + 10):
        clock.advance(1.0)
        cpu.seconds = float(second)
        if watchdog.stuck():
            stuck_at = second
            break
    assert stuck_at == int(HARD_LIMIT_S) + 1


def test_supervisor_measures_and_kills_even_a_stopped_child() -> None:
    supervisor = Supervisor()
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    supervisor._children["scheduler"] = child
    assert supervisor.first_death() is None
    assert Watchdog(SystemClock(), lambda: supervisor.cpu_s("scheduler")).stuck() is None
    child.send_signal(signal.SIGSTOP)
    supervisor.kill_all()
    assert child.returncode == -signal.SIGKILL
    assert supervisor.cpu_s("scheduler") is None


@pytest.mark.parametrize(("code", "words"), [(-9, "killed by SIGKILL"), (-11, "killed by SIGSEGV"), (3, "exit code 3")])
def test_deaths_are_described(code: int, words: str) -> None:
    assert words in describe_death("scheduler", code)
