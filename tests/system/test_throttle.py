"""Of log lines that clients cause, one a second of each kind is logged, and the others are counted."""

import logging

from streamserve.system.throttle import Throttle, throttled


def line(message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("x", logging.WARNING, "", 0, message, arguments, None)


def test_one_a_second_of_each_kind() -> None:
    now = [0.0]
    throttle = Throttle(lambda: now[0])
    logged: list[str] = []
    for step in range(30):
        now[0] = 0.1 * step
        for record in (line("bad %d", step), line("worse")):
            if throttle.filter(record):
                logged.append(record.getMessage())
    assert logged == [
        "bad 0",
        "worse",
        "bad 10 (9 more like this left out)",
        "worse (9 more like this left out)",
        "bad 20 (9 more like this left out)",
        "worse (9 more like this left out)",
    ]


def test_some_arguments_are_kinds_apart_and_all_others_one_kind() -> None:
    now = [0.0]
    throttle = Throttle(lambda: now[0], seconds=10.0, apart=2)
    logged: list[str] = []
    for step in range(250):
        now[0] = 0.1 * step
        for key in ("a", "b", "c", "d"):
            record = line("bad key %s", key)
            if throttle.filter(record):
                logged.append(record.getMessage())
    assert logged[:3] == ["bad key a", "bad key b", "bad key c"]
    assert logged[3:6] == [
        "bad key a (99 more like this left out)",
        "bad key b (99 more like this left out)",
        "bad key c (199 more like this left out)",
    ]
    assert len(logged) == 9


def test_only_within_the_block() -> None:
    log = logging.getLogger("a.log.of.this.test")
    with throttled(log.name):
        assert len(log.filters) == 1
    assert not log.filters
