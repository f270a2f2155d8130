"""Backoff, pacing and log output."""

import io
import json
import logging
import random
from collections.abc import Iterator

import pytest

from rulecast.backoff import Backoff
from rulecast.log import RepeatFilter, configure
from rulecast.runner import Pacer


def test_backoff_grows_to_its_limit_with_jitter_and_starts_anew() -> None:
    backoff = Backoff(first=1, limit=8, draw=random.Random(1))
    delays = [backoff.next() for _ in range(6)]
    for delay, ceiling in zip(delays, (1, 2, 4, 8, 8, 8), strict=True):
        assert ceiling / 2 <= delay <= ceiling
    assert len(set(delays[3:])) == 3
    backoff.reset()
    assert backoff.next() <= 1


def pacer() -> Pacer:
    return Pacer(min_interval=1.0, backoff=Backoff(first=4, limit=60))


def test_a_request_after_quiet_is_due_at_once_and_the_next_after_the_interval() -> None:
    p = pacer()
    assert p.due() is None
    p.request()
    assert (p.due() or 0) <= 0
    p.begin()
    p.request()
    p.succeeded(10.0)
    assert p.due() == 11.0


def test_requests_during_a_run_become_one_more() -> None:
    p = pacer()
    p.request()
    p.begin()
    p.request()
    p.request()
    p.succeeded(0.0)
    p.begin()
    p.succeeded(1.0)
    assert p.due() is None


def test_a_failed_run_is_due_again_after_the_backoff() -> None:
    p = pacer()
    p.request()
    p.begin()
    p.failed(10.0)
    assert p.failing
    due = p.due()
    assert due is not None
    assert 12.0 <= due <= 14.0
    p.begin()
    p.succeeded(20.0)
    assert not p.failing


@pytest.fixture
def logs() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_logs_are_an_object_a_line(logs: io.StringIO) -> None:
    configure(output="json", level="info", stream=logs)
    logging.getLogger("x.y").warning("port %d\nof %s", 7, "web", extra={"node": "n1"})
    logging.getLogger("x.y").debug("not this one")
    (line,) = logs.getvalue().splitlines()
    event = json.loads(line)
    assert event["event"] == "port 7\nof web"
    assert event["level"] == "warning"
    assert event["node"] == "n1"
    assert event["logger"] == "x.y"
    assert "timestamp" in event


def test_text_logs_carry_the_message_and_tracebacks(logs: io.StringIO) -> None:
    configure(output="text", level="debug", stream=logs)
    try:
        raise ZeroDivisionError("bug")
    except ZeroDivisionError:
        logging.getLogger("x").exception("went wrong")
    assert "went wrong" in logs.getvalue()
    assert "ZeroDivisionError: bug" in logs.getvalue()


class Repeating:
    def __init__(self) -> None:
        self.time = 0.0
        self.filter = RepeatFilter(burst=3, interval=60, clock=lambda: self.time)

    def log(self, text: str = "no memory", level: int = logging.ERROR) -> int | None:
        """None when it is left out, else how many equal ones were left out before it."""
        record = logging.LogRecord("x", level, "f", 1, text, (), None)
        return getattr(record, "repeated", 0) if self.filter.filter(record) else None


def test_a_repeated_error_is_let_through_a_few_times_and_then_once_an_interval() -> None:
    r = Repeating()
    passed = []
    for second in range(180):
        r.time = float(second)
        if (left_out := r.log()) is not None:
            passed.append((second, left_out))
    assert passed == [(0, 0), (1, 0), (2, 0), (60, 57), (120, 59)]


def test_other_errors_are_not_held_back_by_it_and_information_never_is() -> None:
    r = Repeating()
    for _ in range(10):
        r.log()
    assert r.log() is None
    assert r.log("another") == 0
    assert [r.log("fine", logging.INFO) for _ in range(10)] == [0] * 10


def test_an_error_that_stayed_away_starts_anew() -> None:
    r = Repeating()
    assert [r.log() for _ in range(3)] == [0, 0, 0]
    r.time = 61.0
    assert [r.log() for _ in range(4)] == [0, 0, 0, None]


def test_the_filters_memory_is_bounded() -> None:
    r = Repeating()
    for number in range(5000):
        r.log(str(number))
    assert len(r.filter._seen) <= 1024
