"""The threads of a draft service: one receives and sends, the main thread drafts.

Both continue after errors: an exception in processing a message or a batch is logged and affects only that
message or batch. A thread whose iterations all fail ends the process with a non-zero status, so that its
parent restarts it.
"""

import contextlib
import logging
import threading
import time
from collections import deque

import msgspec
import zmq

from streamserve.contracts.plan import Drafter, DraftRequest
from streamserve.draft_service.server.explain import report
from streamserve.draft_service.server.service import Service
from streamserve.draft_service.server.types import DraftBatch, TargetReply
from streamserve.protocol.drafting import Reason, decode_to_service, encode, printable
from streamserve.protocol.messages import Stop, decode_to_worker
from streamserve.workers.draft_listener import DraftListener, Failure, ReceivedMessage

logger = logging.getLogger(__name__)

REPORT_SECONDS = 0.5
LOG_SECONDS = 1.0
"""Minimum seconds between two tracebacks."""
MAX_CONSECUTIVE_FAILURES = 20
"""Consecutive failed iterations of a thread after which the process ends."""
PAUSE_SECONDS = 0.05
"""Pause after a failed iteration."""


class Faults:
    """Logs the exceptions of a thread's iterations, at most one traceback a second, and ends a thread that
    only fails."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._logged = float("-inf")
        self._consecutive = 0
        self.count = 0

    def succeeded(self) -> None:
        """Record a successful iteration."""
        self._consecutive = 0

    def failed(self, error: Exception) -> None:
        """Record an exception; called in an except block. Raises `error` after
        `MAX_CONSECUTIVE_FAILURES` consecutive ones."""
        self.count += 1
        self._consecutive += 1
        now = time.monotonic()
        if now - self._logged >= LOG_SECONDS:
            self._logged = now
            logger.exception("%s failed, %d times so far", self._what, self.count)
        if self._consecutive >= MAX_CONSECUTIVE_FAILURES:
            raise error


class ServiceRuntime:
    """The threads of a service. `listener` is the listener for targets, `parent` the socket to the parent
    process."""

    def __init__(
        self,
        service: Service,
        listener: DraftListener,
        parent: zmq.Socket[bytes],
        context: zmq.Context[zmq.Socket[bytes]],
    ) -> None:
        self._service = service
        self._listener = listener
        self._parent = parent
        self._changed = threading.Condition()
        self._stopping = False
        self._failed: BaseException | None = None
        self._outs: deque[TargetReply] = deque()
        self._reported = 0.0
        self._batch_faults = Faults("drafting a batch")
        self._message_faults = Faults("processing a message")
        self._wake_receiver, self._wake_sender = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        for socket, connect in ((self._wake_receiver, False), (self._wake_sender, True)):
            socket.setsockopt(zmq.LINGER, 0)
            (socket.connect if connect else socket.bind)("inproc://out-queue")
        self._thread = threading.Thread(target=self._receive_and_send, name="receiver")

    def start(self) -> None:
        """Start the receiver thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the receiver thread."""
        self._stopping = True
        self._wake_sender.send(b"")
        self._thread.join()
        self._wake_receiver.close()
        self._wake_sender.close()

    def draft(self, drafter: Drafter) -> None:
        """Draft one batch after another until stopped."""
        faults = Faults("an iteration of the drafting thread")
        while not self._stopping:
            try:
                self._run_once(drafter)
                faults.succeeded()
            except Exception as error:
                faults.failed(error)
                time.sleep(PAUSE_SECONDS)
        if self._failed:
            raise self._failed

    def _run_once(self, drafter: Drafter) -> None:
        """Draft one batch, or wait until there is one."""
        loop, changed = self._service.loop, self._changed
        with changed:
            batch = loop.batch(now := time.monotonic())
            released = loop.take_released() if batch is None else []
            dummy_pass = loop.warm_up(now) if batch is None else None
            if batch is None and dummy_pass is None and not released:
                changed.wait(loop.pause(now))
        if batch is not None:
            self._draft_batch(drafter, batch)
            return
        drafter.release(released)
        if dummy_pass is not None:
            self._warm_up(drafter, dummy_pass)

    def _draft_batch(self, drafter: Drafter, batch: DraftBatch) -> None:
        loop = self._service.loop
        try:
            drafter.release(batch.released)
            drafter.begin(batch.requests)
            trees = drafter.collect(0.0)
        except Exception as error:  # whichever target caused it, drafting for the others continues
            self._batch_faults.succeeded()
            self._batch_faults.failed(error)
            with self._changed:
                outs = loop.failed(batch, time.monotonic())
        else:
            with self._changed:
                outs = loop.drafted(batch, trees, time.monotonic())
        self._outs.extend(outs)
        self._wake_sender.send(b"")

    def _warm_up(self, drafter: Drafter, dummy_pass: DraftRequest) -> None:
        try:
            drafter.begin([dummy_pass])
            drafter.collect(0.0)
        finally:
            with self._changed:
                self._service.loop.warmed(dummy_pass, time.monotonic())

    def _receive_and_send(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            self._failed = error
            logger.exception("receiving failed")
        finally:
            with self._changed:
                self._stopping = True
                self._changed.notify()

    def _loop(self) -> None:
        poller = zmq.Poller()
        for pollable in (*self._listener.pollable, self._wake_receiver, self._parent):
            poller.register(pollable, zmq.POLLIN)
        faults = Faults("an iteration of the receiver thread")
        while not self._stopping:
            try:
                wait = 0.0 if self._listener.pending else REPORT_SECONDS
                self._handle_ready(dict(poller.poll(int(wait * 1000))))
                faults.succeeded()
            except zmq.ContextTerminated:
                return
            except Exception as error:
                faults.failed(error)
                time.sleep(PAUSE_SECONDS)

    def _handle_ready(self, ready: dict[object, int]) -> None:
        """Send queued messages, process received ones, and report when it is time."""
        if self._wake_receiver in ready:
            while self._wake_receiver.poll(0):
                self._wake_receiver.recv()
        while self._outs:
            self._send(self._outs.popleft())
        self._receive()
        self._receive_ended()
        if self._parent in ready and isinstance(decode_to_worker(self._parent.recv()), Stop):
            self._stopping = True
        now = time.monotonic()
        if now - self._reported >= REPORT_SECONDS:
            self._reported = now
            with self._changed:
                self._service.tick(now)
                state = report(self._service, now)
            with contextlib.suppress(zmq.Again):  # the parent's queue is full: skip this report
                self._parent.send(encode(state), zmq.NOBLOCK)

    def _receive(self) -> None:
        """Process a limited number of received messages."""
        outs: list[TargetReply] = []
        heard = False
        for received in self._listener.receive():
            try:
                outs += self._answer(received)
                self._message_faults.succeeded()
            except Exception as error:  # only this message and its sender are affected
                self._message_faults.succeeded()
                self._message_faults.failed(error)
                with self._changed:
                    outs += self._refuse(received, "internal", "the service failed to process this message")
            heard = True
        if not heard:
            return
        with self._changed:
            self._changed.notify()
        for out in outs:
            self._send(out)

    def _answer(self, received: ReceivedMessage) -> list[TargetReply]:
        """Charge for a message, then decode it, then answer it."""
        service = self._service
        limit = service.config.limits.max_bytes
        with self._changed:
            now = time.monotonic()
            refused = service.arrived(received.peer, received.size, now, received.key)
            if refused is not None:
                return refused
            if received.fault:
                return self._refuse(received, "unreadable", received.fault)
            if received.size > limit:
                return self._refuse(
                    received, "size", f"the message has {received.size} bytes; the limit is {limit}"
                )
        try:
            assert received.data is not None
            message = decode_to_service(received.data)
        except msgspec.DecodeError as error:
            with self._changed:
                return self._refuse(received, "unreadable", f"{type(error).__name__}: {error}"[:200])
        with self._changed:
            return service.heard(received.peer, message, time.monotonic(), received.key, received.name)

    def _refuse(self, received: ReceivedMessage, reason: Reason, text: str) -> list[TargetReply]:
        return self._service.refuse(received.peer, reason, printable(text, 200), time.monotonic())

    def _receive_ended(self) -> None:
        """Process ended connections, also those closed for a wrong key or a broken protocol."""
        for ended in self._listener.ended():
            with self._changed:
                if isinstance(ended, Failure):
                    self._service.refuse(b"", ended.reason, ended.text, time.monotonic())
                else:
                    self._service.table.disconnected(ended.peer, time.monotonic())

    def _send(self, out: TargetReply) -> None:
        self._listener.send(out.peer, encode(out.message))
