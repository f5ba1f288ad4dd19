"""Rootlet: LLM serving with a radix tree over token prefixes at its heart. Importing it imports nothing: not even `typing`, for whose time a Ctrl-C
to the command line would have no answer yet (cli/main.py)."""

TYPE_CHECKING = False  # type checkers take the name for true
if TYPE_CHECKING:
    from rootlet.core.errors import InvalidValue, RootletError
    from rootlet.core.sampling_params import SamplingParams
    from rootlet.engine.engine import Engine

__version__ = "0.1.0"
__all__ = ["Engine", "InvalidValue", "RootletError", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    """`rootlet.Engine` on first use, so that importing one room never loads the others (the control wing must not load torch)."""
    if name == "Engine":
        from rootlet.engine.engine import Engine

        return Engine
    if name == "SamplingParams":
        from rootlet.core.sampling_params import SamplingParams

        return SamplingParams
    if name in ("InvalidValue", "RootletError"):
        from rootlet.core import errors

        return getattr(errors, name)
    raise AttributeError(f"module 'rootlet' has no attribute {name!r}")
