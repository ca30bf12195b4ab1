"""Three real hosts, each with something wrong: what ``--check`` shows, and what stops a launch."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import time
from typing import TYPE_CHECKING

import pytest

from distrain.system.version import __version__
from tests.hosts.conftest import Lab, make_other_python

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.hosts.user import Ran, User

TRAIN = "def train():\n    distrain.report({'place': place()})\n"
OVER_TORCH = "from distrain.torch import TorchTrainer\n" + TRAIN
TWO = "hosts='alpha:1,beta:1'"


def check(user: User, *arguments: str) -> Ran:
    """Without ``--hosts`` in ``arguments``, of the file ``hosts``."""
    hosts = () if "--hosts" in arguments else ("--hostfile", "hosts")
    return user.launches("--check", *hosts, "--storage-path", "runs", *arguments, COLUMNS="200")


def finding(ran: Ran, host: str) -> str:
    """The one line about a host, and no other host has any."""
    [line] = [line for line in ran.out.splitlines() if line.startswith(("✗", "!"))]
    assert line.startswith((f"✗ {host}: ", f"! {host}: "))
    assert ran.code == (1 if line.startswith("✗") else 0)
    assert (f"cannot train like this: {host}" in ran.out) == line.startswith("✗")
    return line[len(host) + 4 :]


def python_with(folder: Path, customized: str) -> str:
    """Another interpreter, as a hostfile names it, with its own copy of distrain; ``customized`` runs at its start."""
    python = make_other_python(folder)
    (site_of(folder) / "ours_too.pth").write_text("import ours_too\n")
    (site_of(folder) / "ours_too.py").write_text(customized)
    return f"python={shlex.quote(str(python))}"


def site_of(folder: Path) -> Path:
    [site] = (folder / "lib").glob("python*/site-packages")
    return site


@contextlib.contextmanager
def own_disk(lab: Lab, host: str, folder: Path) -> Iterator[None]:
    """``folder`` is another one on this host."""
    folder.mkdir(exist_ok=True)
    assert lab.run(host, "mount", "-t", "tmpfs", "tmpfs", str(folder), cwd=lab.folder).returncode == 0
    try:
        yield
    finally:
        assert lab.run(host, "umount", str(folder), cwd=lab.folder).returncode == 0


@contextlib.contextmanager
def blocked_pair(lab: Lab) -> Iterator[None]:
    """What alpha sends to beta arrives nowhere, without an error, as with a firewall that drops."""
    neighbour = ("ip", "neigh", "replace", "10.77.0.12", "lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud")
    assert lab.run("alpha", *neighbour, "permanent").returncode == 0
    try:
        yield
    finally:
        assert lab.run("alpha", "ip", "neigh", "del", "10.77.0.12", "dev", "eth0").returncode == 0


# -- the table -------------------------------------------------------------------------------------------------------


def test_three_hosts_that_are_well_are_shown_with_what_they_have(user: User) -> None:
    """One greets at login, one has another interpreter."""
    (user.folder / "hosts").write_text(user.lab.hostfile.read_text())
    ran = check(user)
    assert (ran.code, ran.err) == (0, "")
    head, _, *rows, empty, verdict = ran.out.splitlines()
    assert head.split()[:8] == ["host", "ssh", "python", "distrain", "torch", "cloudpickle", "cwd", "storage"]
    assert [row.split()[0] for row in rows] == ["this", "alpha", "beta:2222", "gamma"]
    for row, address in zip(rows[1:], ("10.77.0.11", "10.77.0.12", "10.77.0.13"), strict=True):
        words = row.split()
        assert words.count("ok") == 3
        assert words[words.index(address) + 1] == "eth0"
        assert __version__ in words
    assert (empty, verdict) == ("", "3 hosts can train together")
    assert list((user.folder / "runs").iterdir()) == []


def test_a_host_that_is_down_does_not_keep_the_others_from_being_looked_at(user: User) -> None:
    began = time.monotonic()
    ran = check(user, "--hosts", "alpha:1,10.77.0.99:1,beta:1")
    assert time.monotonic() - began < 20.0
    text = finding(ran, "10.77.0.99")
    assert text.startswith("ssh does not get there: ssh: connect to host 10.77.0.99 port 22: No route to host; ")
    assert text.endswith("-- 10.77.0.99 true")
    assert ran.out.count("eth0") == 2


def test_a_host_that_is_not_ours_to_log_in_is_named(user: User) -> None:
    ran = check(user, "--hosts", "alpha:1", "--ssh-args=-o PubkeyAuthentication=no")
    assert "Permission denied (publickey)" in finding(ran, "alpha")


def test_a_python_that_is_not_there_is_named(user: User) -> None:
    (user.folder / "hosts").write_text("alpha\nbeta python=/nowhere/python\n")
    text = finding(check(user), "beta")
    assert text.startswith("/nowhere/python does not start distrain there, exit code 127: ")
    assert text.endswith("or name another interpreter: python= in the hostfile")


def test_a_python_without_distrain_is_named_and_a_greeting_is_not_its_words(user: User) -> None:
    python = make_other_python(user.folder / "bare")
    shutil.rmtree(site_of(user.folder / "bare") / "distrain")
    (site_of(user.folder / "bare") / "ours.pth").unlink()
    (user.folder / "hosts").write_text(f"alpha python='{python}'\nbeta\n")
    text = finding(check(user), "alpha")
    assert f"exit code 1: ModuleNotFoundError: No module named 'distrain'; install distrain=={__version__}" in text


def test_another_python_is_told_by_its_version(user: User) -> None:
    other = python_with(user.folder / "other", "import platform\nplatform.python_version = lambda: '3.9.1'\n")
    (user.folder / "hosts").write_text(f"alpha\nbeta {other}\n")
    ran = check(user)
    assert finding(ran, "beta").startswith("it has Python 3.9.1, this machine 3.")
    assert "✗ 3.9.1" in ran.out


def test_another_distrain_is_named_with_the_command_that_fixes_it(user: User) -> None:
    other = python_with(user.folder / "other", "")
    version = site_of(user.folder / "other") / "distrain" / "system" / "version.py"
    version.write_text(version.read_text().replace(__version__, "9.9.9"))
    (user.folder / "hosts").write_text(f"alpha\nbeta {other}\n")
    text = finding(check(user), "beta")
    assert text == (
        f"it has distrain 9.9.9, this machine {__version__}; run there: pip install distrain=={__version__}"
    )


@pytest.mark.parametrize(("package", "version", "mark"), [("torch", "2.0.0", "!"), ("cloudpickle", "1.0.0", "✗")])
def test_other_packages_are_told_by_their_version(user: User, package: str, version: str, mark: str) -> None:
    other = python_with(user.folder / "other", "")
    installed = site_of(user.folder / "other") / f"{package}-{version}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Name: {package}\nVersion: {version}\n")
    (user.folder / "hosts").write_text(f"alpha\nbeta {other}\n")
    ran = check(user)
    assert finding(ran, "beta").startswith(f"it has {package} {version}, this machine ")
    assert f"{mark} {version}" in ran.out


def test_a_directory_that_is_missing_is_named(user: User) -> None:
    (user.folder / "hosts").write_text("alpha cwd=/nowhere\nbeta\n")
    text = finding(check(user), "alpha")
    assert text.startswith("no worker can run in /nowhere: No such file or directory; create it, or set cwd=")


def test_a_storage_that_is_not_shared_is_found_although_the_path_exists(user: User) -> None:
    with own_disk(user.lab, "beta", user.folder / "runs"):
        text = finding(check(user, "--hosts", "alpha:1,beta:1"), "beta")
    assert text.startswith(f"the storage {user.folder}/runs is another one than the launching machine's; mount one")


def test_a_pair_that_is_blocked_is_named_both_ways(user: User) -> None:
    with blocked_pair(user.lab):
        ran = check(user, "--hosts", "alpha:1,beta:1,localhost:1")
    assert ran.code == 1
    alpha, beta, verdict = ran.out.splitlines()[-3:]
    assert alpha.startswith("✗ alpha: beta cannot connect to it at 10.77.0.11 (eth0): no answer within 4 s; let TCP")
    assert beta.startswith("✗ beta: alpha cannot connect to it at 10.77.0.12 (eth0): no answer within 4 s; let TCP")
    assert verdict == "cannot train like this: alpha, beta"


def test_a_clock_that_is_wrong_is_a_warning(user: User) -> None:
    wrong = "import time\nreal = time.time\ntime.time = lambda: real() - 100.0\n"
    (user.folder / "hosts").write_text(f"alpha\nbeta {python_with(user.folder / 'other', wrong)}\n")
    ran = check(user)
    assert finding(ran, "beta").startswith("its clock is 100.0 s behind this machine's")
    assert "! -100.0 s" in ran.out


# -- before a launch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [f"num_workers=2, {TWO}", "num_workers=1, hosts='beta'"])
def test_a_launch_is_refused_when_the_storage_is_not_shared(user: User, where: str) -> None:
    with own_disk(user.lab, "beta", user.folder / "runs"):
        ran = user.trains("def train():\n    import time; time.sleep(60)\n", where)
    assert ran.code == 1
    assert f"beta: the storage {user.folder}/runs/run cannot be opened: No such file or directory" in ran.err


def test_a_launch_is_refused_when_a_pair_is_blocked_long_before_the_framework_gives_up(user: User) -> None:
    began = time.monotonic()
    with blocked_pair(user.lab):
        ran = user.trains(OVER_TORCH, f"TorchTrainer, num_workers=2, {TWO}")
    assert time.monotonic() - began < 30.0
    assert ran.code == 1
    assert " cannot connect to it at 10.77.0.1" in ran.err
    assert "no answer within 4 s" in ran.err


def test_a_host_that_takes_the_place_of_a_lost_one_is_looked_at_too(user: User) -> None:
    """Beta's agent freezes; the spare host has a disk of its own where the run directory should be."""
    train = """
def train():
    import psutil, signal, time
    if socket.gethostname() == "beta":
        os.kill(psutil.Process().parents()[1].pid, signal.SIGSTOP)
    time.sleep(60)
"""
    call = "run={'failure_config': distrain.FailureConfig(max_failures=2, host_lease_s=2)}, num_workers=3"
    with own_disk(user.lab, "gamma", user.folder / "runs"):
        ran = user.trains(train, f"{call}, hostfile=hostfile")
    assert ran.code == 1
    assert "on beta:2222 were lost: its agent has been silent for 2 s" in ran.err
    assert f"gamma: the storage {user.folder}/runs/run cannot be opened: No such file or directory" in ran.err


def test_ranks_that_need_not_meet_train_although_they_could_not(user: User) -> None:
    train = "def train():\n    import time; time.sleep(6)\n    distrain.report({'place': place()})\n"
    with blocked_pair(user.lab):
        ran = user.trains(train, f"num_workers=2, {TWO}")
    assert len(ran.reports()) == 2
    assert "distrain: alpha: beta cannot connect to it at 10.77.0.11 (eth0): no answer within 4 s" in ran.err


def test_a_launch_warns_of_another_torch_and_is_refused_for_another_cloudpickle(user: User) -> None:
    other = python_with(user.folder / "other", "")
    (user.folder / "hosts").write_text(f"alpha\nbeta {other}\n")
    waiting = "def train():\n    import time; time.sleep(2)\n    distrain.report({'place': place()})\n"
    for trainer, package, version in (("TorchTrainer, ", "torch", "2.0.0"), ("", "cloudpickle", "1.0.0")):
        installed = site_of(user.folder / "other") / f"{package}-{version}.dist-info"
        installed.mkdir()
        (installed / "METADATA").write_text(f"Name: {package}\nVersion: {version}\n")
        ran = user.trains(
            f"from distrain.torch import TorchTrainer\n{waiting}", f"{trainer}num_workers=2, hostfile='hosts'"
        )
        how = "distrain: " if package == "torch" else "LaunchError: "
        assert f"{how}beta: it has {package} {version}, this machine " in ran.err


def test_what_a_launch_has_asked_leaves_nothing_behind(user: User) -> None:
    assert len(user.trains(TRAIN, f"num_workers=2, {TWO}").reports()) == 2
    names = sorted(path.name for path in (user.folder / "runs" / "run").iterdir())
    assert not [name for name in names if "probe" in name or "check" in name]
