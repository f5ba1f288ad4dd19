"""Entry point of the `rootlet` command: a table of subcommands, each imported only when it is run."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import cyclopts

from rootlet import __version__
from rootlet.core.errors import RootletError

app = cyclopts.App(name="rootlet", version=__version__, help="Serve language models; requests that begin alike share the work of that beginning.")

COMMANDS = {
    "serve": ("rootlet.cli.serve:serve", "Serve a model over HTTP (OpenAI-compatible, port 30000 on 127.0.0.1)."),
    "chat": ("rootlet.cli.chat:chat", "Talk to a model in the terminal: a running server, or one of its own."),
    "run": ("rootlet.cli.run:run", "Answer one prompt (argument or standard input) and exit."),
    "batch": ("rootlet.cli.batch:batch", "Answer a file of OpenAI batch lines; resumes where it stopped."),
    "trace": ("rootlet.cli.remote:trace", "Explain what happened to one request of a running server, and why it waited."),
    "cache": ("rootlet.cli.remote:cache", "Look into the prefix cache of a running server; pin, unpin, flush."),
    "replay": ("rootlet.cli.replay:replay", "Run the scheduler again from a record and compare every plan."),
    "doctor": ("rootlet.cli.doctor:doctor", "Explain this machine and what would be chosen on it."),
    "version": ("rootlet.cli.version:version", "Print the version and what it was built with."),
}
for _name, (_path, _help) in COMMANDS.items():
    app.command(_path, name=_name, help=_help)


def main() -> None:
    """Run the command line; exit code 2 for what the user can mend, with one line that says how."""
    try:
        code = app(sys.argv[1:], result_action="return_value")
    except RootletError as error:
        print(f"rootlet: {error.message}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
    end_process(code if isinstance(code, int) else 0)


def end_process(code: int) -> NoReturn:
    """Ends at once: a command has closed what it opened, and taking down an interpreter that holds torch or a server takes up to a second."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        code = 0
    os._exit(code)


if __name__ == "__main__":
    main()
