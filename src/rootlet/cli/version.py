"""`rootlet version`: what this installation is."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from importlib.util import find_spec

from rootlet import __version__

LIBRARIES = ("torch", "numpy", "tokenizers", "gguf", "safetensors", "fastapi", "uvicorn", "pyzmq")


def version() -> None:
    """Print the version of Rootlet, of Python and of the libraries that matter, and whether the native kernels are built."""
    print(f"rootlet {__version__}")
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    print(f"native kernels {'built' if find_spec('rootlet.kernels.cpu._native') else 'not built (torch reference runs instead)'}")
    for name in LIBRARIES:
        try:
            print(f"{name} {installed(name)}")
        except PackageNotFoundError:
            print(f"{name} not installed")
