"""The worker's loops: messages in, batches through the networks, messages out.

The main thread reads the socket and answers `Ping` itself, `concurrency` threads run batches and send their own `Done` or `Failed`, one
thread loads and unloads in order, so loading never holds up running, and one makes loaded networks faster. Nothing that a model raises ends
a loop; the process ends with the socket.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from outboard import repository
from outboard.devices import protocol, slab
from outboard.devices.protocol import Done, Failed, Fault, Hello, Load, Loaded, LoadFailed, Ping, Pong, Run, Start, Stop, Unload
from outboard.repository import ModelProblem
from outboard.worker import measure, networks
from outboard.worker.answers import Answers
from outboard.worker.devices import Device, open_device
from outboard.worker.errors import classify
from outboard.worker.networks import LoadedNetwork

log = logging.getLogger(__name__)

MESSAGE_CHARS = 2000  #: an error's text is cut here, so that it fits a datagram


class Worker:
    """One device's networks behind one socket."""

    def __init__(self, channel: socket.socket, start: Start, slab_memory: np.ndarray, answer_memory: np.ndarray, device: Device):
        self._channel = channel
        self._start = start
        self._slab = slab_memory
        self._answers = Answers(answer_memory)
        self._device = device
        self._networks: dict[tuple[str, str], LoadedNetwork] = {}
        self._pool = ThreadPoolExecutor(start.concurrency, thread_name_prefix="batch")
        self._loads: queue.SimpleQueue[Load | Unload] = queue.SimpleQueue()
        self._optimiser = ThreadPoolExecutor(1, thread_name_prefix="optimiser")
        self._to_optimise: list[tuple[Load, LoadedNetwork, measure.Costs]] = []  # of the loader thread alone
        self._golden_batch = 0  # counts down: real batches count up

    def serve(self) -> None:
        """Until `Stop` or the end of the socket. Returns with running batches finished after `Stop`, at once when the front is gone."""
        d = self._device
        threading.Thread(target=self._load_loop, name="loader", daemon=True).start()
        self._send(
            Hello(protocol.VERSION, os.getpid(), d.name, d.uuid, d.memory_total, d.memory_free(), d.h2d_bytes_per_s, d.d2h_bytes_per_s)
        )
        while True:
            try:
                datagram = self._channel.recv(protocol.MAX_DATAGRAM)
            except OSError:
                return
            if not datagram:  # an empty datagram cannot be told from the end of the socket; the front sends none
                return
            try:
                message = protocol.decode_to_worker(datagram)
            except msgspec.MsgspecError as e:
                log.error("a datagram of %d bytes is not a message: %s", len(datagram), e)
                continue
            match message:
                case Run():
                    self._answers.free(message.freed)
                    self._pool.submit(self._run, message)
                case Ping():
                    d.ping()
                    self._send(Pong(message.n, d.memory_free()))
                case Load() | Unload():
                    self._loads.put(message)
                case Fault():
                    self._fault(message.fault)
                case Stop():
                    self._pool.shutdown(wait=True)
                    return
                case _:
                    log.error("%s is not for this device (%s) now", type(message).__name__, d.spec)

    def _send(self, message: protocol.ToFront) -> None:
        try:
            self._channel.send(protocol.encode(message))
        except OSError as e:
            log.info("the front is gone: %s", e)  # the main thread sees the end of the socket

    def _fault(self, fault: str) -> None:
        try:
            self._device.fault(fault)
        except ValueError as e:
            log.error("%s", e)

    # ---- batches

    def _run(self, run: Run) -> None:
        began = time.perf_counter()
        try:
            network = self._networks.get((run.model, run.version))
            if network is None:
                raise LookupError(f"{run.model} {run.version} is not loaded here")
            outputs = network.run(self._slab, run.rows, run.shape)
            self._device.download(sum(array.nbytes for array in outputs.values()))
            tensors = self._answers.put(run.batch, outputs)
            reply: protocol.ToFront = Done(run.batch, tensors, time.perf_counter() - began, network.backend.provider)
        except Exception as e:
            kind = classify(e)
            log.warning("batch %d of %s failed (%s): %s", run.batch, run.model, kind, e)
            reply = Failed(run.batch, kind, _text(e))
        self._send(reply)

    # ---- loading

    def _load_loop(self) -> None:
        while True:
            item = self._loads.get()
            if isinstance(item, Load):
                self._load(item)
            else:
                self._networks.pop((item.model, item.version), None)  # running batches hold it until they are done
            if self._loads.empty():  # compiling takes a core for minutes: first everything serves
                for work in self._to_optimise:
                    self._optimiser.submit(self._optimise, *work)
                self._to_optimise.clear()

    def _load(self, load: Load) -> None:
        began = time.perf_counter()
        try:
            network = self._open(load)
            loaded = self._prove(load, network)
            self._networks[load.model, load.version] = network
            self._send(loaded)
            self._to_optimise.append((load, network, loaded.costs))
            log.info("%s %s serves with %s after %.2f s", load.model, load.version, network.backend.provider, time.perf_counter() - began)
        except ModelProblem as e:
            self._refuse(load, e.file, e.key, e.expected, e.message)
        except Exception as e:
            kind = classify(e)
            log.exception("%s cannot be loaded (%s)", load.model, kind)
            self._refuse(
                load, load.directory, f"device ({kind})" if kind in ("oom", "sticky") else "load", "a network that loads and runs", _text(e)
            )

    def _refuse(self, load: Load, file: str, key: str, expected: str, message: str) -> None:
        log.warning("%s refused: %s: %s: expected %s; %s", load.model, file, key, expected, message)
        cut = MESSAGE_CHARS
        self._send(LoadFailed(load.model, load.version, file[:cut], key[:cut], expected[:cut], message[:cut]))

    def _open(self, load: Load) -> LoadedNetwork:
        spec = repository.read(Path(load.directory))
        if spec.version != load.version:
            raise ModelProblem(
                load.directory, "version", load.version, f"the files are now {spec.version}: they changed since the load was asked for"
            )
        if load.part not in spec.networks:
            raise ModelProblem(load.directory, "part", f"one of {sorted(spec.networks)}", repr(load.part))
        return networks.load(spec, load.part, self._device, self._start.threads)

    def _prove(self, load: Load, network: LoadedNetwork) -> Loaded:
        """Golden answers, independent rows and costs, as the network's `Loaded`."""
        image, answers = measure.golden(network)
        measure.check_rows_independent(network, image)
        measured = measure.costs(network, image, self._start.concurrency)
        network.backend.shrink()  # the largest batch that was tried took three times what the usual one needs
        network.run(image.reshape(-1), [0], image.shape)
        self._golden_batch -= 1
        tensors = self._answers.put(self._golden_batch, answers)
        backend = network.backend
        return Loaded(
            load.model, load.version, backend.provider, network.fixed_rows, backend.inputs, backend.outputs,
            measured, tensors, self._golden_batch, network.memory_bytes,
        )  # fmt: skip

    def _optimise(self, load: Load, network: LoadedNetwork, costs: measure.Costs) -> None:
        """Put a faster backend in the network's place once its answers agree, and say so with a second `Loaded`."""
        try:
            backend = network.backend.optimise([rows for rows, _ in costs])
            if backend is None:
                return
            faster = LoadedNetwork(network.spec, network.network, backend, self._device, network.memory_bytes)
            if network.fixed_rows == 1:
                faster.run_singly()
            if difference := measure.difference(faster, network):
                log.warning(
                    "%s stays with %s: %s answers differently: %s", load.model, network.backend.provider, backend.provider, difference
                )
                return
            if not measure.is_faster(faster, network, [rows for rows, _ in costs], self._start.concurrency):
                log.info("%s stays with %s: %s is not faster here", load.model, network.backend.provider, backend.provider)
                return
            loaded = self._prove(load, faster)
            # Not where it was unloaded, or loaded anew, in the meantime.
            if self._networks.get((load.model, load.version)) is network:
                self._networks[load.model, load.version] = faster
                self._send(loaded)
                log.info("%s now serves with %s", load.model, backend.provider)
            else:
                self._answers.free([loaded.golden_batch])
        except Exception:
            log.exception("%s stays with %s", load.model, network.backend.provider)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MESSAGE_CHARS]


def run(channel: socket.socket, start: Start, fds: list[int]) -> None:
    """Serve `start`'s device until the front stops or leaves. `fds`: slab, answer region."""
    slab_memory = slab.attach(fds[0], start.slab_bytes)
    answer_memory = slab.attach(fds[1], start.answer_bytes, writable=True)
    device = open_device(start.device)
    device.attach(slab_memory)
    Worker(channel, start, slab_memory, answer_memory, device).serve()
