"""A worker's turns for one head: messages come in, events and reports go out. An agent may lose its head and
adopt the worker for another head:

serving ── Leave ──▶ requests removed, nothing written elsewhere ── Left ──▶ waiting ── Adopt ──▶ serving
                                                                               └─ Stop, pipe closed ─▶ end
"""

import logging
import time
from dataclasses import dataclass

from msgspec.structs import replace

from streamserve.engine.engine import Engine
from streamserve.engine.worker_loop import WorkerLoop, wait_seconds
from streamserve.protocol.config import WorkerConfig
from streamserve.protocol.messages import (
    Adopt,
    Edit,
    Events,
    FromWorker,
    Leave,
    Left,
    Stop,
    Submit,
    ToEngine,
    Traced,
)
from streamserve.protocol.reports import Report
from streamserve.protocol.transfers import Join
from streamserve.workers.grammar_queue import GrammarQueue
from streamserve.workers.kv_ports import KVPorts
from streamserve.workers.link import WorkerLink
from streamserve.workers.output_keeper import OutputKeeper
from streamserve.workers.profile_refresh import ProfileRefresher

LOG_SECONDS = 60.0


class ThroughputLog:
    """Compares the reports of a worker once a minute, for a log line: the engine's recent throughput, and the
    step floor's share of the step time."""

    def __init__(self, report: Report, now: float) -> None:
        self._last = report
        self._since = now

    def line(self, report: Report, now: float) -> str | None:
        """Return the line for the time since the last line.

        None before a minute has passed, and if the engine has made no steps since.
        """
        if now - self._since < LOG_SECONDS:
            return None
        last, self._last, self._since = self._last, report, now
        steps, busy = report.steps - last.steps, report.step_seconds - last.step_seconds
        if not steps or busy <= 0:
            return None
        generated = report.generation_tokens - last.generation_tokens
        prompt = report.prompt_tokens - last.prompt_tokens
        text = f"{steps} steps in {busy:.1f} s: {generated / busy:.0f} tokens/s, {prompt} prompt tokens"
        if report.step_floor_seconds is None or last.step_floor_seconds is None:
            return text
        return (
            f"{text}, step floor at {(report.step_floor_seconds - last.step_floor_seconds) / busy:.0%} "
            "of step time"
        )


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


def to_local(message: ToEngine, offset: float) -> ToEngine:
    """Return a message from the server with times of this machine's clock, which the server's clock is
    `offset` seconds ahead of. On the server's machine both are one clock."""
    if not offset:
        return message
    match message:
        case Submit():
            began = {choice: at - offset for choice, at in message.began.items()}
            return replace(message, arrival=message.arrival - offset, began=began)
        case Edit():
            return replace(message, arrival=message.arrival - offset)
        case Join():
            return replace(message, began={choice: at - offset for choice, at in message.began.items()})
        case _:
            return message


def to_server(message: FromWorker, offset: float) -> FromWorker:
    """Return a message to the server with times of the server's clock."""
    if not offset or not isinstance(message, Traced):
        return message
    return Traced([replace(work, at=work.at + offset) for work in message.work])


def between_heads(engine: Engine, kv: KVPorts, link: WorkerLink) -> Adopt | None:
    """Leave a head and wait for the next one. Weights and the prefix cache stay.

    Returns the message of the next head, or None if this worker must end.
    """
    kv.leave()
    engine.leave()
    link.send(Left())
    logger.info("no head: this worker keeps its weights and its prefix cache for the next head")
    while True:
        message = link.receive(None)
        if isinstance(message, Adopt):
            return message
        if isinstance(message, Stop):
            return None


def join(config: WorkerConfig, engine: Engine, kv: KVPorts) -> None:
    """Join the head that sent this configuration. Raises TransferError if KV cannot be exchanged as
    configured."""
    kv.join(config)
    engine.attach(kv.transport, kv.cache, config.worker)
