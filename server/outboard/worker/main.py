"""The worker's loops: messages in, batches through the networks, messages out.

The main thread reads the socket and answers `Ping` itself, `concurrency` threads run batches and send their own `Done` or `Failed`, one
thread for each runtime loads and unloads in order, so loading never holds up running, and one makes loaded networks faster. Nothing that
a model raises ends a loop; the process ends with the socket.
"""

from __future__ import annotations

import gc
import importlib.metadata
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

from outboard import profiles, repository
from outboard.devices import protocol, slab
from outboard.devices.protocol import Done, Failed, Fault, Hello, Load, Loaded, LoadFailed, Ping, Pong, Run, Start, Stop, Took, Unload
from outboard.repository import ModelProblem
from outboard.tasks import contract
from outboard.worker import decoding, measure, networks, quiet, tensor_measure
from outboard.worker.answers import Answers
from outboard.worker.devices import Device, open_device
from outboard.worker.errors import InputRefused, NotDecoded, classify
from outboard.worker.networks import LoadedNetwork
from outboard.worker.tensors import TensorNetwork

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
        self._cache = Path(start.cache_dir)
        self._profiles = profiles.Store(self._cache)
        self._loaders: dict[str, queue.SimpleQueue[Load | Unload]] = {}  # by backend
        self._loader_of: dict[tuple[str, str], str] = {}  # (model, version) -> its backend
        self._loading = 0  # loads and unloads that are not done yet
        self._progress = threading.Lock()
        self._optimiser = ThreadPoolExecutor(1, thread_name_prefix="optimiser")
        self._to_optimise: list[tuple[Load, LoadedNetwork, measure.Costs]] = []
        self._golden_batch = 0  # counts down: real batches count up
        self._clock = threading.Lock()
        self._computed = 0.0  # when the device had computed the last batch
        self._ended = 0.0  # when the last batch ended

    def serve(self) -> None:
        """Until `Stop` or the end of the socket. Returns with running batches finished after `Stop`, at once when the front is gone."""
        d = self._device
        self._send(
            Hello(
                protocol.VERSION,
                os.getpid(),
                d.name,
                d.uuid,
                d.memory_total,
                d.memory_free(),
                d.h2d_bytes_per_s,
                d.d2h_bytes_per_s,
                d.power_limit_w,
                d.link,
            )
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
                    self._send(Pong(message.n, d.memory_free(), d.memory_held() + sum(n.kept_bytes for n in list(self._networks.values()))))
                case Load() | Unload():
                    self._queue_load(message)
                case Fault():
                    self._fault(message)
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

    def _fault(self, message: Fault) -> None:
        try:
            self._device.fault(message.fault, message.phase)
        except ValueError as e:
            log.error("%s", e)

    # ---- batches

    def _run(self, run: Run) -> None:
        with self._device.batch():
            self._send(self._answer(run))

    def _answer(self, run: Run) -> Done | Failed:
        began = time.perf_counter()
        try:
            network = self._networks.get((run.model, run.version))
            if network is None:
                raise LookupError(f"{run.model} {run.version} is not loaded here")
            self._device.uploaded.nbytes = 0
            self._device.timeline.begin()
            if run.coded:
                self._device.decoded.spent.begin()
                outputs = network.run(self._slab, run.rows, run.shape, run.pictures, run.coded)
            else:
                outputs = network.run(self._slab, run.rows, run.inputs or run.shape, run.pictures)
            self._device.download(sum(array.nbytes for array in outputs.values()))
            tensors = self._answers.put(run.batch, outputs)
            decoded = self._device.decoded.spent if run.coded else None
            took = self._took(max(began, decoded.until) if decoded else began)
            uploaded, spent = self._device.uploaded.nbytes, decoded.seconds if decoded else 0.0
            return Done(run.batch, tensors, took, network.backend.provider, uploaded, network.recompiled(), spent)
        except Exception as e:
            self._took(began)
            kind = classify(e)
            level = logging.INFO if kind == "decode" else logging.WARNING  # damaged files are nobody's alarm
            log.log(level, "batch %d of %s failed (%s): %s", run.batch, run.model, kind, e, extra={"model": run.model})
            return Failed(run.batch, kind, _text(e), e.rows if isinstance(e, NotDecoded) else [])

    def _took(self, began: float) -> Took:
        """Of a batch that ends now, failed or not."""
        timeline = self._device.timeline
        with self._clock:
            now = time.perf_counter()
            own, idle = now - max(began, self._ended), max(0.0, timeline.gathered - max(began, self._computed))
            self._ended, self._computed = now, max(self._computed, timeline.computed)
        return Took(now - began, own, idle, timeline.computed)

    # ---- loading

    def _queue_load(self, item: Load | Unload) -> None:
        """Each runtime has a loader thread: ONNX Runtime opens its sessions while torch, for seconds, imports and reads Python."""
        name = item.model, item.version
        backend = self._loader_of.setdefault(name, item.backend) if isinstance(item, Load) else self._loader_of.pop(name, "onnx")
        if backend not in self._loaders:
            self._loaders[backend] = queue.SimpleQueue()
            threading.Thread(target=self._load_loop, args=[self._loaders[backend]], name=f"loader of {backend}", daemon=True).start()
        with self._progress:
            self._loading += 1
            gc.disable()  # a loaded program is millions of objects, and each pass over them would find nothing
        self._loaders[backend].put(item)

    def _load_loop(self, items: queue.SimpleQueue[Load | Unload]) -> None:
        while True:
            item = items.get()
            if isinstance(item, Load):
                self._load(item)
            elif (gone := self._networks.pop((item.model, item.version), None)) is not None:  # running batches hold it until they are done
                self._device.unload(gone.weights_bytes)
            with self._progress:
                self._loading -= 1
                if self._loading:
                    continue
                gc.collect()
                gc.freeze()  # what lives now lives long
                gc.enable()
                for work in self._to_optimise:  # compiling takes a core for minutes: first everything serves
                    self._optimiser.submit(self._optimise, *work)
                self._to_optimise.clear()

    def _load(self, load: Load) -> None:
        began, opened = time.perf_counter(), False
        try:
            key = self._key(load, "torch eager" if load.backend == "torch" else self._device.provider)
            known = None if load.anew else self._profile(key)
            with quiet.loading(self._cache) if known else quiet.measuring(self._cache):
                network = self._open(load)
                opened = True
                try:
                    loaded = self._prove(load, network, key, known)
                except Exception:
                    self._device.unload(network.weights_bytes)
                    raise
            self._networks[load.model, load.version] = network
            self._send(loaded)
            with self._progress:
                self._to_optimise.append((load, network, loaded.costs))
            log.info(
                "%s %s serves with %s after %.2f s, %.2f of them %s",
                load.model,
                load.version,
                network.backend.provider,
                time.perf_counter() - began,
                loaded.measuring,
                "to look whether its costs are still those of its profile" if loaded.stored else "measuring",
                extra={"model": load.model},
            )
        except ModelProblem as e:
            self._refuse(load, e.file, e.key, e.expected, e.message, "answers" if opened else "files")
        except Exception as e:
            kind = classify(e)
            log.exception("%s cannot be loaded (%s)", load.model, kind, extra={"model": load.model})
            key = f"device ({kind})" if kind in ("oom", "sticky") else "load"
            self._refuse(load, load.directory, key, "a network that loads and runs", _text(e), kind)

    def _refuse(self, load: Load, file: str, key: str, expected: str, message: str, kind: str) -> None:
        log.warning("%s refused: %s: %s: expected %s; %s", load.model, file, key, expected, message, extra={"model": load.model})
        cut = MESSAGE_CHARS
        self._send(LoadFailed(load.model, load.version, file[:cut], key[:cut], expected[:cut], message[:cut], kind))

    def _open(self, load: Load) -> LoadedNetwork:
        spec = repository.read(Path(load.directory))
        if spec.version != load.version:
            raise ModelProblem(
                load.directory, "version", load.version, f"the files are now {spec.version}: they changed since the load was asked for"
            )
        if load.part not in spec.networks:
            raise ModelProblem(load.directory, "part", f"one of {sorted(spec.networks)}", repr(load.part))
        weights, before = spec.networks[load.part].file.stat().st_size, self._device.memory_free()
        self._device.load(weights)
        try:
            network = networks.load(spec, load.part, self._device, self._start.threads)
        except Exception:
            self._device.unload(weights)
            raise
        network.weights_bytes = weights
        network.memory_bytes = max(0, before - self._device.memory_free())
        return network

    def _key(self, load: Load, provider: str) -> profiles.Key:
        library = "torch" if load.backend == "torch" else "onnxruntime-gpu"
        versions = f"{library} {importlib.metadata.version(library)} {self._device.driver}".strip()
        start = self._start
        return profiles.Key(self._device.identity, load.model, load.version, provider, versions, start.concurrency, start.threads)

    def _profile(self, key: profiles.Key) -> profiles.Profile | None:
        """What was measured before; None where nothing was, or where the link is another one now."""
        known, link = self._profiles.get(key), self._device.link
        if known is not None and known.link is not None and link is not None and not link.resembles(known.link):
            log.info("%s: the link is another one than when it was measured: measured anew", key.model)
            return None
        return known

    def _prove(self, load: Load, network: LoadedNetwork, key: profiles.Key, known: profiles.Profile | None) -> Loaded:
        """Golden answers, independent rows and costs, as the network's `Loaded`. What is measured is kept."""
        slots, costs = self._start.concurrency, known.costs if known else None
        budget = measure.THOROUGH_S if load.anew else measure.BUDGET_S
        began = time.perf_counter()
        if isinstance(network, TensorNetwork):
            answers, measured = tensor_measure.prove(network, slots, costs, budget)
            whole, labels = network.whole, network.backend.labels
        else:
            image, answers = measure.golden(network)
            contract.check(answers, network.spec, load.part)
            began = time.perf_counter()
            if known and known.fixed_rows == 1:
                network.run_singly()
            measured = measure.picture_costs(network, image, slots, costs, budget)
            whole, labels = False, {}
        decoder = decoding.measure(network)
        seconds = time.perf_counter() - began
        if measured != costs:
            self._keep(key, network, measured)
        self._golden_batch -= 1
        tensors = self._answers.put(self._golden_batch, answers)
        backend = network.backend
        return Loaded(
            load.model, load.version, backend.provider, network.fixed_rows, backend.inputs, backend.outputs,
            measured, tensors, self._golden_batch, network.memory_bytes, whole, labels, seconds, measured == costs, decoder,
        )  # fmt: skip

    def _keep(self, key: profiles.Key, network: LoadedNetwork, measured: measure.Costs) -> None:
        d = self._device
        self._profiles.put(
            profiles.Profile(
                key=key,
                device=d.name,
                measured_at=time.time(),
                costs=measured,
                fixed_rows=network.fixed_rows,
                memory_bytes=network.memory_bytes,
                link=d.link,
            )
        )

    def _optimise(self, load: Load, network: LoadedNetwork, costs: measure.Costs) -> None:
        """Put a faster backend in the network's place once its answers agree, and say so with a second `Loaded`."""
        try:
            sizes = [c.rows for c in costs]
            backend = network.backend.optimise(sizes)
            if backend is None:
                return
            key = self._key(load, backend.provider)
            known = None if load.anew else self._profile(key)
            faster = LoadedNetwork(network.spec, network.network, backend, self._device, network.memory_bytes)
            faster.weights_bytes = network.weights_bytes
            if network.fixed_rows == 1:
                faster.run_singly()
            if difference := measure.difference(faster, network):
                log.warning(
                    "%s stays with %s: %s answers differently: %s", load.model, network.backend.provider, backend.provider, difference
                )
                return
            # What has a profile was faster when that was made.
            if known is None and not measure.is_faster(faster, network, sizes, self._start.concurrency):
                log.info("%s stays with %s: %s is not faster here", load.model, network.backend.provider, backend.provider)
                return
            loaded = self._prove(load, faster, key, known)
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
    said = str(error) if isinstance(error, InputRefused) else f"{type(error).__name__}: {error}"  # the former is written for people
    return said[:MESSAGE_CHARS]


def run(channel: socket.socket, start: Start, fds: list[int]) -> None:
    """Serve `start`'s device until the front stops or leaves. `fds`: slab, answer region."""
    slab_memory = slab.attach(fds[0], start.slab_bytes)
    answer_memory = slab.attach(fds[1], start.answer_bytes, writable=True)
    device = open_device(start.device)
    device.attach(slab_memory)
    Worker(channel, start, slab_memory, answer_memory, device).serve()
