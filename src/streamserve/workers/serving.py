"""A worker's turns for one head: messages come in, events and reports go out."""

import logging
import time
from dataclasses import dataclass

from streamserve.engine.engine import Engine
from streamserve.engine.worker_loop import WorkerLoop, wait_seconds
from streamserve.protocol.messages import Adopt, Events, Leave, Stop
from streamserve.protocol.reports import Report
from streamserve.workers.grammar_queue import GrammarQueue
from streamserve.workers.link import WorkerLink
from streamserve.workers.output_keeper import OutputKeeper
from streamserve.workers.profile_refresh import ProfileRefresher
from streamserve.workers.server_clock import to_local, to_server
from streamserve.workers.throughput_log import ThroughputLog

logger = logging.getLogger(__name__)

COMPILING_MILLISECONDS = 2
"""Milliseconds between checks by an idle worker whether a grammar is compiled."""


@dataclass
class Serving:
    """The parts of a worker that serve one head, whose clock is `clock_offset` seconds ahead of this
    machine's.

    Blocks that workers of the previous head could still write stay out of use until the time `closed`.
    """

    loop: WorkerLoop
    outputs: OutputKeeper
    grammar_queue: GrammarQueue
    clock_offset: float = 0.0
    closed: float | None = None

    def open_blocks(self, now: float) -> None:
        """Use the closed blocks again once the time `closed` has come."""
        if self.closed is not None and now >= self.closed:
            self.loop.engine.transfers.release_abandoned()
            self.closed = None


def serve(serving: Serving, link: WorkerLink, refresher: ProfileRefresher) -> bool:
    """Receive messages between turns, and send the output of the turns, until a Stop or Leave message
    arrives.

    Returns whether the message was a Leave.
    """
    loop, engine, grammar_queue = serving.loop, serving.loop.engine, serving.grammar_queue
    throughput = ThroughputLog(engine.report(), time.monotonic())
    while True:
        longest = _wait_milliseconds(engine, grammar_queue)
        wait = refresher.wait(engine, longest)
        received = link.receive(wait)
        if isinstance(received, Adopt):
            logger.error("ignored an Adopt: this worker serves a head")
            continue
        if isinstance(received, Stop | Leave):
            return isinstance(received, Leave)
        local = (to_local(message, serving.clock_offset) for message in received)
        messages = [message for taken in local for message in grammar_queue.accept(taken)]
        messages += grammar_queue.ready()
        for message in messages:
            serving.outputs.apply(message)
        loop.begin_turn(messages)
        now = time.monotonic()
        for sent in loop.end_turn(now, busy=wait < longest):
            link.send(to_server(sent, serving.clock_offset))
            if isinstance(sent, Events):
                serving.outputs.sent(sent.events)
            elif isinstance(sent, Report) and (line := throughput.line(sent, now)):
                logger.info(line)
        serving.open_blocks(now)


def _wait_milliseconds(engine: Engine, grammar_queue: GrammarQueue) -> int:
    """Return how many milliseconds to wait for messages before the next turn."""
    seconds = wait_seconds(engine.has_work, engine.stalled, engine.transfers.busy)
    wait = round(1000 * seconds)
    return min(wait, COMPILING_MILLISECONDS) if grammar_queue.waiting else wait
