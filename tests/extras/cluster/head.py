"""A head in a separate process. It answers batches of requests that are read from standard input, and prints
reports.

python -m tests.extras.cluster.head CHECKPOINT SETTINGS settings as JSON ◀ {"count": 16, "seed": 1, "deaths":
0} repeats the batch until this number of workers has died ▶ ready | running | {"answers": …, "transfer": …,
"deaths": …, "interrupted": …}

`answers` has the answers of each batch that differ from those before. A batch may take less time than a
fault; since it is repeated, there are open requests when a worker is lost, and `interrupted` counts them.
"""

import asyncio
import json
import sys
import time
from typing import Any

import msgspec

from streamserve.llm.async_llm import AsyncLLM
from streamserve.settings.resolve import resolve
from streamserve.system.logs import configure_logging
from tests.pairs import Request, answers, fleet, make_requests, until, wait_until_idle


def say(line: str) -> None:
    print(line, flush=True)


async def repeated(llm: AsyncLLM, requests: list[Request], deaths: int) -> list[Any]:
    """Answer the requests, at least once, until this number of workers has died; return the answers that
    differ."""
    different: list[Any] = []
    while not different or fleet(llm).supervisor.deaths < deaths:
        answered = await answers(llm, requests)
        if answered not in different:
            different.append(answered)
    return different


async def lost(llm: AsyncLLM, deaths: int) -> int:
    """Wait until this number of workers has died; return how many requests were open then."""
    if not deaths:
        return 0
    await until(lambda: fleet(llm).supervisor.deaths >= deaths)
    return len(fleet(llm).requests)


async def main() -> None:
    configure_logging("warning", "text")
    checkpoint, settings = sys.argv[1], json.loads(sys.argv[2])
    llm = AsyncLLM(resolve(checkpoint, {"profile": False, "num_blocks": 400, "max_chunk": 32} | settings))
    await llm.start()
    try:
        await until(lambda: all(worker.ready for worker in fleet(llm).workers.values()))
        say("ready")
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            requests = make_requests(asked["count"], asked["seed"])
            started = time.monotonic()
            working = asyncio.create_task(repeated(llm, requests, asked["deaths"]))
            await until(lambda: any(any(r.outputs.values()) for r in fleet(llm).requests.values()))
            say("running")
            interrupted = await lost(llm, asked["deaths"])
            result = await working
            seconds = time.monotonic() - started
            if asked.get("idle", True):
                await until(lambda: llm.health().ready)
                await wait_until_idle(llm)
            report = llm.report()
            say(json.dumps({
                "answers": result, "seconds": seconds, "deaths": fleet(llm).supervisor.deaths,
                "ready_after": time.monotonic() - started, "interrupted": interrupted,
                "transfer": msgspec.to_builtins(report.transfer) if report else None,
            }))  # fmt: skip
    finally:
        await llm.close()


if __name__ == "__main__":
    asyncio.run(main())
