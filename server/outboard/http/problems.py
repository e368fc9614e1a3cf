"""Problems as RFC 9457 answers; the one place where exceptions become statuses."""

from __future__ import annotations

import logging

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match

from outboard.problems import Problem, mistake

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_ROUTING = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}


def respond(problem: Problem, **more: str) -> Response:
    headers = dict(more)
    if problem.seconds_to_wait:
        headers["Retry-After"] = problem.seconds_to_wait
    return Response(msgspec.json.encode(problem.body()), problem.status, headers, MEDIA_TYPE)


def respond_at(path: str, problem: Problem) -> Response:
    """For what refuses requests of every interface. Clients of the Open Inference Protocol (/v2) read `error`, and that only."""
    if path != "/v2" and not path.startswith("/v2/"):
        return respond(problem)
    return Response(msgspec.json.encode({"error": problem.detail}), problem.status, media_type="application/json")


def unexpected(method: str, path: str, e: Exception) -> Response:
    """A mistake of ours: told in the log, not to the client."""
    log.error("%s %s failed", method, path[:200], exc_info=e)
    return respond(mistake(e))


def install(app: FastAPI) -> None:
    """Every error of `app` leaves as a problem."""

    @app.exception_handler(Problem)
    async def _problem(request: Request, e: Problem) -> Response:
        return respond(e)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, e: HTTPException) -> Response:
        slug = _ROUTING.get(e.status_code)
        if slug == "not_found":
            return respond(Problem(slug, f"nothing is at {request.url.path[:200]}; /docs lists the routes"))
        if slug == "method_not_allowed":
            allowed = _methods(request)
            return respond(Problem(slug, f"{request.url.path[:200]} takes {allowed}, not {request.method}"), Allow=allowed)
        if slug is not None:
            return respond(Problem(slug, str(e.detail)[:200]))
        body = {"type": "about:blank", "title": str(e.detail)[:200], "status": e.status_code}
        return Response(msgspec.json.encode(body), e.status_code, dict(e.headers or {}), MEDIA_TYPE)

    @app.exception_handler(ClientDisconnect)
    async def _left(request: Request, e: ClientDisconnect) -> Response:
        return respond(Problem("client_left", "the connection ended before the body was complete"))

    @app.exception_handler(RequestValidationError)
    async def _validation(request: Request, e: RequestValidationError) -> Response:
        # Never the input itself: it may be an image (H09).
        what = "; ".join(f"{'.'.join(map(str, x.get('loc', ())))}: {x.get('msg', '')}" for x in e.errors())
        return respond(Problem("bad_option", what[:200]))

    @app.exception_handler(Exception)
    async def _unexpected(request: Request, e: Exception) -> Response:
        return unexpected(request.method, request.url.path, e)


def _methods(request: Request) -> str:
    """What the address takes, for `Allow`: the exception names the methods of one route only."""
    routes = request.app.routes
    found = [m for m in METHODS if any(route.matches({**request.scope, "method": m})[0] is Match.FULL for route in routes)]
    return ", ".join(found)
