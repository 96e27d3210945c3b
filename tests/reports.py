"""Reports of workers that are newer than what a test has done.

A worker reports twice a second, and after its last step. A client may have its last token before that report
arrives: until then the latest one can be older than all requests of a test, and say that nothing runs.
"""

from collections.abc import Callable

from streamserve.llm.async_llm import AsyncLLM


def newer_reports(llm: AsyncLLM) -> Callable[[], bool]:
    """Return a function that returns whether every worker has reported after this call."""
    workers = llm._runtime.fleet.workers
    earlier = {name: worker.report for name, worker in workers.items()}
    return lambda: all(
        worker.report is not None and worker.report is not earlier.get(name)
        for name, worker in list(workers.items())
    )
