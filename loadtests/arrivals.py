"""Open loop: requests leave at fixed times, whether or not the ones before them have been answered.

A closed loop waits with a slow server, and so asks least when it is slowest; averages then hide what people who don't wait would see.
Latency counts from the moment at which a request was due.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import gevent
from gevent.pool import Pool
from locust import User

#: Requests of one user that may be without an answer; one more counts as a failure.
MOST = 1000


def keep_sending(user: User, send: Callable[[float], object]) -> None:
    """Call `send(due)` in a greenlet of its own, at this user's share of `--arrivals`, for ever. `due` is time.perf_counter()."""
    environment = user.environment
    runner = environment.runner
    users = max(1, getattr(runner, "target_user_count", 1) or 1)
    gap = users / environment.parsed_options.arrivals
    pool = Pool(MOST)
    due = time.perf_counter()
    try:
        while True:
            due += gap
            gevent.sleep(max(0.0, due - time.perf_counter()))
            if pool.full():
                environment.events.request.fire(
                    request_type="POST",
                    name="not sent",
                    response_time=0,
                    response_length=0,
                    exception=RuntimeError(f"{MOST} requests have no answer yet"),
                    context={},
                    response=None,
                )
            else:
                pool.spawn(send, due)
    finally:
        pool.kill(block=False)
