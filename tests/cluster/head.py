"""A head in a process: answers batches of requests that standard input asks for, and prints what happened.

python -m tests.cluster.head CHECKPOINT SETTINGS     settings as JSON
◀ {"count": 16, "seed": 1}
▶ ready | running | {"answers": …, "transfer": …, "deaths": …}
"""

import asyncio
import json
import sys
import time

import msgspec

from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol.logs import configure_logging
from streamserve.settings.resolve import resolve
from tests.test_pairs import answers, fleet, make_requests, until, wait_until_idle


def say(line: str) -> None:
    print(line, flush=True)


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
            working = asyncio.create_task(answers(llm, requests))
            await until(lambda: any(any(r.outputs.values()) for r in fleet(llm).requests.values()))
            say("running")
            result = await working
            seconds = time.monotonic() - started
            if asked.get("idle", True):
                await until(lambda: llm.health().ready)
                await wait_until_idle(llm)
            report = llm.report()
            say(json.dumps({
                "answers": result, "seconds": seconds, "deaths": fleet(llm).supervisor.deaths,
                "ready_after": time.monotonic() - started,
                "transfer": msgspec.to_builtins(report.transfer) if report else None,
            }))  # fmt: skip
    finally:
        await llm.close()


if __name__ == "__main__":
    asyncio.run(main())
