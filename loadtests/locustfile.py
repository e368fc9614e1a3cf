"""Users that post photographs to `/v1/models/{model}/predict`: each as fast as answers come, or at fixed times (`--arrivals`).

    .venv/bin/locust -f loadtests/locustfile.py --headless --host http://127.0.0.1:8000 --users 16 --run-time 30s --min-fps 20

At the end: frames a second as Locust counted them and as the server's own counter did, and what the load generator cost, since a
generator that uses up a core measures itself (then: `--processes -1`). Exit status 1: a target was missed, or an answer was bad.
"""

from __future__ import annotations

import itertools
import re

from locust import events
from locust.contrib.fasthttp import ResponseContextManager
from locust.env import Environment

import watch
from arrivals import Caller

_DEVICE = re.compile(rb'"device": ?"([^"]*)"')


@events.init.add_listener
def read_photographs(environment: Environment, **_) -> None:
    Photographer.photographs = watch.photographs(environment)


class Photographer(Caller):
    photographs: list[tuple[str, bytes]] = []

    def on_start(self) -> None:
        options = self.environment.parsed_options
        self.turn = itertools.cycle(self.photographs)
        self.path = f"/v1/models/{options.model}/predict" + (f"?{options.options}" if options.options else "")

    def post(self) -> ResponseContextManager:
        kind, photograph = next(self.turn)
        return self.client.post(self.path, data=photograph, headers={"Content-Type": kind}, name="predict", catch_response=True)

    def check(self, response: ResponseContextManager) -> None:
        if found := _DEVICE.search(response.content or b""):
            watch.seen(self, found[1].decode())
