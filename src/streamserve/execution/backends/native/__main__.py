"""`python -m streamserve.execution.backends.native`: compile the kernels now, unless the wheel has them."""

import logging
import sys

from streamserve.execution.backends.native.build import BuildFailed, NativeCacheError, build
from streamserve.execution.backends.native.packaged import packaged_library
from streamserve.protocol.errors import CheckpointError


def main() -> int:
    """Print the library's path. A missing compiler is not an error: models then run on plain torch."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # a compilation is announced
    try:
        print(packaged_library() or build())
    except BuildFailed as error:
        print(f"native kernels are unavailable, models run on the PyTorch backend: {error}", file=sys.stderr)
    except (NativeCacheError, CheckpointError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
