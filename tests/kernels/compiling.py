"""Compiles Triton kernels for sm_90 without a GPU, and reads what came of it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGET = GPUTarget("cuda", 90, 32)


@dataclass(frozen=True)
class Compiled:
    """PTX, shared memory in bytes, registers and local memory (bytes) a thread."""

    ptx: str
    shared: int
    registers: int
    local: int

    def count(self, pattern):
        return len(re.findall(pattern, self.ptx))


def compile_kernel(kernel, signature, constants, **options):
    """`signature`: types by argument, without the constants; pointers are aligned to 16 bytes."""
    names = kernel.arg_names
    types = {name: signature.get(name, "constexpr") for name in names}
    places = {name: (place,) for place, name in enumerate(names)}
    aligned = {
        places[name]: [["tt.divisibility", 16]] for name in signature if types[name][0] == "*"
    }
    aligned |= {places[name]: [["tt.divisibility", 16]] for name in options.pop("multiples", ())}
    values = {places[name]: constants[name] for name in names if types[name] == "constexpr"}
    source = ASTSource(kernel, types, values, aligned)
    made = triton.compile(source, target=TARGET, options=options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(made.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        said = subprocess.run(
            [tool, "-res-usage", path], capture_output=True, text=True, check=True
        )
    usage = said.stdout + said.stderr
    registers, local = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "LOCAL"))
    return Compiled(made.asm["ptx"], made.metadata.shared, registers, local)
