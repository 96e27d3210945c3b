"""Send a folder's documents while they are being read, then ask about them. Start `make serve`, then:
python examples/folder_stream.py [FOLDER] [URL]"""

import sys
from pathlib import Path

from streamserve.client import PromptStream

QUESTION = "Summarize the text above in one sentence."


def main(folder: str, url: str) -> None:
    messages = [{"role": "user", "content": "{context}\n\n{query}"}]
    with PromptStream(url, messages=messages, query=QUESTION, temperature=0, max_tokens=64) as stream:
        for path in sorted(Path(folder).rglob("*.txt")):
            stream.append(path.read_text() + "\n")
            state = stream.state()
            print(f"{path.name}: {state['computed']} of {state['tokens']} tokens are computed already")
        for piece in stream.answer():
            print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    here = str(Path(__file__).parent / "documents")
    main(*(sys.argv[1:] + [here, "http://127.0.0.1:8000"][len(sys.argv) - 1 :]))
