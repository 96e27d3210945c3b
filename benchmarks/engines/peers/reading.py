"""One engine reads texts in a separate process, and writes the log-probabilities after each token.

    {"converted": …, "options": …, "threads": …, "texts": [token ids, …], "folder": …}

is its input; text i becomes `i.npy` [tokens, vocabulary] in the folder. It runs under a peer's Python.
"""

import importlib
import json
import os
import sys
from pathlib import Path

import numpy as np


def main() -> None:
    """Read the request, let the adapter named by the argument read the texts, and write the log-probabilities
    it yields."""
    order = json.load(sys.stdin)
    adapter = importlib.import_module(sys.argv[1])
    read = adapter.log_probabilities(order["converted"], order["threads"], order["options"], order["texts"])
    for i, rows in enumerate(read):
        np.save(Path(order["folder"]) / f"{i}.npy", np.asarray(rows, np.float32))
    os._exit(0)  # Threads of vLLM that still run would end the process with an error.


if __name__ == "__main__":
    main()
