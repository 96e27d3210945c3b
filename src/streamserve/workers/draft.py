"""The draft role: drafting/service.py between a socket and a draft model.

receiver and sender   one thread, which owns the sockets      ROUTER ◀──▶ targets, DEALER ◀──▶ parent
drafting              the main thread: batch after batch, as long as anything waits

They share the service under one lock, which nobody holds while the model computes.
"""

import logging
import os
import secrets
import threading
import time
from collections import deque
from pathlib import Path

import msgspec
import zmq

from streamserve.drafting.admission import Limits
from streamserve.drafting.explain import report
from streamserve.drafting.parts import Identity, Out, ServiceConfig
from streamserve.drafting.service import Service
from streamserve.engine.plan import DraftRequest
from streamserve.execution.cores import claim
from streamserve.execution.drafters.fingerprints import fingerprints
from streamserve.execution.drafters.model import ModelDrafter
from streamserve.execution.load import Loaded, drafter_on, load
from streamserve.protocol.config import DraftingConfig, WorkerConfig
from streamserve.protocol.drafting import DraftReady, decode_to_service, encode, encode_report
from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.messages import Failed, Stop, decode_to_worker
from streamserve.workers.gate import Failure, Gate
from streamserve.workers.placing import settle

logger = logging.getLogger(__name__)

REPORT_SECONDS = 0.5
BAD_SETTING = 2


def run(config: WorkerConfig) -> int:
    """Load the model and draft until told to stop; returns the exit status."""
    assert config.drafting is not None
    with zmq.Context() as context, _parent(context, config) as parent:
        started = time.monotonic()
        cores = claim(config.model.threads or len(os.sched_getaffinity(0)))
        try:
            loaded = load(config.model, None, cores.numbers if cores else ())
            service = make_service(config.drafting, loaded, Path(config.model.path))
            gate = Gate(context, config.drafting)
        except (CheckpointError, ValueError, OSError, zmq.ZMQError) as error:
            parent.send(encode_report(Failed(str(error), BAD_SETTING)))
            return BAD_SETTING
        info = loaded.model_info
        parent.send(encode_report(DraftReady(
            address=gate.address, model=info, kv_cache_bytes=loaded.kv_cache_bytes,
            num_blocks=loaded.engine_config.num_blocks, load_seconds=time.monotonic() - started,
        )))  # fmt: skip
        drafter = drafter_on(loaded)
        station = Station(service, gate, parent, context)
        station.start()  # before this thread goes to its core: others stay where they are
        try:
            if cores:
                settle(cores, loaded)
            station.draft(drafter)
        finally:
            station.stop()
            gate.close()
            loaded.executor.close()
    return 0


def make_service(config: DraftingConfig, loaded: Loaded, folder: Path) -> Service:
    """The service for a loaded model. Raises CheckpointError if its tokenizer cannot be read."""
    info = loaded.model_info
    tokenizer, vocabulary = fingerprints(folder, info.vocab_size)
    identity = Identity(
        model=info.fingerprint,
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
    )
    limits = Limits(
        max_sessions=config.max_targets,
        rate=config.rate,
        burst=2 * config.rate,
        by_model=config.admission,
    )
    shares = {name: float(weight) for name, _, weight in (one.rpartition("=") for one in config.share)}
    service = ServiceConfig(
        num_blocks=loaded.engine_config.num_blocks,
        block_size=loaded.engine_config.block_size,
        max_batch=config.max_batch,
        max_batch_seconds=config.max_batch_ms / 1000,
        lease=config.lease,
        shares=shares,
        limits=limits,
        keep_warm=config.keep_warm,
    )
    return Service(identity, service, lambda: secrets.token_bytes(16))


class Station:
    """The threads around a service. `gate` is where targets come in, `parent` who started this process."""

    def __init__(
        self, service: Service, gate: Gate, parent: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        self._service = service
        self._gate = gate
        self._parent = parent
        self._changed = threading.Condition()
        self._stopping = False
        self._failed: BaseException | None = None
        self._outs: deque[Out] = deque()
        self._bell, self._ring = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        for socket, connect in ((self._bell, False), (self._ring, True)):
            socket.setsockopt(zmq.LINGER, 0)
            (socket.connect if connect else socket.bind)("inproc://out-queue")
        self._thread = threading.Thread(target=self._receive_and_send, name="receiver")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the receiver's thread."""
        self._stopping = True
        self._ring.send(b"")
        self._thread.join()
        self._bell.close()
        self._ring.close()

    def draft(self, drafter: ModelDrafter) -> None:
        """Draft whatever waits, one batch after another, until told to stop."""
        service, changed = self._service, self._changed
        while not self._stopping:
            with changed:
                batch = service.batch(now := time.monotonic())
                spare = service.warm_up(now) if batch is None else None
                if batch is None:
                    drafter.release(service.take_released())
                    if spare is None:
                        changed.wait(service.pause(now))
            if spare is not None:
                self._warm_up(drafter, spare)
            if batch is None:
                continue
            drafter.release(batch.released)
            try:
                drafter.begin(batch.requests)
                trees = drafter.collect(0.0)
            except Exception:  # whoever caused it, the other targets are to be drafted for
                logger.exception("a batch for %d sequences failed", len(batch.requests))
                with changed:
                    self._outs.extend(service.failed(batch, time.monotonic()))
                continue
            with changed:
                self._outs.extend(service.drafted(batch, trees, time.monotonic()))
            self._ring.send(b"")
        if self._failed:
            raise self._failed

    def _warm_up(self, drafter: ModelDrafter, spare: DraftRequest) -> None:
        drafter.begin([spare])
        drafter.collect(0.0)
        with self._changed:
            self._service.warmed(spare, time.monotonic())

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
        for socket in (self._gate.socket, self._gate.monitor, self._bell, self._parent):
            poller.register(socket, zmq.POLLIN)
        reported = 0.0
        while not self._stopping:
            ready = dict(poller.poll(int(REPORT_SECONDS * 1000)))
            if self._bell in ready:
                while self._bell.poll(0):
                    self._bell.recv()
                while self._outs:
                    self._send(self._outs.popleft())
            if self._gate.socket in ready:
                self._receive()
            if self._gate.monitor in ready:
                self._hear_of_connections()
            if self._parent in ready and isinstance(decode_to_worker(self._parent.recv()), Stop):
                return
            now = time.monotonic()
            if now - reported >= REPORT_SECONDS:
                reported = now
                with self._changed:
                    self._service.tick(now)
                    news = report(self._service, now)
                self._parent.send(encode_report(news))

    def _receive(self) -> None:
        """Everything that has come by now."""
        outs: list[Out] = []
        for heard in self._gate.receive():
            with self._changed:
                outs += self._take(heard.peer, heard.data, heard.key, heard.name)
        with self._changed:
            self._changed.notify()
        for out in outs:
            self._send(out)

    def _take(self, peer: bytes, data: bytes | None, key: str, name: str) -> list[Out]:
        service, now = self._service, time.monotonic()
        limit = service.config.limits.max_bytes
        if data is None:
            return service.refuse(peer, "unreadable", "a message has one part", now)
        if len(data) > limit:
            return service.refuse(peer, "size", f"{len(data)} bytes; {limit} are read", now)
        try:
            message = decode_to_service(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return service.refuse(peer, "unreadable", f"{type(error).__name__}: {error}"[:200], now)
        return service.heard(peer, message, now, key, name)

    def _hear_of_connections(self) -> None:
        """Some ended before they were any: a wrong key, or something that speaks no ZeroMQ."""
        for ended in self._gate.ended():
            with self._changed:
                if isinstance(ended, Failure):
                    self._service.refuse(b"", "key", ended.text, time.monotonic())
                else:
                    self._service.disconnected(ended.peer, time.monotonic())

    def _send(self, out: Out) -> None:
        self._gate.send(out.peer, encode(out.message))


def _parent(context: zmq.Context[zmq.Socket[bytes]], config: WorkerConfig) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(config.endpoint)
    return socket
