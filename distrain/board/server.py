"""The board as a web server for the browser of one user. Runs in: the process of the board.

It listens at 127.0.0.1 only, and all of it is below a path that nobody can guess, new at each start: a capability URL
(W3C TAG, Good Practices for Capability URLs). Cookies would reach every server of this machine, whatever its port.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections import deque
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette import responses
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.routing import Mount, Route

from distrain.board.runs import MOST_POINTS, SPARKLINE, Board
from distrain.errors import DistrainError
from distrain.page.data import page_data
from distrain.page.writer import document, fill
from distrain.storage import names
from distrain.storage.lines import read_file
from distrain.storage.retention import LOWEST_IS_BEST
from distrain.storage.runs.details import evidence_of
from distrain.storage.runs.listing import Run, WrongArgument
from distrain.storage.runs.logs import Follower

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable

    from starlette.requests import Request
    from starlette.responses import Response

_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_READ_S = 0.05
"""Long files are read for so long when somebody looks, so that no request waits much longer."""
_LAST_LINES, _MOST_LINES, _LOG_S = 300, 2000, 0.5
"""Lines of each log at first, and of all at a later look; seconds between two looks."""


class Pages:
    """The answers of the server.

    token: the first part of all paths.
    ask: sends a request, such as ``stop``, to a running run, and returns its answer; raises DistrainError or
    WrongArgument.
    """

    def __init__(self, board: Board, token: str, ask: Callable[[Run, str], str]) -> None:
        self._board, self._token, self._ask = board, token, ask

    def app(self) -> Starlette:
        """Return the application."""
        routes = [
            Route("/", self._index),
            Route("/data", self._data),
            Route("/runs/{name}/", self._page),
            Route("/runs/{name}/evidence/{file:path}", self._evidence),
            Route("/runs/{name}/log", self._log),
            Route("/runs/{name}/{word}", self._request, methods=["POST"]),
        ]
        below = [Mount(f"/{self._token}", routes=routes)]
        guard = [Middleware(BaseHTTPMiddleware, dispatch=self._guard)]
        refused: Any = dict.fromkeys((DistrainError, WrongArgument, OSError, ValueError, OverflowError), self._refuse)
        return Starlette(routes=below, middleware=guard, exception_handlers=refused)

    async def _refuse(self, _: Request, error: Exception) -> Response:
        return responses.PlainTextResponse(str(error), 409)

    async def _guard(self, request: Request, answer: RequestResponseEndpoint) -> Response:
        if secrets.compare_digest(request.url.path.split("/")[1].encode(), self._token.encode()):
            response = await answer(request)
        else:
            response = responses.PlainTextResponse("Open the URL that `distrain board` has printed.", 403)
        response.headers.update(_HEADERS)
        return response

    async def _index(self, _: Request) -> Response:
        facts = {"storage": str(self._board.storage), "lowestIsBest": LOWEST_IS_BEST.pattern}
        return responses.HTMLResponse(fill("board", facts))

    async def _data(self, request: Request) -> Response:
        with contextlib.suppress(OSError):  # the storage is away for a while: the rows stay
            self._board.look()
        self._board.read(_READ_S)
        query = request.query_params
        metrics = query.getlist("metric")
        points = MOST_POINTS if len(metrics) < 2 else 3 * SPARKLINE
        return _json(self._board.data(int(query.get("since", 0)), metrics, query.getlist("run"), points))

    async def _page(self, request: Request) -> Response:
        data = await run_in_threadpool(page_data, self._run(request).location)
        return responses.HTMLResponse(document(data).encode("utf-8", "replace"))

    async def _evidence(self, request: Request) -> Response:
        folder, file = self._run(request).location, request.path_params["file"]
        if file not in await run_in_threadpool(evidence_of, folder):
            raise HTTPException(404)
        found = await run_in_threadpool(read_file, f"{folder}/{names.EVIDENCE}/{file}", str(folder))
        return responses.PlainTextResponse(found)

    async def _log(self, request: Request) -> Response:
        """Answer the last lines of all ranks, each as JSON, then new ones until the run ends."""
        follower = Follower(self._run(request), None, None, _LAST_LINES)

        async def lines() -> AsyncIterator[str]:
            is_over = False
            while not is_over:
                is_over = not self._run(request).is_active
                found = await run_in_threadpool(deque, follower.new_lines(is_over=is_over), _MOST_LINES)
                yield "".join(f"{json.dumps(line)}\n" for line in found)
                await asyncio.sleep(_LOG_S)

        return responses.StreamingResponse(lines(), media_type="text/plain")

    async def _request(self, request: Request) -> Response:
        word = request.path_params["word"]
        if word not in ("stacks", "stop"):
            raise HTTPException(404)
        return responses.PlainTextResponse(await run_in_threadpool(self._ask, self._run(request), word))

    def _run(self, request: Request) -> Run:
        try:
            return self._board[request.path_params["name"]]
        except KeyError:
            raise HTTPException(404) from None


def _json(data: object) -> Response:
    """Answer in ASCII. Names of directories may have bytes that are not UTF-8, which a JSONResponse cannot send."""
    return responses.Response(json.dumps(data, separators=(",", ":"), allow_nan=False), media_type="application/json")


def serve(board: Board, listener: socket.socket, token: str, ask: Callable[[Run, str], str]) -> None:
    """Serve the board until SIGINT or SIGTERM."""
    app = Pages(board, token, ask).app()
    config = uvicorn.Config(app, log_level="warning", server_header=False, timeout_graceful_shutdown=1)
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])
