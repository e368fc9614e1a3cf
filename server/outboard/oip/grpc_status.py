"""Problems as statuses of gRPC."""

from __future__ import annotations

import asyncio

import grpc

from outboard.oip.rest import status_of
from outboard.problems import Problem

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


def code_of(problem: Problem) -> grpc.StatusCode:
    return _CODES.get(status_of(problem), grpc.StatusCode.INTERNAL)


def code_of_failure(e: BaseException) -> grpc.StatusCode:
    """Of whatever a call raised."""
    if isinstance(e, Problem):
        return code_of(e)
    return grpc.StatusCode.CANCELLED if isinstance(e, asyncio.CancelledError) else grpc.StatusCode.INTERNAL
