"""Write the tables and numbers of all pages from the result files, or check them."""

import argparse
import sys

from .page import differences, pages, render


def main() -> None:
    """Render README and docs; with `--check` only say what differs, and exit with 1 if anything does."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, and report pages that differ")
    check = parser.parse_args().check
    wrong = []
    for page in pages():
        if check:
            wrong += differences(page)
        elif (text := render(page)) != page.read_text(encoding="utf-8"):
            page.write_text(text, encoding="utf-8")
            print(f"wrote {page}")
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
