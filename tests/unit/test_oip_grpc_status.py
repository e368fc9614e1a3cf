"""What a refusal looks like to a gRPC client."""

from __future__ import annotations

import grpc
import pytest

from outboard.oip.grpc_server import _answer
from outboard.problems import Problem


@pytest.mark.parametrize(("seconds", "told"), [(0.2, "1"), (1.0, "1"), (2.3, "3"), (2.5, "3"), (None, None)])
async def test_nobody_is_asked_to_come_back_too_early(seconds: float | None, told: str | None) -> None:
    async def refuse(_, context: grpc.aio.ServicerContext) -> bytes:
        return await _answer(context, lambda: _refused(seconds))

    server = grpc.aio.server()
    handlers = {"Refuse": grpc.unary_unary_rpc_method_handler(refuse)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/test.Test/Refuse")(b"", timeout=20)
    finally:
        await server.stop(0)
    assert dict(caught.value.trailing_metadata()).get("retry-after") == told and caught.value.details() == "busy"


def _refused(seconds: float | None) -> bytes:
    raise Problem("overloaded", "busy", retry_after=seconds)
