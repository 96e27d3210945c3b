"""Find what a file depends on, and hash it: for tests, parts of a verification, trials and benchmarks.

    tree = read()
    tree.closure(["tests/engine/test_engine.py"])    the files that it can reach, itself included
    tree.content(["benchmarks/papers/star.py"])             a hash of their paths and bytes

A result is valid while the content of the closure that made it is the same. The closure is found from the
text of the files. It contains at least every file that a run reads, as far as `references.py` recognizes the
names in a file.
"""

from tests.dependencies.tree import ROOT, Tree, content, read

__all__ = ["ROOT", "Tree", "content", "read"]
