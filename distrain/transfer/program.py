"""distrain itself, copied to hosts that do not have it, with the small packages that it needs. Runs in: coordinator.

The command that ssh runs on a host starts with :data:`_ARRIVE`, before anything of distrain is there. If the host has
this interpreter and this distrain at the same paths, it uses them. Else it looks for this distrain in the host's cache,
by a key of its content. If there is none, it asks for it, reads it from stdin and stores it under another name. A
rename puts it in its place, so that nobody ever finds a part of it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import zipfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from distrain import wire
from distrain.system import process

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_NEEDED = ("cloudpickle", "psutil")
"""Packages that travel with distrain. Those of the host's interpreter come first."""
_SUFFIXES = (".py", ".so", ".typed", ".css", ".html", ".js", ".md", "LICENSE")
"""The last five are for the page of a run, and for commands."""
_DIGEST_BYTES, _SIZE_BYTES = 32, 8

# A lock shows that the directory is in use, as long as the program lives. There are no single quotes in this code: the
# fish shell would not read them as other shells do.
_ARRIVE = """\
import fcntl, os, stat
def arrive():
    if sys.version_info < (3, 10):
        sys.exit("distrain needs Python 3.10 or later, and %s is %s" % (sys.executable, sys.version.split()[0]))
    key = sys.argv.pop(2)
    if sys.executable == EXECUTABLE and os.path.isfile(sys.argv[1] + "/__init__.py"): return
    parent = os.environ.get("XDG_CACHE_HOME", "")
    usual = os.path.join(parent if os.path.isabs(parent) else "~/.cache", "distrain")
    cache = os.path.expanduser(os.environ.get("DISTRAIN_CACHE") or usual)
    home = os.path.join(cache, "programs", key)
    try:
        os.makedirs(cache, mode=0o700, exist_ok=True)
        status = os.lstat(cache)
        if stat.S_ISLNK(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH:
            raise OSError("others may have put programs into " + cache)
        if not os.path.isfile(home + "/BROUGHT"): bring(home)
        fd = os.open(home, os.O_RDONLY)
    except OSError as error:
        cure = "name another directory with env.DISTRAIN_CACHE= in the hostfile, or free some space there"
        sys.exit("distrain cannot be stored there: %s; %s" % (error, cure))
    try: os.utime(home)  # it was used today, so nobody deletes it just now
    except OSError: pass  # it is read-only
    try: fcntl.flock(fd, fcntl.LOCK_SH)
    except OSError: pass  # a file system without locks
    sys.argv[1] = home + "/distrain"
def bring(home):
    import hashlib, io, shutil, tempfile, zipfile
    os.makedirs(os.path.dirname(home), mode=0o700, exist_ok=True)
    new = tempfile.mkdtemp(prefix=".new-", dir=os.path.dirname(home))
    try:
        os.write(1, ASK)
        data = read(int.from_bytes(read(SIZE_BYTES), "big"))
        if hashlib.sha256(data).digest() != read(DIGEST_BYTES): raise OSError("it arrived damaged")
        zipfile.ZipFile(io.BytesIO(data)).extractall(new)
        open(new + "/BROUGHT", "w").close()
        try: os.rename(new, home)
        except OSError:
            if not os.path.isfile(home + "/BROUGHT"):  # others have deleted a part of it
                shutil.rmtree(home)
                os.rename(new, home)
    finally: shutil.rmtree(new, ignore_errors=True)
def read(size):
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part: sys.exit(1)
        data += part
    return data
arrive()
"""


def arrival_argv(python: str, program: str, *arguments: str, flags: Sequence[str] = ()) -> list[str]:
    """Return the command line that runs a program of this distrain on a host, which may not have it.

    python: the interpreter there. If empty, it is the path of this one, else any of the same version in PATH.
    """
    ask = wire.MAGIC + wire.encode(wire.AskForProgram())
    values = {
        "BROUGHT": process.BROUGHT,
        "ASK": f'bytes.fromhex("{ask.hex()}")',
        "EXECUTABLE": json.dumps(sys.executable),
        "SIZE_BYTES": _SIZE_BYTES,
        "DIGEST_BYTES": _DIGEST_BYTES,
    }
    prepare = _ARRIVE
    for name, value in values.items():
        prepare = prepare.replace(name, str(value))
    argv = process.bootstrap_argv(
        program, *arguments, python=[python] if python else _find_python(), prepare=prepare, flags=flags
    )
    at = argv.index(program)
    return [*argv[:at], key(), *argv[at:]]


def _find_python() -> list[str]:
    """Return a command that runs this interpreter, or one of the same version, with the arguments that follow."""
    version = ".".join(map(str, sys.version_info[:2]))
    script = (
        'own=$1; version=$2; shift 2; if command -v "$own" >/dev/null 2>&1; then exec "$own" "$@"; fi; '
        'for python in "python$version" python3 python; do '
        'if "$python" -c "import sys; sys.exit(\\"%d.%d\\" % sys.version_info[:2] != \\"$version\\")" 2>/dev/null; '
        'then exec "$python" "$@"; fi; done; command -v python3 >/dev/null && exec python3 "$@"; '
        'echo "no $own, and no python$version, python3 or python in PATH=$PATH" >&2; exit 127'
    )
    return ["sh", "-c", script, "sh", sys.executable, version]


@cache
def key() -> str:
    """Return a digest of the contents of all files that travel."""
    hasher = hashlib.sha256()
    for name, path in _files():
        data = path.read_bytes()
        hasher.update(f"{name}\0{len(data)}\0".encode() + data)
    return hasher.hexdigest()[:20]


@cache
def parcel() -> bytes:
    """Return the bytes that the host reads: the size of a zip file, the zip file, and its digest."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, path in _files():
            archive.writestr(name, path.read_bytes())
    data = buffer.getvalue()
    return b"".join((len(data).to_bytes(_SIZE_BYTES, "big"), data, hashlib.sha256(data).digest()))


def _files() -> Iterator[tuple[str, Path]]:
    """Yield the files of distrain and of the packages that travel with it, each with its name in the host's cache."""
    roots = [process.own_package()]
    for name in _NEEDED:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            roots.append(Path(spec.submodule_search_locations[0]))
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(name for name in folders if name not in ("__pycache__", "tests"))
            for name in sorted(names):
                if name.endswith(_SUFFIXES):
                    path = Path(folder, name)
                    yield f"{root.name}/{path.relative_to(root)}", path
