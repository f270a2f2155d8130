"""Log output of every command: one line an event, text or JSON, on standard error.

Modules log through the standard library (`logging.getLogger(__name__)`), as their dependencies do; structlog
renders. An event that repeats word for word is let through a few times and then at intervals, with the number
left out, so that an error which recurs each second neither fills a disk nor hides the others.
"""

import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from typing import TextIO

import msgspec
import structlog

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_REMEMBERED = 1024
"""Distinct repeated messages that are counted; the one silent for longest is forgotten first."""


class RepeatFilter(logging.Filter):
    """Lets a warning or error through `burst` times, then once in `interval` seconds."""

    def __init__(
        self, *, burst: int = 3, interval: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._burst = burst
        self._interval = interval
        self._clock = clock
        self._seen: OrderedDict[tuple[str, int, str], tuple[float, int, int]] = OrderedDict()
        """(start of the interval, let through in it, left out since the last one let through)"""

    def filter(self, record: logging.LogRecord) -> bool:
        """Decide one record, and tell in it how many equal ones were left out before it."""
        if record.levelno < logging.WARNING:
            return True
        key = (record.name, record.levelno, record.getMessage())
        now = self._clock()
        start, passed, left_out = self._seen.pop(key, (now, 0, 0))
        if now - start >= self._interval:
            # Who was silenced gets one line an interval; who was quiet for one starts anew.
            start, passed = now, self._burst - 1 if left_out else 0
        if passed >= self._burst:
            self._seen[key] = (start, passed, left_out + 1)
            return False
        if left_out:
            record.repeated = left_out
        self._seen[key] = (start, passed + 1, 0)
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return True


def configure(*, output: str = "text", level: str = "info", stream: TextIO | None = None) -> None:
    """Send all logging to `stream` (standard error): `output` is text or json, `level` a lower-case name."""
    stream = stream or sys.stderr
    renderer: Callable[..., str]
    if output == "json":
        renderer = _json
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=stream.isatty(), pad_event_to=0)
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    handler.addFilter(RepeatFilter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(_LEVELS[level])


def _json(_logger: object, _method: str, event: MutableMapping[str, object]) -> str:
    return _encode(event)


def _encode(event: Mapping[str, object]) -> str:
    return msgspec.json.encode(event, enc_hook=str).decode()
