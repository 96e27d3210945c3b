"""Render tables and numbers of README and docs from the result files: `python -m benchmarks.figures`.

A page marks what is rendered in comments. A table has a name; `tables/` has a function for each:

    <!-- figures: slo/rate-here -->
    | … |
    <!-- end -->

A number in a sentence has a name too, which the page defines at its end:

    `goodput` attains <!--=attained-->86 %<!--/--> of the targets.

    <!-- numbers
    attained = slo_rate_here > rate=2.5, setting=goodput > attainment as 0 %
    -->

`lookup.py` has the grammar of definitions. `--check` writes nothing and names what differs.
"""

import subprocess
import sys
from pathlib import Path


def render_pages() -> None:
    """Write the tables and numbers of all pages, in a process that reads the result files as they are now.

    Every program that writes a result file calls this function. A page that cannot be rendered is reported;
    the result stays.
    """
    command = [sys.executable, "-m", "benchmarks.figures"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], check=False)
    if done.returncode:
        print("the pages that show this result are not rendered: make figures", file=sys.stderr)
