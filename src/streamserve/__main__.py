"""`python -m streamserve` is the `streamserve` command."""

from streamserve.cli import main

main()
