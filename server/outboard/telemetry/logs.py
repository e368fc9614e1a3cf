"""Log lines of the front and of the workers: text for people, or one JSON object a line for programs.

What a line is about travels as `extra={"device": …, "model": …}` and becomes members of the object; the ids of the request that is being
answered are added by themselves. Nothing here is slow to import: a worker needs it before it knows its device.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

import msgspec

from outboard.telemetry import tracing

TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
LEVELS = ("debug", "info", "warning", "error")
#: What every LogRecord has; the rest came as `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}  # the last is uvicorn's
_encode = msgspec.json.Encoder(enc_hook=str).encode  # what has no JSON form is said as text: a line is never lost


class JsonFormatter(logging.Formatter):
    """`{"time": ISO 8601 in UTC, "level", "logger", "process": "front" | "worker", "pid", "message"}` and what else is known: `device`,
    `model`, `request_id`, `trace_id`, `span_id`, `exception` (the traceback), and whatever the line is about."""

    def __init__(self, **always: Any):
        super().__init__()
        self._always = {"process": "front", "pid": os.getpid(), **always}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._always,
            "message": record.getMessage(),
        }
        if (trace := tracing.current()) is not None:
            line |= trace.fields()
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD and value is not None}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        try:
            return _encode(line).decode()
        except (ValueError, TypeError, RecursionError, UnicodeError):  # a lone surrogate, say
            return _encode({key: ascii(value) for key, value in line.items()}).decode()


def configure(level: str, form: str) -> None:
    """Every line of this process goes to standard error, `form`: "text" or "json"; warnings of Python, and what ends the process, too."""
    _install(level, JsonFormatter() if form == "json" else logging.Formatter(TEXT), everything=form == "json")


def worker_arguments(level: str, form: str) -> list[str]:
    """What tells a worker's process how to log."""
    return ["--log-level", level.lower(), "--log-format", form]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `worker_arguments`."""
    parser.add_argument("--log-level", default="info", choices=LEVELS)
    parser.add_argument("--log-format", default="text", choices=("text", "json"))


def configure_worker(arguments: argparse.Namespace) -> None:
    """As `configure`, for a process that `add_arguments` and `--device` describe."""
    text = logging.Formatter(f"worker {os.getpid()}: %(levelname)s %(name)s: %(message)s")
    about = {"device": arguments.device} if arguments.device else {}
    json = arguments.log_format == "json"
    _install(arguments.log_level, JsonFormatter(process="worker", **about) if json else text, everything=json)


def _install(level: str, formatter: logging.Formatter, *, everything: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if everything:
        logging.captureWarnings(True)
        sys.excepthook = _ended


def _ended(kind: type[BaseException], e: BaseException, traceback: TracebackType | None) -> None:
    logging.getLogger("outboard").critical("ended by %s", kind.__name__, exc_info=(kind, e, traceback))
