"""Makes `tests/fixtures` importable as `fixtures` from every storey, and a run independent of how, where and when it was started."""

import os
import signal
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

# A shell starts background jobs with Ctrl-C ignored, and children inherit that: no test that sends one would ever hear of it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples each time, and none because a machine is slow or a folder holds those of an earlier run; only the long profile searches on.
is_long = os.environ.get("ROOTLET_HYPOTHESIS_PROFILE") == "long"
settings.register_profile("house", derandomize=not is_long, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")
