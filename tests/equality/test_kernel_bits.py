"""The kernels as a program of their own (tests/native), on this machine's instruction sets and on AArch64's: NEON with and without the dot product
instruction, run by an emulator. Every set must give the scalar set's bytes, and the scalar sets of both machines the same ones.

The AArch64 half needs a cross compiler and an emulator: Debian's packages g++-aarch64-linux-gnu and qemu-user (`make test-arm` says so).
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SOURCE = Path(__file__).parents[1] / "native"
CROSS = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", "-DCMAKE_EXE_LINKER_FLAGS=-static"]
CROSS_COMPILER = "aarch64-linux-gnu-g++"


def built(folder: Path, *options: str) -> Path:
    """The program, built in `folder`."""
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake")
    for command in (["cmake", "-S", str(SOURCE), "-B", str(folder), *options], ["cmake", "--build", str(folder), "--parallel", "2"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder / "kernel_bits"


def report(*command: str | Path) -> tuple[list[str], dict[str, str]]:
    """Runs the program: the sets it compared, and the hash of each case. Fails where a set differs from the scalar one."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert not [line for line in lines if line[0] == "differs"]
    return lines[0][1].split(","), {line[1]: line[2] for line in lines if line[0] == "case"}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, str]]:
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    return report(built(tmp_path_factory.mktemp("here")))


@pytest.fixture(scope="module")
def arm_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [name for name in (CROSS_COMPILER, "qemu-aarch64") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}: apt-get install g++-aarch64-linux-gnu qemu-user")
    return built(tmp_path_factory.mktemp("arm"), f"-DCMAKE_CXX_COMPILER={CROSS_COMPILER}", *CROSS)


def test_every_set_of_this_machine_gives_the_scalar_bytes(here: tuple[list[str], dict[str, str]]) -> None:
    sets, cases = here
    if sets == ["scalar"]:
        pytest.skip("this machine has the scalar set only")
    assert sets[0] == "scalar"
    assert len(cases) == 36


@pytest.mark.parametrize(("cpu", "sets"), [("max", ["scalar", "neon", "dotprod"]), ("cortex-a72", ["scalar", "neon"])])
def test_aarch64_gives_the_same_bytes_with_and_without_dot_products(
    cpu: str, sets: list[str], arm_program: Path, here: tuple[list[str], dict[str, str]]
) -> None:
    found, cases = report("qemu-aarch64", "-cpu", cpu, arm_program)
    assert found == sets
    if platform.machine() in ("x86_64", "AMD64"):
        made_nan = "silu-odd"  # holds NaN that an operation made, whose sign is the processor's choice
        assert {name: h for name, h in cases.items() if name != made_nan} == {name: h for name, h in here[1].items() if name != made_nan}
