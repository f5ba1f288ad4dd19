"""`rootlet replay`: decide again what a recorded server decided, and compare the plans."""

from __future__ import annotations

from pathlib import Path


def replay(record: Path) -> int:
    """Run the scheduler again from a file that `rootlet serve` wrote with its record flag; exit code 1 when a plan differs.

    No model is loaded: messages, results and the clock come from the file.
    """
    from rootlet.scheduler.replay import replay as run

    outcome = run(record)
    for number, recorded, replayed in outcome.differing:
        print(f"plan {number} differs:\n  recorded  {recorded}\n  replayed  {replayed}")
    print(f"{outcome.plans} plans replayed in {outcome.turns} turns with {outcome.messages} messages, {len(outcome.differing)} differing")
    if outcome.cut:
        print("the record breaks off within its last line: what came after it is unknown")
    return 1 if outcome.differing else 0
