"""A queue that three users share: what it promises, when commands, hosts and connections come to a sudden end.

A normal run takes a sample; ``--all`` takes every test. scripts/queue_chaos has many more jobs, and kills at random.
"""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import wait_until
from tests.hosts.lab import ROOT
from tests.hosts.queue_site import Site
from tests.tables import SEED

if TYPE_CHECKING:
    from collections.abc import Iterator

sampled = pytest.mark.sample(1, of="the queue")
LONG = 400
"""Steps of a job that does not finish in the time of a test."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path / "site")
    site.start()
    try:
        yield site
        site.check_ledger()
        site.check_nothing_left()
    finally:
        site.end()


@sampled
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(SEED % 1000, SEED % 1000 + 3))
def test_many_jobs_while_processes_are_killed(seed: int) -> None:
    argv = [sys.executable, str(ROOT / "scripts" / "queue_chaos"), "--jobs=6", "--kills=4", f"--seed={seed}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr


@sampled
def test_two_queues_never_give_one_gpu_twice(site: Site) -> None:
    """They do not know of each other."""
    queues = [site.queue, f"{site.queue}-2"]
    for number in range(6):
        site.queue = queues[number % 2]
        Path(site.queue).mkdir(mode=0o777, exist_ok=True)
        Path(site.queue).chmod(0o1777)
        site.submit(("ada", "bob")[number % 2], f"job-{number}", 1 + number % 4, steps=4)
    for number in range(6):
        site.queue = queues[number % 2]
        site.wait_for(f"job-{number}", "finished", within_s=120)
        site.check_output(f"job-{number}", 1 + number % 4, 4)


@sampled
def test_a_queue_on_a_host_whose_sshd_restarts(site: Site) -> None:
    folder = site.queue
    site.queue = f"ssh://alpha{folder}"
    site.submit("ada", "runs", 2, "--hosts=beta:2", steps=40)
    site.submit("bob", "both", 4, steps=4)
    site.submit("eve", "waits", 2, "--hosts=beta:2", steps=4)
    site.queue = folder
    site.wait_for("runs", "running")
    site.kill_host("alpha", away_s=4.0)
    for name, gpus, steps in (("runs", 2, 40), ("both", 4, 4), ("waits", 2, 4)):
        site.wait_for(name, "finished", within_s=120)
        site.check_output(name, gpus, steps)


@sampled
def test_a_run_without_a_queue_leaves_claimed_gpus_alone(site: Site) -> None:
    script = "import os\nprint('with', os.environ.get('CUDA_VISIBLE_DEVICES', 'all'))\n"
    (site.home("bob") / "train.py").write_text(script)
    site.submit("ada", "claims", 3, steps=LONG)
    site.wait_for("claims", "running")
    host = next(host for host, names in site.tickets()["claims"].units.items() if len(names) == 2)
    words = ("run", f"--hosts={host}:2", "--gpus=1", "train.py")
    refused = site.distrain("bob", *words, DISTRAIN_QUEUE="", DISTRAIN_HOSTS="")
    assert refused.returncode != 0, refused.stdout
    assert "2 GPUs left to job claims of ada; --force uses them all the same" in refused.stderr
    forced = site.says("bob", *words[:1], "--force", *words[1:], DISTRAIN_QUEUE="", DISTRAIN_HOSTS="")
    assert "with all" in forced
    assert "1 of 4 GPUs is free" in site.says("eve", "gpus")
    assert "job claims of ada" in site.says("eve", "gpus")
    assert "another user" in site.says("bob", "cancel", "claims", code=2)
    assert site.says("ada", "cancel", "claims") == "claims is cancelled\n"
    wait_until(lambda: "4 of 4 GPUs are free" in site.says("eve", "gpus"), 20, "free GPUs")


@sampled
def test_jobs_that_are_cancelled_and_those_that_come_after(site: Site) -> None:
    site.submit("ada", "first", 4, steps=LONG)
    site.submit("bob", "second", 4, steps=4)
    site.submit("bob", "third", 4, "--after=second", "--after=first", steps=4)
    site.submit("eve", "late", 1, "--after=third", steps=4)
    site.wait_for("first", "running")
    assert site.says("bob", "cancel", "second") == "second is cancelled\n"
    assert site.tickets()["third"].state == "waiting", "the first one has not ended"
    assert site.says("ada", "cancel", "first") == "first is cancelled\n"
    third, late = site.wait_for("third", "finished"), site.wait_for("late", "finished")
    assert late.began >= third.ended
    site.check_output("third", 4, 4)


@sampled
@pytest.mark.slow
def test_a_short_job_goes_first_if_that_delays_no_bigger_one(site: Site) -> None:
    site.submit("ada", "runs", 2, "--hosts=alpha:2", "--time=50s", steps=100)
    site.wait_for("runs", "running")
    site.submit("bob", "big", 4, steps=4)
    site.submit("bob", "long", 1, steps=4)
    site.submit("bob", "short", 1, "--time=10s", steps=4)
    short = site.wait_for("short", "finished")
    assert "begins in" in site.says("eve", "queue")
    big, long = site.wait_for("big", "finished", within_s=90), site.wait_for("long", "finished")
    assert short.began < big.began < long.began
    assert big.began < site.tickets()["runs"].ended + 20


@sampled
def test_a_job_that_lives_on_another_host(site: Site) -> None:
    site.says("ada", "submit", "--on-host=alpha", "--name=there", "--gpus=2", *site.job_words(steps=LONG))
    job = site.wait_for("there", "running")
    assert (job.host, job.login) == ("alpha", "alpha")
    wait_until(lambda: site.tickets()["there"].run, what="its run directory")
    argv = site.command("ada", "attach", "there")
    with subprocess.Popen(argv, env=site.environment("ada"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as seen:
        time.sleep(5)
        seen.terminate()
        assert seen.stdout is not None
        assert b"there" in seen.stdout.read()
    assert "there" in site.says("ada", "ls")
    assert site.says("ada", "cancel", "there") == "there is cancelled\n"
    assert site.distrain("ada", "logs", "there").returncode == 0


@sampled
def test_all_that_has_not_ended_continues_after_a_reboot(site: Site) -> None:
    for name, gpus, steps in (("done", 1, 2), ("cancelled", 1, LONG), ("runs", 3, 40), ("waits", 4, 4)):
        site.submit("ada", name, gpus, steps=steps)
        if name == "cancelled":
            site.wait_for("done", "finished")
            site.wait_for("cancelled", "running")
            site.says("ada", "cancel", "cancelled")
    site.submit("bob", "other", 4, steps=4)
    site.wait_for("runs", "running")
    run = site.home("ada") / "distrain_results" / "runs"
    wait_until(lambda: len(list(run.glob("checkpoint_*"))), 30, "a checkpoint")
    site.kill_all_of("ada")
    killed = time.monotonic()
    site.wait_for("other", "running", "finished", within_s=40)
    assert time.monotonic() - killed < 25, "the GPUs of the dead are free within 20 s"
    assert site.says("ada", "submit", "--resume").splitlines() == ["runs continues", "waits continues"]
    for name, gpus, steps in (("runs", 3, 40), ("waits", 4, 4), ("other", 4, 4)):
        site.wait_for(name, "finished", within_s=90)
        site.check_output(name, gpus, steps)
    lines = sorted((line for lines in site.records().values() for line in lines), key=lambda line: line["at"])
    begins = [line for line in lines if line["what"] == "begins"]
    assert [line["first"] > 0 for line in begins if line["job"] == "runs"] == [False] * 3 + [True] * 3
    assert site.tickets()["cancelled"].how == "cancelled"
    assert site.says("ada", "submit", "--resume") == ""


# -- the end of what submitted it -------------------------------------------------------------------------------------


@sampled
def test_a_job_outlives_its_terminal_and_its_ssh_session(site: Site) -> None:
    words = ["submit", "--gpus=1", *site.job_words(steps=20)]
    # a window that is closed
    child, terminal = pty.fork()
    if not child:
        os.chdir(site.home("ada"))
        argv = site.command("ada", words[0], "--name=window", *words[1:])
        os.execvpe(argv[0], argv, site.environment("ada"))
    read_until(terminal, b"in the queue")
    os.close(terminal)
    os.waitpid(child, 0)
    # a connection that is cut: the process of sshd for it is killed
    shell = f"DISTRAIN_QUEUE={site.queue} DISTRAIN_HOSTS=alpha:2,beta:2"
    remote = f"{shell} {sys.executable} -m distrain submit --name=ssh {' '.join(words[1:])}; sleep 100"
    argv = site.argv("head", "ssh", "-tt", "alpha", remote, user="bob")
    with subprocess.Popen(argv, env=site.environment("bob"), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as session:
        assert session.stdout is not None
        read_until(session.stdout.fileno(), b"in the queue")
        for pid, line in site.processes("bob"):
            if line.startswith("sshd: bob@pts"):
                os.kill(pid, signal.SIGKILL)
        assert session.wait(20) == 255
    for name in ("window", "ssh"):
        site.wait_for(name, "finished")
        site.check_output(name, 1, 20)


def read_until(fd: int, text: bytes) -> bytes:
    said = b""
    while text not in said:
        said += os.read(fd, 4096)
    return said
