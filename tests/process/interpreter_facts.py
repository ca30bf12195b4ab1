"""A script that writes facts about its interpreter to the file that FACTS names, and then how it ends. See the test."""

# ruff: noqa: SIM115

import atexit
import builtins
import faulthandler
import gc
import json
import locale
import multiprocessing
import os
import resource
import select
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


def annotated(value: int) -> None: ...


def kind(value):
    return f"{type(value).__module__}.{type(value).__qualname__}"


facts = {
    "__name__": __name__,
    "__file__": __file__,
    "__doc__": __doc__,
    "__spec__": repr(__spec__),
    "__package__": repr(__package__),
    "__cached__": repr(globals().get("__cached__", "none")),
    "__loader__": kind(__loader__),
    "__builtins__": __builtins__ is builtins,
    "__annotations__": repr(globals().get("__annotations__", "none")),
    "names of __main__": sorted(name for name in vars(__main__) if name.startswith("__")),
    "__main__": sys.modules["__main__"] is __main__ and vars(__main__) is globals(),
    "__mp_main__": "__mp_main__" in sys.modules,
    "annotations": repr(annotated.__annotations__),
    "code flags": annotated.__code__.co_flags,
    "code file": annotated.__code__.co_filename,
    "argv": sys.argv,
    "orig_argv": sys.orig_argv[-len(sys.argv) :],
    "executable": sys.executable,
    "prefix": sys.prefix,
    "flags": {name: getattr(sys.flags, name) for name in dir(sys.flags) if name.islower() and name[0] != "_"}
    | {"count": None, "index": None},
    "warnoptions": sys.warnoptions,
    "xoptions": sys._xoptions,
    "path[0]": sys.path[0],
    "path": sys.path[1:],
    "meta_path": [getattr(one, "__name__", kind(one)) for one in sys.meta_path],
    "path_hooks": len(sys.path_hooks),
    "dont_write_bytecode": sys.dont_write_bytecode,
    "excepthook": [sys.excepthook is sys.__excepthook__, kind(sys.excepthook)],
    "unraisablehook": sys.unraisablehook is sys.__unraisablehook__,
    "displayhook": sys.displayhook is sys.__displayhook__,
    "threading.excepthook": threading.excepthook is threading.__excepthook__,
    "breakpointhook": sys.breakpointhook is sys.__breakpointhook__,
    "input": kind(input),
    "last_value": hasattr(sys, "last_value"),
    "exc_info": sys.exc_info()[0] is None,
    "trace": [sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()],
    "recursionlimit": sys.getrecursionlimit(),
    "switchinterval": sys.getswitchinterval(),
    "int_max_str_digits": sys.get_int_max_str_digits() if hasattr(sys, "get_int_max_str_digits") else 0,
    "depth": len(traceback.extract_stack()),
    "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks)],
    "gc.freeze": gc.get_freeze_count(),
    "warnings.filters": [
        [one[0], getattr(one[1], "pattern", None), one[2].__name__, one[4]] for one in warnings.filters
    ],
    "showwarning": warnings.showwarning.__module__,
    "locale": [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(False)],
    "encodings": [sys.getdefaultencoding(), sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()],
    "streams": [kind(one) for one in STREAMS],
    "streams, originals": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
    "streams, names": [one.name for one in STREAMS],
    "streams, modes": [one.mode for one in STREAMS],
    "streams, fileno": [one.fileno() for one in STREAMS],
    "streams, isatty": [one.isatty() for one in STREAMS],
    "streams, encoding": [[one.encoding, one.errors, one.newlines] for one in STREAMS],
    "streams, buffering": [[one.line_buffering, one.write_through] for one in STREAMS],
    "streams, kinds": [[one.readable(), one.writable(), one.seekable(), one.closed] for one in STREAMS],
    "stdin, select": len(select.select([sys.stdin], [], [], 0)[0]),
    "stdin, inheritable": os.get_inheritable(0) and os.get_inheritable(1) and os.get_inheritable(2),
    "stdin, reconfigure": sys.stdin.reconfigure(encoding="utf-8"),
    "stdin, readline": sys.stdin.readline(),
    "stdin, read": sys.stdin.read(),
    "stdin, lines": list(sys.stdin),
    "stdin, bytes": str(sys.stdin.buffer.read()),
    "SIGTERM": repr(signal.getsignal(signal.SIGTERM)),
    "SIGINT": getattr(signal.getsignal(signal.SIGINT), "__name__", None),
    "handlers": {number: repr(signal.getsignal(number)) for number in SIGNALS if number < signal.SIGRTMIN},
    "real-time handlers": {number: repr(signal.getsignal(number)) for number in SIGNALS if number >= signal.SIGRTMIN},
    "signals": {name: STATUS[name] for name in ("SigBlk", "SigPnd", "ShdPnd")},
    "signals, ignored": int(STATUS["SigIgn"], 16) & ((1 << 31) - 1),
    "signals, caught": int(STATUS["SigCgt"], 16) & ((1 << 31) - 1),
    "wakeup_fd": signal.set_wakeup_fd(-1),
    "itimer": signal.getitimer(signal.ITIMER_REAL),
    "faulthandler": faulthandler.is_enabled(),
    "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
    "nice": [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))],
    "threads": [[one.name, one.daemon] for one in threading.enumerate()],
    "native threads": len(os.listdir("/proc/self/task")),
    "main thread": threading.current_thread() is threading.main_thread(),
    "stack_size": threading.stack_size(),
    "umask": [umask := os.umask(0o22), os.umask(umask)][0],
    "cwd": os.getcwd(),
    "user": [os.getresuid(), os.getresgid(), os.getgroups()],
    "session": os.getsid(0) == os.getpid(),
    "privileges": [STATUS[name] for name in ("Seccomp", "NoNewPrivs", "CapEff", "CapBnd")],
    "children": open(f"/proc/self/task/{os.getpid()}/children").read(),
    "open files": sorted(
        os.readlink(f"/proc/self/fd/{fd}").split(":")[0]
        for fd in os.listdir("/proc/self/fd")
        if int(fd) > 2 and os.path.exists(f"/proc/self/fd/{fd}")
    ),
    "environment": dict(os.environ),
    "multiprocessing": [multiprocessing.get_start_method(allow_none=True), multiprocessing.current_process().name],
    "parent process": multiprocessing.parent_process() is None,
    "comm": open("/proc/self/comm").read(),
    "cmdline": open("/proc/self/cmdline").read().split("\0"),
    "modules": sorted({name.partition(".")[0] for name in sys.modules}),
    "atexit": atexit._ncallbacks(),
    "exit": [kind(exit), kind(quit), kind(copyright)],
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
