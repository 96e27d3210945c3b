"""Compile all kernels without a GPU, and show their use of a GPU's resources: registers, spills, shared
memory.

python -m tests.gpu.compile --capability 90
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.gpu.examples import KernelExample, all_examples

CAPABILITIES = (80, 90, 100)
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Maximum bytes of shared memory of a block, by compute capability."""

REGISTERS = 65536
"""Number of registers of a multiprocessor."""
MAX_WARPS = 64
WARP = 32


@dataclass(frozen=True)
class Compiled:
    """The resources of a compiled kernel on a device of `capability`. `spills`, `shared` and the largest copy
    to shared memory (`copied`) are in bytes. `tensor_cores`: whether its code uses them."""

    name: str
    capability: int
    warps: int
    registers: int
    spills: int
    shared: int
    tensor_cores: bool
    copied: int = 0

    @property
    def programs(self) -> int:
        """Number of programs that a multiprocessor can run at once: limited by registers (allocated 8 at a
        time), shared memory and warps."""
        by_registers = REGISTERS // (-(-self.registers // 8) * 8 * WARP * self.warps)
        by_shared = SHARED_BYTES[self.capability] // self.shared if self.shared else MAX_WARPS
        return min(by_registers, by_shared, MAX_WARPS // self.warps)

    @property
    def occupancy(self) -> float:
        """The share of a multiprocessor's warps that the kernel can occupy."""
        return self.programs * self.warps / MAX_WARPS

    def fault(self, example: KernelExample) -> str | None:
        """Return a reason why the example's kernel cannot be launched or is slow; None if there is none."""
        if self.spills:
            return f"spills {self.spills} bytes"
        if self.programs < example.programs:
            return f"{self.programs} programs fit on a multiprocessor, {example.programs} are launched"
        if self.copied > example.copied:
            return f"copies {self.copied} bytes at once from rows aligned to {example.copied}"
        return None


def compile_example(example: KernelExample, capability: int) -> Compiled:
    """Compile an example's kernel for a device of `capability`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = example.kernel.arg_names
    signature = {
        name: "constexpr" if name in example.constants else example.signature[name] for name in names
    }
    aligned = [name for name in names if signature[name].startswith("*") or name in example.aligned]
    source = ASTSource(
        example.kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in example.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, WARP),
        options={"num_warps": example.num_warps, "num_stages": example.num_stages},
    )
    registers, spills = _usage(compiled.asm["cubin"])
    return Compiled(
        example.name,
        capability,
        example.num_warps,
        registers,
        spills,
        compiled.metadata.shared,
        re.search(r"wgmma|mma\.sync|tcgen05\.mma", compiled.asm["ptx"]) is not None,
        _largest_copy(compiled.asm["ptx"]),
    )


def _largest_copy(ptx: str) -> int:
    """Return the maximum bytes that one instruction copies to shared memory. Addresses must be multiples of
    it."""
    sizes = re.findall(r"cp\.async\.c[ag]\.shared.*?\], (0x[0-9a-f]+|\d+)", ptx)
    return max((int(size, 0) for size in sizes), default=0)


def _compile(index: int, capability: int) -> Compiled:
    """Compile the example with this index."""
    return compile_example(all_examples(capability)[index], capability)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Return the registers of a kernel and the bytes that it spills to the stack, reported by cuobjdump."""
    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__path__[0]) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def show(compiled: Sequence[Compiled]) -> Table:
    """Return a table of the kernels."""
    table = Table(title="Kernels, compiled ahead of time", title_justify="left")
    for column in ("kernel", "sm", "warps", "registers", "spilled", "shared", "occupancy", "tensor cores"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    for kernel in compiled:
        table.add_row(
            kernel.name, str(kernel.capability), str(kernel.warps), str(kernel.registers),
            str(kernel.spills), f"{kernel.shared / 1024:.1f} KiB", f"{kernel.occupancy:.0%}",
            "yes" if kernel.tensor_cores else "",
        )  # fmt: skip
    return table


def main() -> int:
    """Compile and print all kernels; return 1 if a kernel has a fault."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--capability", type=int, choices=CAPABILITIES, action="append", help="by default all"
    )
    parser.add_argument("--processes", type=int, default=1, help="kernels compiled at the same time")
    args = parser.parse_args()
    examples = [
        (index, capability)
        for capability in args.capability or CAPABILITIES
        for index in range(len(all_examples(capability)))
    ]
    if args.processes == 1:
        compiled = [_compile(*example) for example in examples]
    else:
        with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
            compiled = list(pool.map(_compile, *zip(*examples, strict=True)))
    console = Console(width=130)
    console.print(show(compiled))
    known = {capability: all_examples(capability) for _, capability in examples}
    faults = [
        f"{kernel.name} on {capability}: {fault}"
        for (index, capability), kernel in zip(examples, compiled, strict=True)
        if (fault := kernel.fault(known[capability][index]))
    ]
    for line in faults:
        console.print(line)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
