"""Parser for hostfiles and for lists of hosts such as ``a:4,b:4``. Runs in: anywhere.

It does no I/O: the caller reads the file. Each line describes a host::

    # comments and empty lines are ignored
    alpha slots=4
    root@beta:2222 slots=2 gpus=0,2          # user, port of ssh; two of its GPUs
    [fd77::13] slots=2 python=/opt/py/bin/python cwd="/data/my project" env.NCCL_DEBUG=INFO
    trainer_3 slots=1 transport="docker exec -i {host}"

Words may be quoted as in a shell. ``localhost`` is this machine, without ssh.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from distrain.errors import HostfileError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

LOCALHOST = "localhost"
_KEYS = ("slots", "gpus", "python", "cwd", "transport", "rack")
TRANSPORTS = ("auto", "local", "ssh", "slurm")
"""Names of transports. Any other value is the command line of a program, with ``{host}`` in it."""
ALWAYS_SET = frozenset(
    {
        *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "TF_CONFIG"),
        *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
        "TORCHELASTIC_USE_AGENT_STORE",
    }
)
"""Variables that distrain sets for each rank."""
_HOST = re.compile(
    r"(?:(?P<user>[^\s\0@:,;\[\]=-][^\s\0@:,;\[\]=]*)@)?"
    # A name may be an alias of the ssh configuration. The characters that are excluded are those that ssh refuses.
    r"(?:\[(?P<v6>[^\]\0]*)\]|(?P<name>(?!-)[^\s\0/@:,;\[\]='\"`$\\&<>|(){}]+))"
    r"(?::(?P<number>\d+))?"
)
_HOST_FORMS = ": must be host, user@host, host:number or [IPv6 address]"
_SLOTS_FORMS = (
    "must be host:slots or [IPv6 address]:slots, such as alpha:4,beta:4; "
    "the port of ssh belongs in ~/.ssh/config, or in a hostfile: alpha:2222 slots=4"
)
_MOST_SLOTS = 1024
"""A larger number after the colon is taken for a port. A hostfile may have more slots."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_GPU = re.compile(r"\d+|(GPU|MIG)-[0-9A-Za-z/-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """One host, as the user describes it.

    name: unique name for messages: the address, with the port if one was given.
    slots: number of ranks that it takes; None for any number.
    gpus: the GPUs that its ranks may use, as CUDA_VISIBLE_DEVICES names them; empty for all.
    python: its interpreter, whose distrain runs there.
    cwd: the working directory of its workers.
    transport: how it is reached, see :func:`check_transport`; None as the other hosts.
    rack: name of what it can fail together with; copies of its checkpoints in memory go to a host of another rack.
    """

    name: str = LOCALHOST
    address: str = LOCALHOST
    user: str | None = None
    port: int | None = None
    slots: int | None = None
    gpus: tuple[str, ...] = ()
    python: str | None = None
    cwd: str | None = None
    transport: str | None = None
    rack: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_local(self) -> bool:
        """True for this machine, which needs no ssh."""
        return self.name == LOCALHOST and self.user is None


def parse_hostfile(text: str, source: str) -> tuple[HostSpec, ...]:
    """Return the hosts of a hostfile in their order. Raises HostfileError.

    source: the name of the file, for errors.
    """
    hosts: dict[str, tuple[HostSpec, int]] = {}
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):
        try:
            if "\0" in line:
                raise ValueError("this line contains a NUL byte, which no host name, path or variable can have")
            host = _parse_line(list(_words(line)))
            if host is None:
                continue
            if host.name.lower() in hosts:
                raise ValueError(f"{host.name} is already named in line {hosts[host.name.lower()][1]}")
        except ValueError as error:
            raise HostfileError(f"{source}:{number}: {error}") from None
        hosts[host.name.lower()] = host, number
    if not hosts:
        raise HostfileError(f"{source}: there is no host in it; write lines such as `{LOCALHOST} slots=2`")
    return tuple(host for host, _ in hosts.values())


def parse_hosts(hosts: str | Sequence[str], source: str) -> tuple[HostSpec, ...]:
    """Return the hosts of ``a:4,b:4``, or of a list of such parts, in their order. Raises HostfileError.

    The number after the colon is the number of slots, 1 by default and 1024 at most.
    source: the name of the option or variable, for errors.
    """
    parts = [part.strip() for text in ([hosts] if isinstance(hosts, str) else hosts) for part in text.split(",")]
    if not parts:
        raise HostfileError(f"{source}: there is no host in it; {_SLOTS_FORMS}")
    found: dict[str, HostSpec] = {}
    for part in parts:
        try:
            host, slots = _parse_host(part)
            if host.name.lower() in found:
                raise ValueError("named twice")
            if slots and int(slots) > _MOST_SLOTS:
                raise ValueError(f"{slots} would be the number of slots")
            found[host.name.lower()] = replace(host, slots=_count("slots", slots or "1"))
        except ValueError as error:
            text = str(error).removesuffix(_HOST_FORMS)
            said = text if repr(part) in text else f"{part!r}: {text}"
            raise HostfileError(f"{source}: {said}; {_SLOTS_FORMS}") from None
    return tuple(found.values())


def split_ssh_args(text: str, source: str) -> tuple[str, ...]:
    """Split arguments for ssh as a shell does. Raises HostfileError.

    source: the name of the option or variable, for errors.
    """
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise HostfileError(f"{source}: {text!r}: {str(error).lower()}") from None


def check_transport(text: str, source: str) -> str:
    """Return the transport: one of TRANSPORTS, or a command line with ``{host}`` in it. Raises HostfileError.

    source: the name of the option, field or variable, for errors.
    """
    try:
        _check_transport(text)
    except ValueError as error:
        raise HostfileError(f"{source}: {error}") from None
    return text


def _check_transport(text: str) -> None:
    if text in TRANSPORTS:
        return
    known = f"must be {', '.join(TRANSPORTS)}, or a command line such as 'docker exec -i {{host}}'"
    if "{host}" not in text:
        problem = "the command line must contain {host}" if " " in text else "unknown transport"
        raise ValueError(f"{text!r}: {problem}; {known}")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{text!r}: {str(error).lower()}; {known}") from None
    if "{" in words[0]:
        raise ValueError(f"{text!r}: the first word must be a program; {known}")


def _transport(host: HostSpec, text: str | None) -> str | None:
    if text is not None:
        _check_transport(text)
        if host.is_local and text not in ("auto", "local"):
            raise ValueError(f"transport={text}: {LOCALHOST} is this machine, which needs no transport")
    return text


def _words(line: str) -> Iterator[str]:
    """Split a line into words as a shell does, up to a comment.

    Raises ValueError for a quote that is not closed, and for a backslash at the end.
    """
    words = shlex.shlex(line, posix=True)
    words.whitespace_split, words.commenters = True, ""  # a # within a word begins no comment
    try:
        yield from takewhile(lambda word: not word.startswith("#"), words)
    except ValueError:
        if not words.token.startswith("#"):
            raise ValueError(f"a quote or a backslash is not closed: {line.strip()}") from None


def _parse_line(words: list[str]) -> HostSpec | None:
    if not words:
        return None
    host, port = _parse_host(words[0])
    options = dict(_option(word) for word in words[1:])
    if len(options) < len(words) - 1:
        raise ValueError("a key is given twice")
    gpus = _gpus(options["gpus"]) if "gpus" in options else ()
    slots = _count("slots", options["slots"]) if "slots" in options else len(gpus) or 1
    return replace(
        host,
        name=host.name if port is None else f"{_bracketed(host.address)}:{port}",
        port=None if port is None else _port(port),
        slots=slots,
        gpus=gpus,
        python=_path("python", options.get("python")),
        cwd=_path("cwd", options.get("cwd")),
        transport=_transport(host, options.get("transport")),
        rack=options.get("rack", ""),
        environment={key.removeprefix("env."): value for key, value in options.items() if key.startswith("env.")},
    )


def _parse_host(word: str) -> tuple[HostSpec, str | None]:
    """Split ``[user@]host[:number]`` into the host and the number. Raises ValueError."""
    found = _HOST.fullmatch(word)
    if found is None:
        raise ValueError(f"{word!r} is not a host{_HOST_FORMS}")
    address = found["name"]
    if address is None:
        try:
            address = str(ipaddress.IPv6Address(found["v6"]))
        except ValueError:
            raise ValueError(f"[{found['v6']}] is not an IPv6 address") from None
    return HostSpec(name=_bracketed(address), address=address, user=found["user"]), found["number"]


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _option(word: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    known = f"known are {', '.join(f'{name}=' for name in _KEYS)} and env.NAME="
    if not equals:
        raise ValueError(f"{word!r} is not of the form key=value; {known}")
    if key.startswith("env."):
        name = key.removeprefix("env.")
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"{key}: not a name of an environment variable")
        if name in ALWAYS_SET:
            raise ValueError(f"{key}: each rank is given its own {name}; leave it out")
        if key == "env.CUDA_VISIBLE_DEVICES":
            raise ValueError(f"{key}: write gpus={value} instead, so that distrain can count them")
    elif key not in _KEYS:
        raise ValueError(f"unknown key {key!r}; {known}")
    return key, value


def _count(key: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"{key}={text}: must be a whole number of at least 1; leave a host out that should not be used"
        )
    return int(text)


def _port(text: str) -> int:
    if not 1 <= int(text) <= 65535:
        raise ValueError(f"port {text}: must be between 1 and 65535")
    if int(text) < 22:  # no sshd listens there
        raise ValueError(f"{text} would be the port of ssh; for workers, write slots={text}")
    return int(text)


def _gpus(text: str) -> tuple[str, ...]:
    gpus = tuple(text.split(","))
    if not all(_GPU.fullmatch(gpu) for gpu in gpus):
        raise ValueError(f"gpus={text}: must be indices or UUIDs such as 0,2")
    if len(gpus) > 1 and gpus[0].startswith("MIG-"):
        raise ValueError(f"gpus={text}: CUDA shows a process one MIG instance only; name one")
    if len({"index" if gpu.isdigit() else gpu[:4] for gpu in gpus}) > 1:
        raise ValueError(f"gpus={text}: must be all indices, or all GPU-...; CUDA does not mix them")
    if len(set(gpus)) < len(gpus):
        raise ValueError(f"gpus={text}: a GPU is named twice")
    return gpus


def _path(key: str, text: str | None) -> str | None:
    if text is not None and not text.startswith("/"):
        raise ValueError(f"{key}={text}: must be an absolute path on that host")
    return text


def as_line(host: HostSpec) -> str:
    """Return the line of a hostfile that describes a host."""
    address = f"{host.user}@{_bracketed(host.address)}" if host.user else _bracketed(host.address)
    given = {
        "slots": host.slots,
        "gpus": ",".join(host.gpus),
        "python": host.python,
        "cwd": host.cwd,
        "transport": host.transport,
        "rack": host.rack,
        **{f"env.{name}": value for name, value in host.environment.items()},
    }
    words = [f"{address}:{host.port}" if host.port else address]
    return " ".join([*words, *(shlex.quote(f"{key}={value}") for key, value in given.items() if value)])
