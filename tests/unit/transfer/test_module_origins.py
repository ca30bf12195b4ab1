"""The origins of modules: the interpreter's libraries and programs, and directories of the user."""

from __future__ import annotations

import os
import sys
import sysconfig

import pytest

from distrain.transfer.project.module_origins import belongs_to_interpreter, is_library

STANDARD = sysconfig.get_path("stdlib")
LIBRARIES = (
    *(STANDARD, os.path.realpath(STANDARD), f"{STANDARD}/lib-dynload", f"{STANDARD}/json/__init__.py"),
    *(sysconfig.get_path("platstdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")),
    *("/env/lib/site-packages", "/env/lib/site-packages/", "/usr/lib/python3/dist-packages", "site-packages"),
    *("/env/lib/site-packages/below", "/env/lib/site-packages/numpy/__init__.py"),
    *("/usr/lib/python311.zip", "/usr/lib/python3.zip"),
)
PROGRAMS = (
    *(os.path.dirname(sys.executable), sysconfig.get_path("scripts"), f"{sysconfig.get_path('scripts')}/tool.py"),
    *(sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user")), "/home/me/.ipython"),
)
OWN = (
    *("", ".", "/", "/home/me", f"{STANDARD}-of-mine", f"{os.path.dirname(sys.executable)}-of-mine"),
    *("/home/me/my-packages", "/home/me/site-packages.py", "/home/me/own.zip", "/home/me/python", "/home/.ipython/x"),
)


@pytest.mark.parametrize("path", LIBRARIES)
def test_what_is_a_library(path: str) -> None:
    assert is_library(path)
    assert belongs_to_interpreter(path)


@pytest.mark.parametrize("path", PROGRAMS)
def test_what_belongs_to_the_interpreter_and_is_no_library(path: str) -> None:
    assert not is_library(path)
    assert belongs_to_interpreter(path)


@pytest.mark.parametrize("path", OWN)
def test_what_is_the_users(path: str) -> None:
    assert not is_library(path)
    assert not belongs_to_interpreter(path)
