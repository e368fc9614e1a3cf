"""What every Locust run here shares: its targets, the server's own count beside Locust's, what the generator cost, and the hardware.

A users' file imports it, and calls `answered` for each answer. Statistics beside Locust's: DROP (frames without an answer, by reason),
DEVICE (an answer came from another device than the one before), LINK (a stream's link was lost, by close code).
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import gevent
import msgspec
import psutil
from locust import User, events
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner
from locust.stats import StatsEntry
from urllib3 import request as http

TYPES = {".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".png": "image/png", ".webp": "image/webp"}
#: Above this share of a core, one generator process is likely to be what limits the rate.
BUSY_GENERATOR = 0.8
#: How far Locust's count may be from the server's, beside what was cut off at the end.
SAME_COUNT = 0.02
#: The entries that count answers; the others count events.
ANSWERS = ("POST", "STREAM")


@events.init_command_line_parser.add_listener
def add_arguments(parser) -> None:
    group = parser.add_argument_group("Outboard")
    group.add_argument("--model", default="efficientnet_lite0", env_var="OUTBOARD_MODEL", help="the model that gets the work")
    group.add_argument("--images", default=".cache/samples", env_var="OUTBOARD_IMAGES", help="folder of JPEG, PNG or WebP files")
    group.add_argument(
        "--arrivals", type=float, default=0, help="open loop: so many requests a second from all users together, whatever comes back"
    )
    group.add_argument("--options", default="", help="query of each request or stream: tile=auto&min_score=0.5")
    group = parser.add_argument_group("Targets; exit status 1 when one is missed")
    group.add_argument("--min-fps", type=float, default=0, env_var="OUTBOARD_MIN_FPS", help="answers a second")
    group.add_argument("--max-p99-ms", type=float, default=0, env_var="OUTBOARD_MAX_P99_MS", help="latency; of streams, the age of answers")
    group.add_argument(
        "--max-p99-turns", type=float, default=0, help="as --max-p99-ms, in turns: a turn is the time between two answers of one user"
    )
    group.add_argument("--max-dropped", type=float, default=1, help="share of a stream's frames, 0 to 1")
    group.add_argument("--max-links-lost", type=int, default=-1, help="of streams; -1: any")
    group = parser.add_argument_group("An unplug in the middle (simulated devices)")
    group.add_argument("--unplug", default="", help="the device: sim:0")
    group.add_argument("--unplug-after", type=float, default=10, help="seconds from the start")
    group.add_argument("--replug-after", type=float, default=10, help="seconds from then")


@events.init.add_listener
def watch(environment: Environment, **_) -> None:
    if not isinstance(environment.runner, WorkerRunner):
        Watch(environment)


def photographs(environment: Environment) -> list[tuple[str, bytes]]:
    """(content type, bytes), read into memory before the clock runs."""
    folder = Path(environment.parsed_options.images)
    found = [(TYPES[f.suffix.lower()], f.read_bytes()) for f in sorted(folder.glob("*")) if f.suffix.lower() in TYPES]
    if not found:
        raise SystemExit(f"--images {folder}: no {', '.join(TYPES)} in it; `make models` puts samples into .cache/samples")
    return found


def seen(user: User, device: str) -> None:
    """An answer came from that device: an event where the user's last one came from another."""
    before = getattr(user, "device", device)
    user.device = device  # type: ignore[attr-defined]
    if device != before:
        event(user.environment, "DEVICE", f"{before} -> {device}")


def event(environment: Environment, kind: str, name: str, milliseconds: float = 0.0) -> None:
    environment.events.request.fire(
        request_type=kind, name=name, response_time=milliseconds, response_length=0, exception=None, context={}, response=None
    )


class Watch:
    """Reads the server's counter and the generator's CPU around a run, reports, and sets the exit status."""

    def __init__(self, environment: Environment):
        self.environment = environment
        self.began: tuple[float, float, float] | None = None
        self.generator_share = 0.0
        self.open = 0
        environment.events.test_start.add_listener(self.start)
        environment.events.test_stopping.add_listener(self.stopping)
        environment.events.test_stop.add_listener(self.stop)
        environment.events.quitting.add_listener(self.report)

    def start(self, **_) -> None:
        options = self.environment.parsed_options
        self.began = time.perf_counter(), generator_seconds(), self.frames_answered()
        if options.unplug:
            gevent.spawn(self.unplug, options.unplug, options.unplug_after, options.replug_after)

    def unplug(self, device: str, after: float, back: float) -> None:
        for pause, fault in ((after, "unplug"), (back, "replug")):
            gevent.sleep(pause)
            answer = http("POST", f"{self.environment.host}/v1/devices/{device}/fault", json={"fault": fault}, timeout=10)
            print(f"{fault} {device}: {answer.status}")

    def stopping(self, **_) -> None:
        runner = self.environment.runner
        self.open = runner.user_count if runner else 0

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

    def entries(self, *kinds: str) -> list[StatsEntry]:
        return [entry for (_, kind), entry in self.environment.stats.entries.items() if kind in kinds]

    def report(self, **_) -> None:
        if self.began is None:
            return
        options = self.environment.parsed_options
        total = StatsEntry(self.environment.stats, "answers", "")
        for entry in self.entries(*ANSWERS):
            total.extend(entry)
        counted = total.num_requests - total.num_failures
        seconds = max(1e-9, (total.last_request_timestamp or 0) - (total.start_time or 0))
        fps = counted / seconds
        p99 = total.get_response_time_percentile(0.99) or 0
        ages = ", ".join(f"p{p:g} {total.get_response_time_percentile(p / 100) or 0:.0f}" for p in (50, 95, 99, 99.9))
        turn = self.open * 1e3 / max(fps, 1e-9)
        drops, devices, links = ({e.name: e.num_requests for e in self.entries(kind)} for kind in ("DROP", "DEVICE", "LINK"))
        served = (self.frames_answered() - self.began[2]) / (getattr(options, "bundle", 0) or 1)  # the server counts each part
        print(f"\nfps: {fps:.1f} ({counted} answers in {seconds:.1f} s); a turn of one of {self.open} users: {turn:.0f} ms")
        print(f"{'age' if self.entries('STREAM') else 'latency'}, ms: {ages}")
        for title, counts in (("dropped", drops), ("device changes", devices), ("links lost", links)):
            if counts:
                print(f"{title}: {sum(counts.values())} ({', '.join(f'{n} x {name}' for name, n in counts.items())})")
        print(f"frames answered by the server's own counter: {served:.0f}; by Locust's: {counted}")
        print(f"load generator: {self.generator_share:.0%} of a core")
        if self.generator_share > BUSY_GENERATOR and not options.processes and not isinstance(self.environment.runner, MasterRunner):
            print("The generator may be what limits the rate: add --processes -1, or run it on another machine.")
        for line in hardware(str(self.environment.host), options.model):
            print(line)
        missed = []
        if total.num_failures or not counted:
            missed.append(f"{total.num_failures} of {total.num_requests} requests failed")
        if abs(served - counted) > SAME_COUNT * counted + self.open:
            missed.append(f"Locust counts {counted} answers, the server {served:.0f}: more than {SAME_COUNT:.0%} apart")
        if fps < options.min_fps:
            missed.append(f"{fps:.1f} fps, wanted at least {options.min_fps:g}")
        if options.max_p99_ms and p99 > options.max_p99_ms:
            missed.append(f"p99 {p99:.0f} ms, wanted at most {options.max_p99_ms:g}")
        if options.max_p99_turns and p99 > options.max_p99_turns * turn:
            missed.append(f"p99 {p99:.0f} ms, wanted at most {options.max_p99_turns:g} turns of {turn:.0f} ms")
        frames = counted + sum(drops.values())
        if sum(drops.values()) > options.max_dropped * frames:
            missed.append(f"{sum(drops.values())} of {frames} frames dropped, wanted at most {options.max_dropped:.1%}")
        if 0 <= options.max_links_lost < sum(links.values()):
            missed.append(f"{sum(links.values())} links lost, wanted at most {options.max_links_lost}")
        for line in missed:
            print(f"missed: {line}")
        self.environment.process_exit_code = 1 if missed else 0


def hardware(host: str, model: str) -> list[str]:
    """What the figures were measured on; without it they cannot be compared with others (link, batch, cores)."""
    lines = [f"measured by: {platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"]
    listed = msgspec.json.decode(http("GET", f"{host}/v1/devices", timeout=10).data)
    about = listed["host"]
    driver = about["nvidia_driver"] or "none"
    lines.append(f"server: {about['cores']} cores, {about['decode_threads']} decode threads, NVIDIA driver {driver}")
    for device in listed["devices"]:
        link, batch = device["link"], device.get("batches", {}).get(model)
        parts = [device["name"] or device["kind"], device["state"] + (", simulated" if device["simulated"] else "")]
        if link["h2d_bytes_per_s"]:
            parts.append(f"link {link['h2d_bytes_per_s'] / 1e9:.2f} GB/s there, {(link['d2h_bytes_per_s'] or 0) / 1e9:.2f} GB/s back")
        if link["pcie_generation"]:
            parts.append(f"PCIe generation {link['pcie_generation']}, {link['pcie_width']} lanes")
        if batch:
            parts.append(f"batches of at most {batch['most_rows']}")
        parts.append(f"{device['concurrency']} at once, lost {device['losses']} times")
        lines.append(f"device {device['id']}: {'; '.join(parts)}")
    return lines


def generator_seconds() -> float:
    """CPU of this process and of the ones that `--processes` forked."""
    own = psutil.Process()
    total = 0.0
    for process in [own, *own.children(recursive=True)]:
        times = process.cpu_times()
        total += times.user + times.system
    return total
