"""Masks in texts and JSON for values that look secret by their name or their form. Runs in: anywhere."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

HIDDEN = "***"
_WORD_END = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_SECRET_WORD = re.compile(
    r"(?:[a-z0-9]*(?:apikey|accesskey|credential|passphrase|passwd|password|privatekey|secret|secretkey|token)"
    r"|auth|authorization|bearer|key|pwd)(s?)\d*"
)
"""A word of a name that says that the value is secret. The group: of several (``max_tokens``)."""
_NUMBER = re.compile(r"[-+]?[\d._]+(?:e[-+]?\d+)?[kMGTB]?", re.IGNORECASE)
_NO_SECRETS = ("true", "false", "none")
_CREDENTIALS_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_NAME = re.compile(r"""(?<![\w.\-])([\w.\-]+)["'\]]*\s*[=:]\s*|(?<![^\s"'])(--?[\w.\-]+)(?:\s+|["']\s*,\s*)(?!-)""")
"""A name in front of a value: ``token=``, ``"token": ``, ``Authorization: ``, ``--token ``, ``"--token", ``."""
_QUOTED = re.compile(r"""(["'])(?:(?!\1)[^\\]|\\.)*\1""")
_WORD = re.compile(r"\S+")
_REST = re.compile(r".+", re.DOTALL)
_VALUE = re.compile(r"""[^\s"',;&)}\]]+""")
_ENVIRONMENT = ("env", "env_vars", "environment")
"""Names of objects that hold environment variables, of which only the names are kept."""
_FORMS = [
    (re.compile(pattern, re.DOTALL | re.IGNORECASE), rf"\1{HIDDEN}")
    for pattern in (
        r"()-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
        r"([?&](?:[\w-]*signature|sig)=)[^&\s\"']+",
        r"(\b(?:bearer|authorization[\"']?[:=] ?[\"']?(?:basic|token))\s+)[\w.~+/=-]+",
        r"(\B--env[ =][\"']?\w+=)[^\s\"',]+",
        r"(\bwandb[^\n]{0,60}?)\b[0-9a-f]{40}\b",  # a commit looks the same
        r"()\b(?-i:(?:AKIA|ASIA)[0-9A-Z]{16})\b",
        r"()\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abprs]-|AIza|wandb_v\d_|npm_|pypi-)[\w-]{16,}",
        r"()\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+",  # a JSON web token
    )
]


def is_secret(name: str, value: object) -> bool:
    """Tell by a name if a value is secret. Names may be snake_case, kebab-case or camelCase.

    A ``password`` may be a number. Other numbers are shown: ``max_tokens``, ``token_len``, ``num_key_value_heads``.
    """
    if value is None or isinstance(value, bool) or (isinstance(value, str) and value.lower() in _NO_SECRETS):
        return False
    if name.endswith("Error"):  # KeyError
        return False
    words = [word.lower() for word in _WORD_END.split(name) if word]
    if isinstance(value, (int, float)) or (isinstance(value, str) and _NUMBER.fullmatch(value)):
        last = _SECRET_WORD.fullmatch(words[-1]) if words else None
        return last is not None and not last[1]
    return any(map(_SECRET_WORD.fullmatch, words))


def hidden(text: str, unquoted: re.Pattern[str] = _REST) -> str:
    """Return a text with ``***`` for the values in it whose names look secret.

    Where such a value ends is known only if it is in quotes; otherwise, the rest of the text is hidden with it, or what
    ``unquoted`` matches.

    >>> [hidden(text) for text in ("--set=token=X", "https://me:X@host/?accessToken=X", "{'secretKey': 'X', 'a': 1}")]
    ['--set=token=***', 'https://***@host/?accessToken=***', "{'secretKey': ***, 'a': 1}"]
    """
    text = _CREDENTIALS_IN_URL.sub(HIDDEN, text)
    shown, at = "", 0
    for match in _NAME.finditer(text):
        name = match[1] or match[2]
        if match.start() < at or not is_secret(name, "?"):  # a long text has many names
            continue
        value = _QUOTED.match(text, match.end()) or (_WORD if match[2] else unquoted).match(text, match.end())
        if value and is_secret(name, value[0].strip("\"'")):
            shown, at = shown + text[at : match.end()] + HIDDEN, value.end()
    return shown + text[at:]


def secret_variables() -> list[str]:
    """Return the values of this process's environment variables whose names look secret, the longest first."""
    looks_secret = re.compile("TOKEN|SECRET|PASSWORD|KEY|CREDENTIAL", re.IGNORECASE).search
    found = {value for name, value in os.environ.items() if looks_secret(name) and len(value) >= 6}  # not ``true``
    return sorted(found, key=len, reverse=True)


def masked(value: Any, known: Sequence[str], name: str = "") -> Any:
    """Return a text, or JSON, with ``***`` for what looks secret.

    known: secrets that are masked wherever they occur. name: that of the value.

    >>> masked({"api_key": "x", "argv": ["--password", "y", "--lr", "1"]}, [])
    {'api_key': '***', 'argv': ['--password', '***', '--lr', '1']}
    >>> masked("git clone https://me:pass@host/x; HF_TOKEN=hf_abc python train.py, 128 tokens", [])
    'git clone https://***@host/x; HF_TOKEN=*** python train.py, 128 tokens'
    """
    if isinstance(value, dict):
        kept = {str(key): HIDDEN for key in value} if name in _ENVIRONMENT else value
        return {masked(key, known): masked(item, known, key) for key, item in kept.items()}
    if isinstance(value, list):
        names = [name, *(item if isinstance(item, str) and " " not in item else "" for item in value)]
        return [masked(item, known, before) for item, before in zip(value, names, strict=False)]
    if (value and is_secret(name, value)) or name == "--env":
        return HIDDEN
    if isinstance(value, str):
        for secret in known:
            value = value.replace(secret, HIDDEN)
        for form, replacement in _FORMS:
            value = form.sub(replacement, value)
        return hidden(value, _VALUE)
    return value
