"""What a file depends on, and a hash of all of it: for tests, parts of a verification, trials and benchmarks.

    tree = read()
    tree.closure(["tests/engine/test_engine.py"])    the files that it can reach, itself included
    tree.content(["benchmarks/papers/star.py"])             a hash of their paths and bytes

A result holds while the content of what made it is the same. The closure comes from the text of the files. It
contains more than a run reads, and never less, as far as `references.py` recognizes what a file names.
"""

from tests.dependencies.tree import ROOT, Tree, content, read

__all__ = ["ROOT", "Tree", "content", "read"]
