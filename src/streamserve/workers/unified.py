"""The unified worker: one engine that does prefill and decode, between a socket and a device."""

import logging
import time

import msgspec
import zmq

from streamserve.engine.engine import Engine
from streamserve.execution.load import load
from streamserve.protocol.config import WorkerConfig
from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Event,
    Events,
    Failed,
    FromWorker,
    Ready,
    Stop,
    decode_to_worker,
    encode,
)

logger = logging.getLogger(__name__)

REPORT_SECONDS = 0.5
CHECKPOINT_EXIT_STATUS = 2


def run(config: WorkerConfig) -> int:
    """Load the model and serve until told to stop; returns the exit status."""
    with zmq.Context() as context, _connect(context, config) as socket:
        started = time.monotonic()
        try:
            loaded = load(config.model)
        except CheckpointError as error:
            _send(socket, Failed(str(error), CHECKPOINT_EXIT_STATUS))
            return CHECKPOINT_EXIT_STATUS
        engine = Engine(loaded.engine_config, loaded.model_info, loaded.executor, time.monotonic)
        _send(
            socket,
            Ready(
                version=PROTOCOL_VERSION,
                model=loaded.model_info,
                num_blocks=loaded.engine_config.num_blocks,
                block_size=loaded.engine_config.block_size,
                kv_cache_bytes=loaded.kv_cache_bytes,
                load_seconds=time.monotonic() - started,
            ),
        )
        _send(socket, engine.report())
        _serve(engine, socket)
        loaded.executor.close()
    return 0


def _connect(context: zmq.Context[zmq.Socket[bytes]], config: WorkerConfig) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, config.worker.encode())
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(config.endpoint)
    return socket


def _serve(engine: Engine, socket: zmq.Socket[bytes]) -> None:
    """Take messages between steps, step while there is work, report twice a second."""
    reported = time.monotonic()
    while True:
        events: list[Event] = []
        wait = 0 if engine.has_work else int(REPORT_SECONDS * 1000)
        while socket.poll(wait):
            try:
                message = decode_to_worker(socket.recv())
            except msgspec.DecodeError:
                logger.exception("dropped a message that cannot be read")
                continue
            if isinstance(message, Stop):
                return
            events += engine.handle(message)
            wait = 0
        if engine.has_work:
            events += engine.step()
        if events:
            _send(socket, Events(events))
        now = time.monotonic()
        if now - reported >= REPORT_SECONDS or not engine.has_work:
            reported = now
            _send(socket, engine.report())


def _send(socket: zmq.Socket[bytes], message: FromWorker) -> None:
    socket.send(encode(message))
