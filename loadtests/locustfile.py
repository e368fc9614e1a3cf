"""Users that post photographs to `/v1/models/{model}/predict`: each as fast as answers come, or at fixed times (`--arrivals`).

    .venv/bin/locust -f loadtests/locustfile.py --headless --host http://127.0.0.1:8000 --users 16 --run-time 30s --min-fps 20

At the end: frames a second as Locust counted them and as the server's own counter did, and what the load generator cost, since a
generator that uses up a core measures itself (then: `--processes -1`). Exit status 1: a target was missed, or an answer was bad.
"""

from __future__ import annotations

import itertools
import re
import time

from locust import FastHttpUser, events, task
from locust.env import Environment

import arrivals
import watch

_DEVICE = re.compile(rb'"device": ?"([^"]*)"')


@events.init.add_listener
def read_photographs(environment: Environment, **_) -> None:
    Photographer.photographs = watch.photographs(environment)
    if environment.parsed_options.arrivals:
        Photographer.concurrency = arrivals.MOST


class Photographer(FastHttpUser):
    photographs: list[tuple[str, bytes]] = []
    connection_timeout = 30.0
    network_timeout = 60.0

    def on_start(self) -> None:
        options = self.environment.parsed_options
        self.turn = itertools.cycle(self.photographs)
        self.path = f"/v1/models/{options.model}/predict" + (f"?{options.options}" if options.options else "")

    @task
    def work(self) -> None:
        if self.environment.parsed_options.arrivals:
            arrivals.keep_sending(self, self.predict)
        else:
            self.predict()

    def predict(self, due: float | None = None) -> None:
        kind, photograph = next(self.turn)
        with self.client.post(self.path, data=photograph, headers={"Content-Type": kind}, name="predict", catch_response=True) as response:
            if due is not None:
                response.request_meta["response_time"] = (time.perf_counter() - due) * 1e3
            if response.status_code != 200:
                response.failure(f"{response.status_code} {(response.text or '')[:200]}")
            elif found := _DEVICE.search(response.content or b""):
                watch.seen(self, found[1].decode())
