"""One engine in a separate process: reads commands as JSON lines, answers each with one.

    {"do": "load", "checkpoint": …, "converted": …, "threads": …, "kv_bytes": …, "options": …}
    {"do": "run", "work": …}     what scenarios.work made; the answer has the seconds and all token ids
    {"do": "quit"}

It runs under a peer's Python and needs only that and the peer. It exits when its input ends.
"""

import importlib
import json
import os
import sys
import time
import traceback
from typing import Any


def run(engine: Any, work: dict[str, Any]) -> dict[str, Any]:
    """Let the engine process the known prompt, then measure the turns."""
    if work["known"]:
        engine.generate([work["known"]], 1, work)
    texts = [list(work["known"]) for _ in range(work["streams"])]
    answers: list[list[list[int]]] = []
    started = time.perf_counter()
    for turn in work["turns"]:
        texts = [text + new for text, new in zip(texts, turn, strict=True)]
        answers.append(engine.generate(texts, work["out"], work))
        texts = [text + answer for text, answer in zip(texts, answers[-1], strict=True)]
    seconds = time.perf_counter() - started
    for answer in (answer for turn in answers for answer in turn):
        if len(answer) != work["out"] and not work.get("ends"):
            raise ValueError(f"{len(answer)} tokens came out where {work['out']} were asked for")
    return {"seconds": seconds, "answers": answers}


def main() -> None:
    """Answer commands until told to quit. The engine's output goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    engine: Any = None
    for line in sys.stdin:
        order = json.loads(line)
        what = order.pop("do")
        try:
            if what == "load":
                engine = importlib.import_module(sys.argv[1]).Engine(**order)
                reply: dict[str, Any] = {"version": engine.version, "precision": engine.precision}
            elif what == "run":
                reply = run(engine, order["work"])
            else:
                break
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers, flush=True)
    if engine is not None:
        engine.close()


if __name__ == "__main__":
    main()
