"""Users that post requests: each as fast as its answers come (closed loop), or all together at fixed times (open loop, `--arrivals`).

A closed loop waits with a slow server, and so asks least when it is slowest; averages then hide what people who don't wait would see.
In open loop latency counts from the moment at which a request was due, whether or not the ones before it have been answered.
"""

from __future__ import annotations

import time

import gevent
from gevent.pool import Pool
from locust import FastHttpUser, task
from locust.contrib.fasthttp import ResponseContextManager

#: Requests of one user that may be without an answer; one more counts as a failure.
MOST = 1000


class Caller(FastHttpUser):
    """A user whose `post` sends one request."""

    abstract = True
    connection_timeout = 30.0
    network_timeout = 60.0
    concurrency = MOST  # connections that it may have; a closed loop needs one

    def post(self) -> ResponseContextManager:
        """Begin one request: the result of `client.post` with `catch_response`."""
        raise NotImplementedError

    def check(self, response: ResponseContextManager) -> None:
        """Look at an answer of status 200."""

    @task
    def work(self) -> None:
        if self.environment.parsed_options.arrivals:
            self._keep_arriving()
        else:
            self._call()

    def _call(self, due: float | None = None) -> None:
        with self.post() as response:
            if due is not None:
                response.request_meta["response_time"] = (time.perf_counter() - due) * 1e3
            if response.status_code != 200:
                response.failure(f"{response.status_code} {(response.text or '')[:200]}")
            else:
                self.check(response)

    def _keep_arriving(self) -> None:
        """Call in greenlets, at this user's share of `--arrivals`, for ever."""
        environment = self.environment
        users = max(1, getattr(environment.runner, "target_user_count", 1) or 1)
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
                    pool.spawn(self._call, due)
        finally:
            pool.kill(block=False)
