"""A webhook: it posts JSON when a run ends, fails or restarts. Runs in: coordinator."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.parse import urlsplit

from distrain.api.observer import AttemptBegan, AttemptEnded, Ended, Observer, RunBegan
from distrain.system.log import warn
from distrain.system.text import duration

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distrain.api.observer import Fact

_TRIES = 3
_PAUSE_S = 1.0
"""Seconds before the second try, and twice as many before the third."""


class Webhook(Observer):
    """Posts JSON to a URL when a run ends, fails or restarts; see docs/observers.md for the fields.

    timeout_s: seconds to wait for an answer. A server that does not answer, or answers with 5xx, is tried three times.
    headers: further headers of the request.

    ::

        run_config = RunConfig(callbacks=[Webhook("https://hooks.example.com/services/T0/B0")])
    """

    hears = (RunBegan, AttemptBegan, AttemptEnded, Ended)

    def __init__(self, url: str, *, timeout_s: float = 5.0, headers: Mapping[str, str] | None = None) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(f"Webhook: the URL must begin with http:// or https://, got {url!r}")
        self._url = url
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._run: RunBegan
        self._began = 0.0
        self._attempt = -1
        self._culprit: dict[str, object] = {}
        """The reason why the last attempt ended."""

    def hear(self, fact: Fact) -> None:
        match fact:
            case RunBegan():
                self._run, self._began, self._attempt, self._culprit = fact, time.monotonic(), -1, {}
            case AttemptBegan(attempt=attempt):
                is_restart, self._attempt = self._attempt >= 0, attempt
                if is_restart:
                    self._post("restarted", "has restarted", fact.now - self._began)
                self._culprit = {}
            case AttemptEnded(failures=[culprit, *_]):
                self._culprit = {"rank": culprit.rank, "host": culprit.host, "error": culprit.summary}
            case AttemptEnded(why=str(why)):
                self._culprit = {"error": why}
            case Ended():
                if fact.error is not None and not self._culprit:
                    self._culprit = {"error": str(fact.error).partition("\n")[0] or type(fact.error).__name__}
                verb = "was" if fact.status == "stopped" else "has"
                self._post(fact.status, f"{verb} {fact.how}", fact.seconds)

    def _post(self, status: str, what: str, seconds: float) -> None:
        facts = {"name": self._run.name, "status": status, "attempt": self._attempt, "seconds": round(seconds, 3)}
        who = f"rank {self._culprit['rank']} on {self._culprit['host']}: " if "rank" in self._culprit else ""
        error = f": {who}{self._culprit['error']}" if self._culprit else ""
        text = f"{self._run.name} {what} after {duration(seconds)}{error}"
        body = {**facts, "directory": self._run.location, "rank": None, "host": None, "error": None, **self._culprit}
        self._send(json.dumps({**body, "text": text}).encode())

    def _send(self, body: bytes) -> None:
        problem = ""
        for number in range(_TRIES):
            time.sleep(_PAUSE_S * number)
            request = urllib.request.Request(self._url, body, self._headers)  # noqa: S310 - the scheme is checked
            try:
                with urllib.request.urlopen(request, timeout=self._timeout_s):  # noqa: S310
                    return
            except OSError as error:
                problem = str(error)
                if isinstance(error, HTTPError) and error.code < 500:
                    break
        warn(f"the webhook at {urlsplit(self._url).hostname} could not be notified: {problem}")
