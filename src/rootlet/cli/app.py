"""The `rootlet` command line: a table of subcommands, each imported only when it is run. Its entry point is main.py."""

from __future__ import annotations

import cyclopts

from rootlet import __version__

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
