"""Makes `tests/fixtures` importable as `fixtures` from every storey, and the tests independent of how they were started."""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

# A shell starts background jobs with Ctrl-C ignored, and children inherit that: no test that sends one would ever hear of it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
