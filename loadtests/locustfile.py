"""Users that post photographs to `/v1/models/{model}/predict`, each as fast as answers come.

    .venv/bin/locust -f loadtests/locustfile.py --headless --host http://127.0.0.1:8000 --users 16 --run-time 30s --min-fps 20

At the end: frames a second as Locust counted them and as the server's own counter did, and what the load generator cost, since a
generator that uses up a core measures itself (then: `--processes -1`). Exit status 1: a target was missed, or an answer was bad.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import psutil
from locust import FastHttpUser, events, task
from locust.env import Environment
from locust.runners import WorkerRunner
from urllib3 import request as http

TYPES = {".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".png": "image/png", ".webp": "image/webp"}
#: Above this share of a core, one generator process is likely to be what limits the rate.
BUSY_GENERATOR = 0.8


@events.init_command_line_parser.add_listener
def add_arguments(parser) -> None:
    group = parser.add_argument_group("Outboard")
    group.add_argument("--model", default="efficientnet_lite0", env_var="OUTBOARD_MODEL", help="the model that gets the photographs")
    group.add_argument("--images", default=".cache/samples", env_var="OUTBOARD_IMAGES", help="folder of JPEG, PNG or WebP files")
    group.add_argument("--min-fps", type=float, default=0, env_var="OUTBOARD_MIN_FPS", help="fail below this many answers a second")
    group.add_argument("--max-p99-ms", type=float, default=0, env_var="OUTBOARD_MAX_P99_MS", help="fail above this latency")


@events.init.add_listener
def read_photographs(environment: Environment, **_) -> None:
    """Into memory, before the clock runs."""
    folder = Path(environment.parsed_options.images)
    Photographer.photographs = [(TYPES[f.suffix.lower()], f.read_bytes()) for f in sorted(folder.glob("*")) if f.suffix.lower() in TYPES]
    if not Photographer.photographs:
        raise SystemExit(f"--images {folder}: no {', '.join(TYPES)} in it; `make models` puts samples into .cache/samples")
    if not isinstance(environment.runner, WorkerRunner):
        Watch(environment)


class Photographer(FastHttpUser):
    photographs: list[tuple[str, bytes]] = []
    connection_timeout = 30.0
    network_timeout = 60.0

    def on_start(self) -> None:
        self.turn = itertools.cycle(self.photographs)
        model = self.environment.parsed_options.model
        self.path = f"/v1/models/{model}/predict"

    @task
    def predict(self) -> None:
        kind, photograph = next(self.turn)
        with self.client.post(self.path, data=photograph, headers={"Content-Type": kind}, name="predict", catch_response=True) as response:
            if response.status_code != 200:
                response.failure(f"{response.status_code} {(response.text or '')[:200]}")


class Watch:
    """Reads the server's counter and the generator's CPU around a run, reports, and sets the exit status."""

    def __init__(self, environment: Environment):
        self.environment = environment
        self.began: tuple[float, float, float] | None = None
        self.generator_share = 0.0
        environment.events.test_start.add_listener(self.start)
        environment.events.test_stop.add_listener(self.stop)
        environment.events.quitting.add_listener(self.report)

    def start(self, **_) -> None:
        self.began = time.perf_counter(), generator_seconds(), self.frames_answered()

    def stop(self, **_) -> None:
        """The processes of `--processes` still live here; in `report` they have gone, and what they used with them."""
        if self.began is not None:
            self.generator_share = (generator_seconds() - self.began[1]) / (time.perf_counter() - self.began[0])

    def frames_answered(self) -> float:
        """`outboard_frames_total` of the model, whatever device answered."""
        labels = f'model="{self.environment.parsed_options.model}"'
        text = http("GET", f"{self.environment.host}/metrics", timeout=10).data.decode()
        lines = [line for line in text.splitlines() if line.startswith("outboard_frames_total{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if labels in line and 'outcome="answered"' in line)

    def report(self, **_) -> None:
        if self.began is None:
            return
        options, total = self.environment.parsed_options, self.environment.stats.total
        counted = total.num_requests - total.num_failures
        seconds = max(1e-9, (total.last_request_timestamp or 0) - total.start_time)
        fps, p99 = counted / seconds, total.get_response_time_percentile(0.99) or 0
        served = self.frames_answered() - self.began[2]
        print(f"fps: {fps:.1f} ({counted} answers in {seconds:.1f} s); p50 {total.median_response_time} ms, p99 {p99:.0f} ms")
        print(f"frames answered by the server's own counter: {served:.0f} (Locust: {counted}; requests cut off at the end explain a few)")
        print(f"load generator: {self.generator_share:.0%} of a core")
        if self.generator_share > BUSY_GENERATOR and not options.processes:
            print("The generator may be what limits the rate: add --processes -1, or run it on another machine.")
        problems = []
        if total.num_failures or not counted:
            problems.append(f"{total.num_failures} of {total.num_requests} requests failed")
        if fps < options.min_fps:
            problems.append(f"{fps:.1f} fps, wanted at least {options.min_fps:g}")
        if options.max_p99_ms and p99 > options.max_p99_ms:
            problems.append(f"p99 {p99:.0f} ms, wanted at most {options.max_p99_ms:g}")
        for problem in problems:
            print(f"missed: {problem}")
        self.environment.process_exit_code = 1 if problems else 0


def generator_seconds() -> float:
    """CPU of this process and of the ones that `--processes` forked."""
    own = psutil.Process()
    total = 0.0
    for process in [own, *own.children(recursive=True)]:
        times = process.cpu_times()
        total += times.user + times.system
    return total
