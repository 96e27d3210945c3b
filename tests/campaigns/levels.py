"""Tests of execution, exactness and pairs with the kernels of lesser processors (STREAMSERVE_KERNEL_PATH). A
trial runs one test file with the kernels of one processor, small counts, and random cases drawn by the seed.

STREAMSERVE_KERNEL_PATH=avx2 pytest FILE --seed SEED one trial by hand; the recorded detail names both
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from streamserve.system.instructions import KERNEL_PATH_VARIABLE
from tests.campaigns.ledger import REPOSITORY
from tests.campaigns.outcome import ERROR, UNAVAILABLE, Outcome
from tests.processor import lesser_paths

PATTERNS = ("execution/**/test_*.py", "exact/test_*.py", "test_pairs*.py")


def files() -> list[str]:
    """Return the test files, relative to the repository."""
    found = (file for pattern in PATTERNS for file in sorted((REPOSITORY / "tests").glob(pattern)))
    return [str(file.relative_to(REPOSITORY)) for file in found]


def trial(seed: int) -> Outcome:
    """Run one test file with a lesser processor's kernels. Consecutive seeds run a file with all processors
    in turn."""
    paths = lesser_paths()
    if not paths:
        return Outcome(verdict="refused", kind=UNAVAILABLE, detail="there is no lesser processor than this")
    path, file = paths[seed % len(paths)], files()[seed // len(paths) % len(files())]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", file]
        command += ["--results", str(report), f"--seed={seed}", f"--randomly-seed={seed}"]
        done = subprocess.run(
            [*command, f"--hypothesis-seed={seed}"],
            cwd=REPOSITORY,
            env=os.environ | {KERNEL_PATH_VARIABLE: path},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        found = json.loads(report.read_text()) if report.exists() else {}
    settings = {"kernel_path": path, "file": file}
    if done.returncode:
        return Outcome(verdict="failed", kind=ERROR, detail=done.stdout + done.stderr, settings=settings)
    left_out = {f"{path} left out {what}": count for what, count in found["left_out"].items()}
    counts = {f"{path} {name}": found[name] for name in ("passed", "skipped")}
    return Outcome(verdict="passed", settings=settings, counts={f"{path} files": 1} | counts | left_out)
