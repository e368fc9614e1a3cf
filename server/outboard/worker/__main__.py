"""`python -m outboard.worker --fd N`: started by the front with one end of a SOCK_SEQPACKET socket pair as inherited descriptor N.

Only the protocol is imported before `Start` has come: numpy, torch and ONNX Runtime read the environment while they are imported.
Exit codes: 0 stopped or the front left, 2 started wrongly, 3 the device could not be opened (standard error says why).
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys

import msgspec

from outboard.devices import protocol
from outboard.telemetry import logs
from outboard.worker.environment import die_with_parent, prepare_environment

EXIT_WRONG_START = 2
EXIT_NO_DEVICE = 3


def _receive_start(channel: socket.socket) -> tuple[protocol.Start, list[int]]:
    datagram, fds, _, _ = socket.recv_fds(channel, protocol.MAX_DATAGRAM, 2)
    if not datagram:
        sys.exit(0)
    try:
        start = protocol.decode_to_worker(datagram)
    except msgspec.MsgspecError as e:
        sys.exit(_wrong(f"the first datagram is no message: {e}"))
    if not isinstance(start, protocol.Start) or len(fds) != 2:
        sys.exit(_wrong(f"expected Start with two descriptors, got {type(start).__name__} with {len(fds)}"))
    if start.protocol != protocol.VERSION:
        sys.exit(_wrong(f"the front speaks protocol {start.protocol}, this worker {protocol.VERSION}"))
    return start, fds


def _wrong(why: str) -> int:
    logging.error("started wrongly: %s", why)
    return EXIT_WRONG_START


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m outboard.worker", description="One device's worker; the server starts it.")
    parser.add_argument("--fd", type=int, required=True, help="inherited descriptor of the SOCK_SEQPACKET channel")
    parser.add_argument("--device", help="only says in `ps` whose worker this is; the device itself comes with the first message")
    logs.add_arguments(parser)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; the front decides what it means
    die_with_parent()
    logs.configure_worker(arguments)
    channel = socket.socket(fileno=arguments.fd)
    start, fds = _receive_start(channel)
    prepare_environment(start.device, start.threads, start.cache_dir)
    from outboard.worker.main import run

    try:
        run(channel, start, fds)
    except Exception:
        logging.exception("device %s cannot be served", start.device)
        code = EXIT_NO_DEVICE
    else:
        code = 0
    logging.shutdown()
    os._exit(code)  # no tear-down: runtimes hang in destructors when their device is gone


if __name__ == "__main__":
    main()
