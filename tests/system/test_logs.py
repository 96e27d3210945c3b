"""Log lines contain the time, the source, and the request."""

import json
import logging
import subprocess
import sys

from streamserve.system.logs import REQUEST_ID, JsonFormatter, TextFormatter


def record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    made = logging.getLogger("streamserve.test").makeRecord(
        "streamserve.test", logging.WARNING, __file__, 1, message, arguments, None, extra=extra
    )
    made.created, made.msecs = 1_700_000_000.25, 250.0
    return made


def test_a_line_of_json() -> None:
    line = json.loads(JsonFormatter().format(record("%d of %s", 3, 'a "quoted"\nline', status=200)))
    assert line == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "warning",
        "logger": "streamserve.test",
        "message": '3 of a "quoted"\nline',
        "status": 200,
    }


def test_the_request_is_named_while_it_is_worked_on() -> None:
    token = REQUEST_ID.set("req-1")
    try:
        assert json.loads(JsonFormatter().format(record("hello")))["request_id"] == "req-1"
        assert TextFormatter().format(record("hello")).endswith("WARNING streamserve.test [req-1]: hello")
    finally:
        REQUEST_ID.reset(token)
    assert "request_id" not in json.loads(JsonFormatter().format(record("hello")))


def test_a_traceback_is_part_of_its_line() -> None:
    made = record("it failed")
    try:
        raise KeyError("lost")
    except KeyError:
        made.exc_info = sys.exc_info()
    text = JsonFormatter().format(made)
    assert "\n" not in text
    assert "KeyError: 'lost'" in json.loads(text)["error"]


def test_a_worker_is_called_by_its_name() -> None:
    assert "WARNING unified-0/1: hello" in TextFormatter("unified-0/1").format(record("hello"))
    assert json.loads(JsonFormatter("unified-0/1").format(record("hello")))["logger"] == "unified-0/1"


def test_levels_and_the_access_log() -> None:
    """Levels and the access log follow the settings. The test uses a separate process, as logging is
    configured once."""
    script = (
        "import logging; from streamserve.system.logs import configure_logging\n"
        "configure_logging({level!r}, 'text', access_log={access})\n"
        "logging.getLogger('streamserve').info('a message')\n"
        "logging.getLogger('streamserve.access').info('a request')\n"
    )

    def logged(level: str, access: bool) -> list[bool]:
        command = [sys.executable, "-c", script.format(level=level, access=access)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        return ["a message" in lines, "a request" in lines]

    assert logged("info", access=False) == [True, False]
    assert logged("info", access=True) == [True, True]
    assert logged("warning", access=False) == [False, False]
