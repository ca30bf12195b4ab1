"""Masks for values in texts that look secret by their name or their form. Runs in: anywhere."""

from __future__ import annotations

import re

HIDDEN = "***"
_WORDS = "key|token|secret|credential|password|passwd|passphrase|pwd|auth|authorization|bearer"
_SECRET = re.compile(rf"(?:{_WORDS})s?(?![a-z])", re.IGNORECASE)
"""In the name of a secret: ``api_key``, ``accessToken``, but neither ``KeyError`` nor ``tokenizer``."""
_LAST = re.compile(rf"(?<![a-z])(?:{_WORDS})\d*[^a-z\d]*$", re.IGNORECASE)
"""At the end of the name of a secret that is a number. Others are sizes: ``max_tokens``, ``num_key_value_heads``."""
_NUMBER = re.compile(r"[-+]?[\d._]+(?:e[-+]?\d+)?[kmgtb]?")
_NAME = rf"[\w.-]*(?i:{_SECRET.pattern})[\w.-]{{0,40}}"
_NAMED = re.compile(
    rf"""(?P<name>(?<![\w.-])(?:{_NAME}["'\\\]]*\s*[=:]\s*|--?{_NAME}(?:\s+|["']\s*,\s*)(?!-)))"""
    r"""(?P<value>(?P<quote>\\*["'])(?:(?!(?P=quote))(?:[^\\\n]|\\.))*(?P=quote)?|\[[^\]]*|\{[^}]*|[^\s"',;&)}\]]+)"""
)
"""A name and its value: ``token=x``, ``"token": "x"``, ``--token x``, ``"--token", "x"``; also in quoted JSON."""
_START = r"()(?:(?<![A-Za-z0-9_])|(?<=\\n))"
_FORMS = [
    (re.compile(pattern, re.DOTALL | re.IGNORECASE), rf"\1{HIDDEN}")
    for pattern in (
        r"()(?<=://)[^/@\s]+(?=@)",  # credentials in a URL
        r"()-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
        r"([?&](?:[\w-]*signature|sig)=)[^&\s\"']+",
        r"(\b(?:bearer|authorization[\"']?[:=] ?[\"']?(?:basic|token))\s+)[\w.~+/=-]+",
        r"(\B--env(?:[ =]|[\"'],\s*)[\"']?\w+=)[^\s\"',]+",
        rf"{_START}(?-i:(?:AKIA|ASIA)[0-9A-Z]{{16}})\b",
        rf"{_START}(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abprs]-|AIza|wandb_v\d_|npm_|pypi-)[\w-]{{16,}}",
        rf"{_START}eyJ[\w-]{{8,}}\.[\w-]{{8,}}\.[\w-]+",  # a JSON web token
    )
]


def is_secret(name: str, value: object) -> bool:
    """Tell by a name, and by what cannot be one, if a value is secret."""
    text = str(value).lower() if value is None or isinstance(value, (str, int, float)) else ""
    if text in ("true", "false", "none", "null"):
        return False
    return (_LAST if _NUMBER.fullmatch(text) else _SECRET).search(name) is not None


def hidden(text: str) -> str:
    """Return a text with ``***`` for the values in it that look secret.

    >>> [hidden(text) for text in ("--set=token=X", "https://me:X@host/?accessToken=X", "{'secretKey': 'X', 'a': 1}")]
    ['--set=token=***', 'https://***@host/?accessToken=***', "{'secretKey': '***', 'a': 1}"]
    >>> hidden("git clone https://me:pass@host/x; HF_TOKEN=hf_abc python train.py, 128 tokens")
    'git clone https://***@host/x; HF_TOKEN=*** python train.py, 128 tokens'
    """
    for form, replacement in _FORMS:
        text = form.sub(replacement, text)
    return _NAMED.sub(_hide, text)


def _hide(match: re.Match[str]) -> str:
    if not is_secret(match["name"], match["value"].strip("\\\"'")):
        return match[0]
    quote = match["quote"] or ""
    return f"{match['name']}{quote}{HIDDEN}{quote}"
