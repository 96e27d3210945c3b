"""Send a folder's documents as they are found, then ask about them. Compare the time to the first token with
sending all at the end. Start `make serve`, then: python examples/folder_stream.py [FOLDER] [URL]"""

import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from streamserve_client import PromptStream

PAUSE = 0.25  # seconds until the next document is found, as by a crawler or a search
MESSAGES = [{"role": "user", "content": "{context}\n\n{query}"}]
QUESTION = "Summarize this article in two sentences:"


def find(folder: str) -> Iterator[Path]:
    for path in sorted(Path(folder).rglob("*.txt")):
        time.sleep(PAUSE)
        yield path


def ask(folder: str, url: str, *, as_found: bool) -> tuple[str, float]:
    """Return the answer, and the seconds from the last document to the first token."""
    fields = {"messages": MESSAGES, "query": QUESTION, "temperature": 0, "max_tokens": 64}
    salt = secrets.token_hex(8)  # neither request finds the other's prompt in the prefix cache
    with PromptStream(url, **fields, cache_salt=salt) as stream:
        kept = ""
        for path in find(folder):
            found = time.perf_counter()
            kept += path.read_text() + "\n"
            if as_found:
                state = stream.state()
                print(f"{path.name}: {state['computed']} of {state['tokens']} earlier tokens are computed")
                stream.append(kept)
                kept = ""
        if kept:
            stream.append(kept)
        pieces = stream.answer()
        first = next(pieces, "")
        seconds = time.perf_counter() - found
        return first + "".join(pieces), seconds


def main(folder: str, url: str) -> None:
    answer, early = ask(folder, url, as_found=True)
    same, late = ask(folder, url, as_found=False)
    print(answer if answer == same else f"the answers differ: {answer!r}, {same!r}")
    print(f"time to the first token: {1000 * early:.0f} ms; sent at the end: {1000 * late:.0f} ms")


if __name__ == "__main__":
    here = str(Path(__file__).parent / "documents")
    main(*(sys.argv[1:] + [here, "http://127.0.0.1:8000"][len(sys.argv) - 1 :]))
