"""`make gpu-check`: kernels against plain torch, and whole models against transformers and the CPU, on a GPU.

    python -m tests.gpu.check                  on a machine with a GPU, PyTorch, Triton and numpy
    python -m tests.gpu.check --without-gpu    the same in plain torch and Triton's interpreter

Needs no network: packages that are missing come from the wheels in build/gpu-wheels (`make gpu-wheels`), and
models are random, made here. Prints what each part counted, and returns 1 unless all passed in time.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent
WHEELS = REPOSITORY / "build" / "gpu-wheels"
SITE = REPOSITORY / "build" / "gpu-site"
LIMIT_SECONDS = 470.0

NEEDED = ("torch", "triton", "numpy")
"""Packages that the machine has; all other packages come from the wheels."""

KERNELS = ("tests/execution/backends/cuda", "--ignore=tests/execution/backends/cuda/test_compile.py")
MODELS = ("tests/exact/test_against_transformers.py", "tests/exact/test_speculation.py")


@dataclass(frozen=True)
class Part:
    """A command, and what its success shows."""

    name: str
    command: tuple[str, ...]


def unpack_wheels() -> None:
    """Unpack the wheels once, to where the parts find them after the machine's packages."""
    if SITE.exists() or not WHEELS.exists():
        return
    for wheel in sorted(WHEELS.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(SITE)


def parts(capability: int, processes: int) -> list[Part]:
    """Return the parts for a device of this compute capability."""
    python = (sys.executable, "-m")
    pytest = (
        *python,
        "pytest",
        "--tb=short",
        "-rfE",
        "-p",
        "no:randomly",
        "-p",
        "no:cacheprovider",
        "--no-header",
    )
    several = ("--numprocesses", str(processes), "--dist", "worksteal") if processes > 1 else ()
    compiled = ("tests.gpu.compile", "--capability", str(capability))
    compiled += ("--processes", str(processes))
    return [
        Part("compiled kernels: registers, spills, shared memory", (*python, *compiled)),
        Part("kernels, engine with and without graphs", (*pytest, *several, *KERNELS)),
        Part("models against transformers, speculation", (*pytest, *several, *MODELS, "-k", "device")),
    ]


def environment(site: Path) -> dict[str, str]:
    """Return the environment of the parts: the project, then the machine's packages, then the unpacked
    ones."""
    paths = [str(REPOSITORY / "src"), str(REPOSITORY), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    paths += [path for path in sys.path if path.endswith("-packages")] + [str(site)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "COLUMNS": "120"}


def describe() -> tuple[str, int]:
    """Return the GPU and the versions in words, and the GPU's compute capability (0: there is none)."""
    import torch
    import triton

    versions = f"torch {torch.__version__}, Triton {triton.__version__}, Python {sys.version.split()[0]}"
    if not torch.cuda.is_available():
        return f"no GPU, {versions}", 0
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()}, {versions}", 10 * major + minor


def main() -> int:
    """Run all parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--without-gpu", action="store_true", help="run the parts on the CPU")
    parser.add_argument("--processes", type=int, help="tests at the same time; by default half the cores")
    args = parser.parse_args()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(f"this machine's Python lacks {', '.join(missing)}")
    device, capability = describe()
    if not capability and not args.without_gpu:
        parser.error("there is no CUDA device: --without-gpu runs the parts on the CPU")
    print(device, flush=True)
    unpack_wheels()
    started, failed = time.monotonic(), 0
    for part in parts(
        min(capability or 90, 100), args.processes or max(1, len(os.sched_getaffinity(0)) // 2)
    ):
        left = LIMIT_SECONDS - (time.monotonic() - started)
        print(f"\n== {part.name}", flush=True)
        try:
            done = subprocess.run(
                part.command, cwd=REPOSITORY, env=environment(SITE), timeout=max(left, 1), check=False
            )
            failed += done.returncode != 0
        except subprocess.TimeoutExpired:
            print(f"stopped after {LIMIT_SECONDS:.0f} s in all", flush=True)
            failed += 1
    print(
        f"\n{'FAILED' if failed else 'passed'} in {time.monotonic() - started:.0f} s on {device}", flush=True
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
