"""Log lines as text or as JSON, each with the id of its request."""

import json
import logging
import time
from contextvars import ContextVar

from streamserve.protocol.config import LogFormat

ACCESS = "streamserve.access"
"""The logger of finished HTTP requests."""

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The HTTP request of the current task; empty without one."""

_PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "request_id"}


def configure_logging(level: str, form: LogFormat, source: str = "", access_log: bool = False) -> None:
    """Log to standard error from `level` on. `source` names the process, unless it is the server's main
    process."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(source) if form == "json" else TextFormatter(source))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    access = logging.getLogger(ACCESS)
    access.setLevel(logging.INFO if access_log else logging.CRITICAL)


class TextFormatter(logging.Formatter):
    """`time level name [request]: message`, in one line unless there is a traceback."""

    def __init__(self, source: str = "") -> None:
        super().__init__("%(asctime)s %(levelname)s %(source)s%(request_id)s: %(message)s")
        self._source = source

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        request = REQUEST_ID.get()
        record.source = self._source or record.name
        record.request_id = f" [{request}]" if request else ""
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (RFC 3339, UTC), level, logger, message, request_id, error, and the
    record's `extra`."""

    def __init__(self, source: str = "") -> None:
        super().__init__()
        self._source = source

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON line of a record."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": self._source or record.name,
            "message": record.getMessage(),
        }
        if request := REQUEST_ID.get():
            line["request_id"] = request
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        line |= {name: value for name, value in record.__dict__.items() if name not in _PLAIN}
        return json.dumps(line, default=str)
