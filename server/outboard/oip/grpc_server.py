"""The Open Inference Protocol over gRPC, on the front's event loop, with health checking and reflection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import grpc
from google.protobuf import json_format
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outboard.http import body as bodies
from outboard.http.keyed import presented, refusal
from outboard.keys.store import Keyring
from outboard.oip import messages
from outboard.oip import open_inference_pb2 as pb
from outboard.oip import open_inference_pb2_grpc as stubs
from outboard.oip.grpc_status import code_of
from outboard.oip.grpc_traced import Traced
from outboard.oip.outputs import costly
from outboard.oip.service import Service
from outboard.oip.shared_memory import CUDA_REFUSED
from outboard.problems import Problem, mistake
from outboard.telemetry import metrics

if TYPE_CHECKING:
    from outboard.telemetry.spans import Spans

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
#: As over HTTP, these need no key.
_HEALTH = (f"/{SERVICE}/ServerLive", f"/{SERVICE}/ServerReady")
#: Requests of one stream that are under way at once; the next is read when the first of them is answered.
STREAM_WINDOW = 32
#: A client behind a NAT or a cut cable is noticed within 40 s, and may itself ask every 10 s (S22).
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # 60 s by default, and in gRPC 1.85.3 it is what counts
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 5),
)
Context = grpc.aio.ServicerContext


def _peer(context: Context) -> str:
    """The client's address: "ipv4:127.0.0.1:52110", "ipv6:%5B::1%5D:52110"."""
    return unquote(context.peer().partition(":")[2]).rpartition(":")[0].strip("[]")


class Servicer(stubs.GRPCInferenceServiceServicer):
    """One coroutine a call; a call that its client cancels, or whose deadline comes, is cancelled here and so are its frames (H05)."""

    def __init__(self, service: Service, traced: Traced):
        self._service = service
        self._traced = traced
        self._runtime = service.runtime
        self._in_progress = 0

    # ---------------------------------------------------------------- inference

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        held = bodies.Held(self._runtime)
        context.add_done_callback(lambda _: held.give_back())
        work = self._traced.infer(self._infer(request, context, held), context, "ModelInfer", request.model_name)
        del request  # see `_answer`
        return await _answer(context, work)

    async def ModelStreamInfer(self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: Context) -> None:
        """One response for each request, in the order of the requests, which run side by side."""
        patience = self._runtime.settings.limits.body_seconds
        if not await self._answered(request_iterator, context, patience):
            metrics.unread.inc()
            # Not where the answers are at hand: grpcio keeps what `abort` raises, and so whatever its frames hold.
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"an answer was not read within {patience:g} s; read them as they come")

    async def _answered(self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: Context, patience: float) -> bool:
        """Answer a stream to its end; False: its client did not take an answer within `patience` seconds."""
        answers: asyncio.Queue[tuple[asyncio.Task[pb.ModelStreamInferResponse], bodies.Held] | None] = asyncio.Queue(STREAM_WINDOW)
        under_way: dict[asyncio.Task[Any], bodies.Held] = {}

        async def read() -> None:
            try:
                async for request in request_iterator:
                    held = bodies.Held(self._runtime)
                    task = asyncio.ensure_future(self._infer_in_stream(request, context, held))
                    under_way[task] = held
                    await answers.put((task, held))
            except asyncio.CancelledError:
                raise  # nobody listens any more, and the queue may be full
            except BaseException:
                await answers.put(None)
                raise
            await answers.put(None)

        reader = asyncio.ensure_future(read())
        # Left to the first write, they are sent once more where that is cut short, and the status after them never arrives (grpcio 1.85).
        await context.send_initial_metadata(())
        try:
            while (answer := await answers.get()) is not None:
                task, held = answer
                response = await task
                async with asyncio.timeout(patience):
                    await context.write(response)
                held.give_back()
                del under_way[task], task, response, answer
            await reader
        except grpc.aio.InternalError:
            log.debug("a stream's client has left")
        except TimeoutError:
            return False
        finally:
            reader.cancel()
            for task, held in under_way.items():
                task.cancel()
                held.give_back()
        return True

    async def _infer_in_stream(self, request: pb.ModelInferRequest, context: Context, held: bodies.Held) -> pb.ModelStreamInferResponse:
        try:
            work = self._infer(request, context, held)
            response = await self._traced.infer(work, context, "ModelStreamInfer", request.model_name)
        except Problem as e:
            failed = pb.ModelInferResponse(model_name=request.model_name, model_version=request.model_version, id=request.id)
            return pb.ModelStreamInferResponse(error_message=e.detail, infer_response=failed)
        except Exception as e:
            log.exception("a request of a stream failed")
            return pb.ModelStreamInferResponse(error_message=mistake(e).detail)
        response.parameters[messages.FINAL_RESPONSE].bool_param = True
        return pb.ModelStreamInferResponse(infer_response=response)

    async def _infer(self, message: pb.ModelInferRequest, context: Context, held: bodies.Held) -> pb.ModelInferResponse:
        """`held`: the answer's bytes are accounted for there."""
        arrived = self._runtime.now()
        limit = self._runtime.settings.limits.requests
        if self._in_progress >= limit:
            raise Problem("overloaded", f"{limit} requests are in progress, no more are taken", retry_after=1.0)
        self._in_progress += 1
        try:
            with bodies.Held(self._runtime) as sent:
                sent.take(message.ByteSize())
                request = messages.request_of(message, self._service.regions, _peer(context))
                left = context.time_remaining()
                if left is not None:
                    request.seconds = min(max(left, 1e-3), request.seconds or left)
                inferer = self._service.inferer
                known, result = await inferer.infer(message.model_name, message.model_version, request, arrived, held.take)
                if any(costly(wanted, array) for wanted, array in result.outputs):
                    return await self._runtime.in_thread(messages.response_of, known, request, result)
                return messages.response_of(known, request, result)
        finally:
            self._in_progress -= 1

    # ---------------------------------------------------------------- everything else

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._service.ready())

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        return json_format.ParseDict(self._service.metadata(), pb.ServerMetadataResponse())

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        return await _answer(context, lambda: pb.ModelReadyResponse(ready=self._service.model_ready(request.name, request.version)))

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        return await _answer(
            context, lambda: json_format.ParseDict(self._service.model_metadata(request.name, request.version), pb.ModelMetadataResponse())
        )

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        return await _answer(
            context,
            lambda: json_format.ParseDict({"config": self._service.model_config(request.name, request.version)}, pb.ModelConfigResponse()),
        )

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        return await _answer(
            context, lambda: json_format.ParseDict(self._service.statistics(request.name, request.version), pb.ModelStatisticsResponse())
        )

    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:
        return json_format.ParseDict({"models": self._service.index(request.ready)}, pb.RepositoryIndexResponse())

    async def RepositoryModelLoad(self, request: pb.RepositoryModelLoadRequest, context: Context) -> pb.RepositoryModelLoadResponse:
        await _answer(context, self._service.load(request.model_name, messages.plain(request.parameters)))
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request: pb.RepositoryModelUnloadRequest, context: Context) -> pb.RepositoryModelUnloadResponse:
        # That the models which depend on it go, too, is asked for by default and means nothing: none depend.
        await _answer(context, lambda: self._service.unload(request.model_name))
        return pb.RepositoryModelUnloadResponse()

    async def SystemSharedMemoryStatus(
        self, request: pb.SystemSharedMemoryStatusRequest, context: Context
    ) -> pb.SystemSharedMemoryStatusResponse:
        def status() -> pb.SystemSharedMemoryStatusResponse:
            regions = {region["name"]: region for region in self._regions(context).status(request.name)}
            return json_format.ParseDict({"regions": regions}, pb.SystemSharedMemoryStatusResponse())

        return await _answer(context, status)

    async def SystemSharedMemoryRegister(
        self, request: pb.SystemSharedMemoryRegisterRequest, context: Context
    ) -> pb.SystemSharedMemoryRegisterResponse:
        await _answer(context, lambda: self._regions(context).register(request.name, request.key, request.offset, request.byte_size))
        return pb.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest, context: Context
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        await _answer(context, lambda: self._regions(context).unregister(request.name))
        return pb.SystemSharedMemoryUnregisterResponse()

    async def CudaSharedMemoryStatus(
        self, request: pb.CudaSharedMemoryStatusRequest, context: Context
    ) -> pb.CudaSharedMemoryStatusResponse:
        return pb.CudaSharedMemoryStatusResponse()

    async def CudaSharedMemoryRegister(
        self, request: pb.CudaSharedMemoryRegisterRequest, context: Context
    ) -> pb.CudaSharedMemoryRegisterResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, CUDA_REFUSED)
        raise AssertionError("abort raises")

    async def CudaSharedMemoryUnregister(
        self, request: pb.CudaSharedMemoryUnregisterRequest, context: Context
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        return pb.CudaSharedMemoryUnregisterResponse()  # there is none: what clients do before they begin

    def _regions(self, context: Context) -> Any:
        self._service.regions.check(_peer(context))
        return self._service.regions


async def _answer(context: Context, work: Awaitable[Any] | Callable[[], Any]) -> Any:
    """The work's result; what it refuses leaves as a status.

    grpcio keeps what `abort` raises in a cycle with the call, and so the frames that it passed, their arguments and the exception that was
    being handled: nothing of size may be among them, or it stays until the garbage collector comes.
    """
    try:
        return work() if callable(work) else await work
    except Problem as e:
        code, detail, wait = code_of(e), e.detail, e.seconds_to_wait
    except Exception as e:
        log.exception("a gRPC call failed")
        code, detail, wait = grpc.StatusCode.INTERNAL, mistake(e).detail, ""
    if wait:
        context.set_trailing_metadata((*(context.trailing_metadata() or ()), ("retry-after", wait)))
    return await context.abort(code, detail)


class Keyed(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid key in their metadata (`authorization: Bearer KEY`), as http/keyed.py does; health checks need none."""

    def __init__(self, keyring: Keyring):
        self._keyring = keyring

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]], call: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(call)
        given = [value for name, value in call.invocation_metadata if name == "authorization"]
        problem = refusal(self._keyring, presented(str(given[0])) if len(given) == 1 else None)
        if problem is None or handler is None or call.method.startswith(f"/{health.SERVICE_NAME}/") or call.method in _HEALTH:
            return handler
        detail = problem.detail

        async def refuse(request: Any, context: Context) -> None:
            del request  # see `_answer`
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, detail)

        async def refuse_stream(request: Any, context: Context) -> AsyncIterator[Any]:
            del request
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, detail)
            yield  # makes it a generator

        kinds = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }
        make = kinds[bool(handler.request_streaming), bool(handler.response_streaming)]
        return make(
            refuse_stream if handler.response_streaming else refuse,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


class GrpcServer:
    """The listening server; it says in its health checks that it serves once every model does."""

    def __init__(self, service: Service, host: str, port: int, keyring: Keyring | None = None, spans: Spans | None = None):
        self._registry = service.registry
        settings = service.runtime.settings
        largest = settings.limits.body
        sizes = (("grpc.max_receive_message_length", largest), ("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0))
        self._server = grpc.aio.server(options=[*sizes, *KEEPALIVE], interceptors=[Keyed(keyring)] if keyring else [])
        traced = Traced(SERVICE, spans, settings.log_requests)
        stubs.add_GRPCInferenceServiceServicer_to_server(Servicer(service, traced), self._server)
        self._checks = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._checks, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        try:
            bound = self._server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except RuntimeError as e:
            raise OSError(f"gRPC cannot listen on {host}:{port}: {e}") from e
        log.info("gRPC listens on %s:%d", host, bound)

    async def run(self) -> None:
        """Until it is cancelled."""
        await self._server.start()
        try:
            await self._tell(health_pb2.HealthCheckResponse.NOT_SERVING)
            await self._registry.settled.wait()
            await self._tell(health_pb2.HealthCheckResponse.SERVING)
            await self._server.wait_for_termination()
        finally:
            await self._server.stop(1.0)

    async def _tell(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", SERVICE):
            await self._checks.set(name, status)
