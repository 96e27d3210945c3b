"""Entry of a worker process: read the configuration, keep an eye on the parent, run the role."""

import faulthandler
import os
import signal
import sys
import threading
from typing import BinaryIO

import msgspec

from streamserve.protocol.config import WorkerConfig
from streamserve.protocol.logs import configure_logging

MAX_CONFIG_BYTES = 1 << 20


def read_config(stream: BinaryIO) -> WorkerConfig:
    """The configuration: four bytes of length (little endian), then msgpack. Raises ValueError if broken."""
    size = int.from_bytes(stream.read(4), "little")
    if not 0 < size <= MAX_CONFIG_BYTES:
        raise ValueError(f"standard input must hold a worker configuration, found a length of {size}")
    return msgspec.msgpack.decode(stream.read(size), type=WorkerConfig)


def leave_with_parent(descriptor: int) -> None:
    """End this process when the parent's end of the pipe closes, however the parent ended."""
    while os.read(descriptor, 4096):  # not a buffered read, whose lock would be in the way of an orderly exit
        pass
    os._exit(1)


def main() -> int:
    """Run the worker that standard input describes; returns the exit status."""
    config = read_config(sys.stdin.buffer)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logging(config.log_level, config.log_format, config.worker)
    threading.Thread(target=leave_with_parent, args=(sys.stdin.fileno(),), daemon=True).start()
    faulthandler.enable()  # a fault in native code leaves a traceback in the log
    if config.role == "draft":  # imports torch, which takes a while
        from streamserve.workers.draft import run as run_draft

        return run_draft(config)
    from streamserve.workers.journal import open_journal

    journal = open_journal(config.journal)
    journal.keep_beating()
    from streamserve.workers.worker import run  # imports torch, which takes a while

    return run(config, journal)


if __name__ == "__main__":
    sys.exit(main())
