"""Compile the kernels before they are needed: `python -m streamserve.execution.native`."""

import sys

from streamserve.execution.native.build import BuildFailed, NativeCacheError, build


def main() -> int:
    """Prints where the library is. No compiler is no failure: models then run on plain torch."""
    try:
        print(build())
    except BuildFailed as error:
        print(f"no kernels of our own, plain torch will compute: {error}", file=sys.stderr)
    except NativeCacheError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
