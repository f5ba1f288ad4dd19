"""Entry point of the `rootlet` command. Before a Ctrl-C has its answer it imports `signal` and next to nothing else, since until then the
interpreter prints a traceback: the commands are in app.py."""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # `typing` itself is the longest import here; type checkers take the name for true
if TYPE_CHECKING:
    from typing import Any, NoReturn

INTERRUPTED = 130


def main() -> None:
    """Run the command line; exit code 2 for what the user can mend, with one line that says how; 130 for a Ctrl-C at any moment, without a word
    (but for `batch`, which can go on); 1 where what it says cannot be written."""
    # Not where Ctrl-C is ignored (a job in the background of a shell): that stays as it is.
    answers = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if answers:
        signal.signal(signal.SIGINT, _leave)
    _open_standard_streams()
    from errno import ENOSPC

    from rootlet.cli.app import app
    from rootlet.core.errors import RootletError

    try:
        if answers:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = app(sys.argv[1:], result_action="return_value")
    except RootletError as error:
        print(f"rootlet: {error.message}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        end_process(INTERRUPTED)
    except BrokenPipeError:
        sys.exit(0)
    except OSError as error:
        if error.errno != ENOSPC:
            raise
        _say_full(error)
        end_process(1)
    end_process(code if isinstance(code, int) else 0)


def _open_standard_streams() -> None:
    """Closed ones (`>&-`, some supervisors) become the null device: their numbers would go to the next files and sockets, whose owners would find
    output in them, and an event loop that is given one aborts. Children inherit them."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, "w" if fd else "r", encoding="utf-8"))


def _say_full(error: OSError) -> None:
    where = f" ({error.filename})" if error.filename else ""
    try:
        print(f"rootlet: cannot write{where}: {error.strerror}", file=sys.stderr)
    except OSError:
        return  # stderr lies on the same disk


def _leave(*_: Any) -> NoReturn:
    """While modules are imported there is nothing to close, and an exception would come out of whatever module is half loaded."""
    os._exit(INTERRUPTED)


def end_process(code: int) -> NoReturn:
    """Ends at once: a command has closed what it opened, and taking down an interpreter that holds torch or a server takes up to a second."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        code = 0
    except OSError as error:
        _say_full(error)
        code = code or 1
    os._exit(code)


if __name__ == "__main__":
    main()
