"""A script that writes facts about its interpreter to the file that FACTS names, and then how it ends. See the test."""

# ruff: noqa: SIM115

import atexit
import faulthandler
import gc
import json
import multiprocessing
import os
import resource
import signal
import sys
import threading
import traceback
import warnings

import __main__

STREAMS = (sys.stdin, sys.stdout, sys.stderr)
SIGNALS = [number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)]
STATUS = dict(line.rstrip("\n").split(":\t", 1) for line in open("/proc/self/status") if ":\t" in line)
LIMITS = [name for name in vars(resource) if name.startswith("RLIMIT_")]


def kind(value):
    return f"{type(value).__module__}.{type(value).__qualname__}"


facts = {
    "__name__": __name__,
    "__file__": __file__,
    "__spec__": repr(__spec__),
    "__main__": sys.modules["__main__"] is __main__ and vars(__main__) is globals(),
    "argv": sys.argv,
    "flags": {name: getattr(sys.flags, name) for name in dir(sys.flags) if name.islower() and name[0] != "_"}
    | {"count": None, "index": None},
    "warnoptions": sys.warnoptions,
    "path[0]": sys.path[0],
    "path": sys.path[1:],
    "meta_path": [getattr(one, "__name__", kind(one)) for one in sys.meta_path],
    "excepthook": [sys.excepthook is sys.__excepthook__, kind(sys.excepthook)],
    "breakpointhook": sys.breakpointhook is sys.__breakpointhook__,
    "input": kind(input),
    "depth": len(traceback.extract_stack()),
    "gc.freeze": gc.get_freeze_count(),
    "warnings.filters": [
        [one[0], getattr(one[1], "pattern", None), one[2].__name__, one[4]] for one in warnings.filters
    ],
    "streams": [kind(one) for one in STREAMS],
    "streams, originals": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
    "streams, encoding": [[one.encoding, one.errors, one.newlines] for one in STREAMS],
    "streams, buffering": [[one.line_buffering, one.write_through] for one in STREAMS],
    "stdin, read": sys.stdin.read(),
    "handlers": {number: repr(signal.getsignal(number)) for number in SIGNALS if number < signal.SIGRTMIN},
    "real-time handlers": {number: repr(signal.getsignal(number)) for number in SIGNALS if number >= signal.SIGRTMIN},
    "signals": {name: STATUS[name] for name in ("SigBlk", "SigPnd", "ShdPnd")},
    "signals, caught": int(STATUS["SigCgt"], 16) & ((1 << 31) - 1),
    "faulthandler": faulthandler.is_enabled(),
    "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
    "threads": [[one.name, one.daemon] for one in threading.enumerate()],
    "native threads": len(os.listdir("/proc/self/task")),
    "main thread": threading.current_thread() is threading.main_thread(),
    "cwd": os.getcwd(),
    "session": os.getsid(0) == os.getpid(),
    "children": open(f"/proc/self/task/{os.getpid()}/children").read(),
    "open files": sorted(
        os.readlink(f"/proc/self/fd/{fd}").split(":")[0]
        for fd in os.listdir("/proc/self/fd")
        if int(fd) > 2 and os.path.exists(f"/proc/self/fd/{fd}")
    ),
    "environment": dict(os.environ),
    "multiprocessing": [multiprocessing.get_start_method(allow_none=True), multiprocessing.current_process().name],
    "cmdline": open("/proc/self/cmdline").read().split("\0"),
    "modules": sorted({name.partition(".")[0] for name in sys.modules}),
    "atexit": atexit._ncallbacks(),
}
facts["environment"].pop("FACTS")


def note(text):
    facts["at exit"] = [*facts.get("at exit", []), text]
    with open(os.environ["FACTS"] + os.environ.get("RANK", ""), "w") as file:
        json.dump(facts, file, default=str)


def end_late():
    threading.main_thread().join()
    note("thread")


def hook(error_type, error, trace):
    is_last = sys.last_type is error_type and sys.last_value is error and sys.last_traceback is trace
    note(f"hook: {error!r}, {is_last}, {error.__traceback__ is trace}, {trace.tb_frame.f_code.co_name}")
    raise RuntimeError("in the hook")


note("end")
if os.environ.get("RANK", "0") == "0":
    sys.excepthook = hook
    threading.Thread(target=end_late).start()
    atexit.register(lambda: note("exit handler"))
    raise ValueError("the last line")
