"""The hot loops of the quantised tiles and of attention keep their sums in registers: between the first and the last multiply of a quantised tile,
and inside each inner loop of an attention tile, no vector goes through the stack. A compiler that hoists products and spills them costs half the
speed and changes no bit, so nothing else would notice. The same for the loop that measures the
machine's multiply rate: sums kept in memory made it report a third of the truth.

Reads the object files of the editable build; skipped where there are none, or no objdump.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

BUILD = Path(__file__).parents[2] / "build"
MULTIPLY = re.compile(r"\bvpdpbusd|\bvpmaddubsw")
STACK_VECTOR = re.compile(r"\bv(?!pbroadcast)\w+\s.*\(%r[sb]p.*%[xyz]mm|\bv(?!pbroadcast)\w+\s.*%[xyz]mm.*\(%r[sb]p")
TILE = re.compile(r"^[0-9a-f]+ <.*quant_tile<.*WeightKind\)(\d+), (\d), \w+, \d+>, (\d)>.*>:$")
CALIBRATION = re.compile(r"^[0-9a-f]+ <.*calibrate_multiply.*>:$")
STACK = re.compile(r"\(%r[sb]p")
ROWS = {"avx2": {1, 2, 3, 4}, "avx512": {1, 2, 3, 4, 5, 6}}


def disassembled(object_file: Path) -> list[str]:
    command = ["objdump", "--disassemble", "--no-show-raw-insn", "--demangle", str(object_file)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def tiles(object_file: Path) -> dict[tuple[int, int, int], list[str]]:
    """(weight kind, bits, rows) -> the tile's instructions."""
    found: dict[tuple[int, int, int], list[str]] = {}
    into: list[str] | None = None
    for line in disassembled(object_file):
        if line.endswith(">:"):
            name = TILE.match(line)
            into = None if name is None else found.setdefault((int(name[1]), int(name[2]), int(name[3])), [])
        elif into is not None:
            into.append(line)
    return found


def functions(object_file: Path, name: re.Pattern[str]) -> dict[str, list[str]]:
    """Instructions by function, of those whose demangled name fits; `name` has one group, the key."""
    found: dict[str, list[str]] = {}
    into: list[str] | None = None
    for line in disassembled(object_file):
        if line.endswith(">:"):
            header = name.search(line)
            into = None if header is None else found.setdefault(header[1], [])
        elif into is not None:
            into.append(line)
    return found


JUMP = re.compile(r"^\s*([0-9a-f]+):\s+j\w+\s+([0-9a-f]+) ")


def inner_loops(code: list[str], least_fma: int) -> list[list[str]]:
    """Innermost loops (by backward jumps that hold no other) with at least so many fused multiply-adds."""
    at = {line.split(":")[0].strip(): i for i, line in enumerate(code)}
    jumps = ((i, JUMP.match(line)) for i, line in enumerate(code))
    spans = [(at[j[2]], i) for i, j in jumps if j is not None and j[2] in at and at[j[2]] < i]
    inner = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    loops = [code[a : b + 1] for a, b in inner]
    return [loop for loop in loops if sum("vfmadd" in line for line in loop) >= least_fma]


@pytest.mark.parametrize(("isa", "register", "sums"), [("avx2", "ymm", 12), ("avx512", "zmm", 12)])
def test_attention_sums_stay_in_registers_of_full_width(isa: str, register: str, sums: int) -> None:
    """Decode of three heads a key (3 rows) and prefill (6 rows), for each type of page: loops of scores and of values."""
    objects = sorted(BUILD.glob(f"*/csrc/CMakeFiles/kernels_{isa}.dir/attention.cpp.o"))
    if not objects or shutil.which("objdump") is None:
        pytest.skip("needs the objects of an editable build, and objdump")
    found = functions(objects[0], re.compile(r"tile_cut<([36], (?:float|unsigned short|signed char))>\("))
    assert len(found) == 6
    for what, code in found.items():
        if isa == "avx2" and what in ("3, unsigned short", "3, signed char"):
            continue  # 12 sums, 4 widened keys and a query: one more than there are registers, so a sum waits in L1
        # The loop with the shift is exp: its constants may wait in L1.
        loops = [loop for loop in inner_loops(code, sums) if not any("vpslld" in line for line in loop)]
        assert len(loops) >= 2, f"{what}: no loops of scores and values found"
        for loop in loops:
            assert not [line for line in loop if STACK_VECTOR.search(line)], f"{isa}, {what}"
            wide = [line for line in loop if "vfmadd" in line and register in line]
            assert len(wide) >= sums, f"{isa}, {what}: narrower than {register}"


def spills(code: list[str]) -> list[str]:
    at = [i for i, line in enumerate(code) if MULTIPLY.search(line)]
    return [line for line in code[at[0] : at[-1]] if STACK_VECTOR.search(line)]


def loop_of(code: list[str]) -> list[str]:
    """From the target of the first jump backwards to that jump: the first loop of a function."""
    for at, line in enumerate(code):
        jump = JUMP.match(line)
        if jump is not None and int(jump[2], 16) < int(jump[1], 16):
            begin = next(i for i, other in enumerate(code) if other.split(":")[0].strip() == jump[2])
            return code[begin : at + 1]
    return []


def object_of(isa: str, source: str) -> Path:
    objects = sorted(BUILD.glob(f"*/csrc/CMakeFiles/kernels_{isa}.dir/{source}.o"))
    if not objects or shutil.which("objdump") is None:
        pytest.skip("needs the objects of an editable build, and objdump")
    return objects[0]


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
def test_the_calibration_loop_keeps_its_sums_in_registers(isa: str) -> None:
    lines = disassembled(object_of(isa, "calibrate.cpp"))
    start = next(i for i, line in enumerate(lines) if CALIBRATION.match(line))
    end = next(i for i in range(start + 1, len(lines)) if not lines[i].strip())
    loop = loop_of(lines[start + 1 : end])
    multiplies = [line for line in loop if MULTIPLY.search(line)]
    assert len(multiplies) == {"scalar": 0, "avx2": 8, "avx512": 12}[isa], "\n".join(loop)
    assert loop
    assert not [line for line in loop if STACK.search(line)]


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_no_vector_of_a_hot_tile_goes_through_the_stack(isa: str) -> None:
    found = tiles(object_of(isa, "gemm_q.cpp"))
    assert {(kind, rows) for kind, _, rows in found} == {(kind, rows) for kind in range(3, 8) for rows in ROWS[isa]}
    for (kind, bits, rows), code in found.items():
        if isa == "avx2" and bits == 5:
            continue  # by design the first half of a block's sums waits in L1
        assert not spills(code), f"{isa}, weight kind {kind}, {rows} rows"


def test_the_first_loop_is_found() -> None:
    code = ["   0:\txor %eax,%eax", "   2:\tjle    a <f+0xa>", "   4:\tadd %ecx,%eax", "   6:\tjne    4 <f+0x4>", "   a:\tret"]
    assert loop_of(code) == code[2:4]
    assert loop_of(code[:2]) == []


def test_a_spill_is_seen() -> None:
    tile = [
        "vpdpbusd %zmm1,%zmm2,%zmm3",
        "vmovdqa64 %zmm3,0x40(%rsp)",
        "vmovdqa64 -0x38(%rsp),%zmm0",
        "mov %rax,(%rsp)",
        "vpdpbusd %zmm1,%zmm2,%zmm3",
    ]
    assert spills(tile) == tile[1:3]
    assert spills([tile[1], *tile[:1], *tile[4:], tile[2]]) == [], "what happens before and after the loop costs nothing"
