"""Command lines of the benchmarks: `--smoke`, and where results and caches are written.

A smoke run executes a benchmark's whole code path with the smallest counts. It writes into a temporary
folder, never into benchmarks/results, and renders no page. Its numbers mean nothing.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, TypeVar

RESULTS = Path(__file__).parent / "results"
FLAG = "--smoke"
T = TypeVar("T")

_scratch: list[Path] = []
"""The temporary folder of a smoke run; empty in all other runs."""


def parse(parser: argparse.ArgumentParser, **smallest: Any) -> argparse.Namespace:
    """Return the parsed command line, without `smoke` itself.

    Args:
        parser: gets the option `--smoke`.
        smallest: defaults of a smoke run. Options of the command line take precedence.
    """
    parser.add_argument(
        FLAG, action="store_true", help="smallest counts; results go to a temporary folder, no page changes"
    )
    if FLAG in sys.argv[1:]:
        parser.set_defaults(**smallest)
    arguments = parser.parse_args()
    if vars(arguments).pop("smoke"):
        begin_smoke()
    return arguments


def begin_smoke() -> None:
    """Write results and caches into a new temporary folder from now on; servers measure no profile."""
    _scratch[:] = [Path(tempfile.mkdtemp(prefix="streamserve-smoke-"))]
    os.environ["STREAMSERVE_PROFILE"] = "false"
    print(f"smoke run: results in {_scratch[0]}", file=sys.stderr)


def smoke() -> bool:
    """Return whether this is a smoke run."""
    return bool(_scratch)


def results_folder() -> Path:
    """Return the folder of result files: benchmarks/results, or the temporary folder of a smoke run."""
    return _scratch[0] if _scratch else RESULTS


def cache(path: Path) -> Path:
    """Return the `path` of a benchmark's cache; in a smoke run, the same name in the temporary folder."""
    return _scratch[0] / path.name if _scratch else path


def pick(full: T, small: T) -> T:
    """Return `full`, or `small` in a smoke run."""
    return small if _scratch else full
