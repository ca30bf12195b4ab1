"""The board as a web server for the browser of one user. Runs in: the process of the board.

It listens at 127.0.0.1 only. Every request needs the token of this server: the first one in its URL, later ones in a
cookie, and a POST in a header, which pages of other servers cannot send. A wrong Host header is refused, so no other
name leads here (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import warnings
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from distrain.board.export import board_document
from distrain.board.runs import SPARKLINE, Board
from distrain.errors import DistrainError
from distrain.page.data import page_data
from distrain.page.writer import document
from distrain.storage import names
from distrain.storage.runs.details import evidence_of
from distrain.storage.runs.listing import RUNNING, STARTING, Run, WrongArgument
from distrain.storage.runs.logs import Follower

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send


HOST = "127.0.0.1"
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_READ_S, _PAUSE_S = 0.02, 0.03
"""Long files are read so long at a time, so that no request waits longer; between two times there is a pause."""
_POINTS = 600
"""Points of a curve in the plot."""
_MOST_FOLLOWERS, _LAST_LINES, _MOST_LINES = 16, 300, 2000


class Guard:
    """Lets only requests with the token through."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token
        self._cookie = f"distrain_{hashlib.sha256(token.encode()).hexdigest()[:12]}"
        """Browsers send the cookies of all ports of a host, so each server has a name of its own."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        app: ASGIApp = self._app
        if request.method == "POST":
            is_known = self._is_token(request.headers.get("x-token"))
        else:
            is_known = self._is_token(request.cookies.get(self._cookie))
            if self._is_token(request.query_params.get("token")) and scope["path"] == "/":
                app = RedirectResponse("./", 303)  # the token stays in no history
                app.set_cookie(self._cookie, self._token, httponly=True, samesite="lax")
                is_known = True
        if not is_known:
            app = PlainTextResponse("Open the URL that `distrain board` has printed: it has the token.", 403)
        await app(scope, receive, send_safely)

    def _is_token(self, given: str | None) -> bool:
        return given is not None and secrets.compare_digest(given.encode(), self._token.encode())


class Pages:
    """What the server answers.

    ask: sends a request, such as ``stop``, to a running run, and returns its answer; raises DistrainError or
    WrongArgument.
    """

    def __init__(self, board: Board, token: str, ask: Callable[[Run, str], str]) -> None:
        self._board, self._token, self._ask = board, token, ask
        self._followers: OrderedDict[str, Follower] = OrderedDict()

    def app(self) -> Starlette:
        """Return the application."""
        routes = [
            Route("/", self._index),
            Route("/data", self._data),
            Route("/curves", self._curves),
            Route("/runs/{name}/", self._page),
            Route("/runs/{name}/evidence/{file:path}", self._evidence),
            Route("/runs/{name}/log", self._log),
            Route("/runs/{name}/{word}", self._request, methods=["POST"]),
        ]
        middleware = [
            Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"], www_redirect=False),
            Middleware(Guard, token=self._token),
        ]
        return Starlette(routes=routes, middleware=middleware, lifespan=self._reading)

    @contextlib.asynccontextmanager
    async def _reading(self, _: Starlette) -> AsyncIterator[None]:
        async def read() -> None:
            while True:
                await asyncio.sleep(_PAUSE_S if self._board.read(_READ_S) else 4 * _PAUSE_S)

        task = asyncio.create_task(read())
        yield
        task.cancel()

    async def _index(self, _: Request) -> Response:
        self._look()
        return HTMLResponse(board_document(self._board, [self._board.metric()], points=SPARKLINE, token=self._token))

    async def _data(self, request: Request) -> Response:
        self._look()
        since, metric = int(request.query_params.get("since", 0)), request.query_params.get("metric", "")
        return JSONResponse(self._board.data(since, [metric]))

    def _look(self) -> None:
        with contextlib.suppress(OSError):  # the storage is away for a while: the rows stay
            self._board.look()
        self._board.read(_READ_S)

    async def _curves(self, request: Request) -> Response:
        query = request.query_params
        return JSONResponse(self._board.curves(query.getlist("run"), query.get("metric", ""), _POINTS))

    async def _page(self, request: Request) -> Response:
        data = await run_in_threadpool(page_data, self._run(request).location)
        return HTMLResponse(document(data))

    async def _evidence(self, request: Request) -> Response:
        run, file = self._run(request), request.path_params["file"]
        if file not in await run_in_threadpool(evidence_of, run.location):
            raise HTTPException(404)
        return FileResponse(run.location / names.EVIDENCE / file, media_type="text/plain")

    async def _log(self, request: Request) -> Response:
        """Answer new lines of the logs of all ranks. ``reader`` is a name that the browser has chosen."""
        run, reader = self._run(request), f"{request.path_params['name']}/{request.query_params.get('reader')}"
        follower = self._followers.setdefault(reader, Follower(run, None, None, _LAST_LINES))
        self._followers.move_to_end(reader)
        if len(self._followers) > _MOST_FOLLOWERS:
            self._followers.popitem(last=False)
        is_over = run.state not in (RUNNING, STARTING)
        lines = await run_in_threadpool(lambda: list(follower.new_lines(is_over=is_over)))
        return JSONResponse(lines[-_MOST_LINES:])

    async def _request(self, request: Request) -> Response:
        word = request.path_params["word"]
        if word not in ("stacks", "stop"):
            raise HTTPException(404)
        try:
            return PlainTextResponse(await run_in_threadpool(self._ask, self._run(request), word))
        except (DistrainError, WrongArgument, OSError) as error:
            return PlainTextResponse(str(error), 409)

    def _run(self, request: Request) -> Run:
        try:
            return self._board[request.path_params["name"]]
        except KeyError:
            raise HTTPException(404) from None


def serve(board: Board, listener: socket.socket, token: str, ask: Callable[[Run, str], str]) -> None:
    """Serve the board until SIGINT or SIGTERM."""
    warnings.simplefilter("ignore")  # damaged lines of metrics
    app: Any = Pages(board, token, ask).app()
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=1)
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])
