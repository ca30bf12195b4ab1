"""The lab itself: its hosts are hosts, and nothing of it stays, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.hosts.lab import NETLAB, Lab, end_lab, members, start_lab

sampled = pytest.mark.sample(1, of="the network of the tests")


def interfaces() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


@sampled
def test_nothing_stays_when_the_tests_crash(tmp_path: Path) -> None:
    """The holder is killed, and cannot clean up."""
    before = interfaces()
    holder = start_lab(tmp_path / "lab", "one:1:bare")
    assert len(members(tmp_path / "lab")) == 3
    assert interfaces() == before
    holder.kill()
    end_lab(holder, tmp_path / "lab")
    assert interfaces() == before


@sampled
def test_people_bring_it_up_and_down(lab: Lab, tmp_path: Path) -> None:
    folder = tmp_path / "lab"

    def netlab(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(NETLAB), "--dir", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    up = netlab("up", "one:4", "two")
    try:
        assert up.returncode == 0, up.stderr
        assert f"hosts: one, two; hostfile: {folder}/hostfile" in up.stdout
        assert (folder / "hostfile").read_text() == "one slots=4\ntwo slots=1\n"
        assert "already" in netlab("up").stderr
        assert netlab("exec", "head", "ssh", "two", "hostname").stdout == "two\n"
        assert "no host 'three'; hosts: switch, head, one, two" in netlab("exec", "three", "true").stderr
        began = members(folder)
    finally:
        down = netlab("down")
    assert down.returncode == 0, down.stderr
    assert not folder.exists()
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in began), what="the end of all hosts")


@sampled
def test_a_bare_host_has_only_the_system_its_home_and_what_is_mounted(tmp_path: Path, test_run_id: str) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "file").write_text("given")
    mount = f"--mount={tmp_path / 'given'}=/opt/given"
    holder = start_lab(tmp_path / "lab", mount, "one:1:bare", "two:1:bare", "three")
    lab = Lab(folder=tmp_path / "lab")
    try:
        assert (lab.folder / "hostfile").read_text() == "one slots=1\ntwo slots=1\nthree slots=1\n"
        for host in ("one", "two"):
            (lab.folder / "homes" / host / "note").write_text(f"for {host}")
            look = "pwd; ls -A /home /tmp /var/tmp /root/.ssh /opt/given; cat $HOME/note /opt/given/file"
            done = lab.run("head", "ssh", host, look, cwd=tmp_path)
            expected = [f"/home/{host}", "/home:", host, "/opt/given:", "file", "/tmp:", "/var/tmp:"]
            assert done.stdout.split() == [*expected, "for", f"{host}given"]
        here = lab.run("one", "sh", "-c", "pwd; echo $HOME", cwd=tmp_path)
        assert (here.stdout, here.stderr) == ("/\n/home/one\n", "")
        for path in (tmp_path, NETLAB, lab.folder / "hostkey", lab.folder / "homes"):
            assert lab.run("one", "ls", str(path)).returncode != 0
        assert lab.run("one", str(Path(sys.executable).resolve()), "-c", "import json, socket").returncode == 0
        assert "Read-only" in lab.run("one", "touch", "/opt/given/more").stderr
        mark = f"/tmp/{test_run_id}"
        assert lab.run("one", "touch", mark).returncode == 0
        assert [lab.run(host, "ls", mark).returncode == 0 for host in ("one", "two", "three")] == [True, False, False]
    finally:
        end_lab(holder, lab.folder)


def test_what_is_wrong_or_missing_is_named(tmp_path: Path) -> None:
    everything = {"PATH": os.environ["PATH"]}
    for arguments, environment, code, words in (
        (["one:1:bear"], everything, 2, "one:1:bear: the only kind of hosts is bare"),
        (["--mount=/tmp"], everything, 2, "'/tmp'"),
        ([], {"PATH": str(tmp_path)}, 3, "netlab: missing here: "),
        ([], {"PATH": str(tmp_path)}, 3, "unshare (package util-linux)"),
    ):
        argv = [sys.executable, str(NETLAB), "--dir", str(tmp_path / "lab"), "up", *arguments]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)
        assert (done.returncode, words in done.stderr) == (code, True), done.stderr
