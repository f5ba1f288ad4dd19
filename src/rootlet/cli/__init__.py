"""The command line. Imports are lazy: `rootlet --help` answers in well under 200 ms because nothing heavy is loaded."""
