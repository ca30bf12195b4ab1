"""Limits and kills of control groups, both versions, as folders of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distrain.hosts import cgroup
from distrain.hosts.cgroup import OomKill, OomWatch, cpu_quota, memory_limit, memory_use


class FakeKernel:
    """Writes what the kernel would show: /sys/fs/cgroup, /proc/vmstat and /proc/self/cgroup."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "cgroup"
        self.vmstat = folder / "vmstat"
        self.own = folder / "self"
        self.root.mkdir()
        self.vmstat.write_text("nr_free_pages 5\noom_kill 3\n")

    def belong(self, *lines: str) -> None:
        self.own.write_text("".join(f"{line}\n" for line in lines))

    def group(self, path: str, **files: Any) -> Path:
        """``memory_max="1"`` writes memory.max."""
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")
        return folder


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    fake = FakeKernel(tmp_path)
    read = cgroup.text_in
    monkeypatch.setattr(cgroup, "_ROOT", fake.root)
    monkeypatch.setattr(cgroup, "_VMSTAT", fake.vmstat)
    monkeypatch.setattr(cgroup, "text_in", lambda path: read(fake.own if path == Path("/proc/self/cgroup") else path))
    return fake


# -- limits ----------------------------------------------------------------------------------------------------------


def test_without_groups_there_are_no_limits(kernel: FakeKernel) -> None:
    assert memory_limit() is None
    assert cpu_quota() is None


def test_v2_the_limit_of_our_group(kernel: FakeKernel) -> None:
    kernel.belong("0::/slice/job")
    kernel.group("slice/job", memory_max=1 << 30, cpu_max="150000 100000")
    assert memory_limit() == 1 << 30
    assert cpu_quota() == 1.5


def test_v2_the_tightest_of_the_groups_above_counts(kernel: FakeKernel) -> None:
    kernel.belong("0::/slice/job")
    kernel.group("slice", memory_max=1 << 20, cpu_max="50000 100000")
    kernel.group("slice/job", memory_max=1 << 30, cpu_max="400000 100000")
    assert memory_limit() == 1 << 20
    assert cpu_quota() == 0.5


def test_v2_max_is_no_limit(kernel: FakeKernel) -> None:
    kernel.belong("0::/job")
    kernel.group("job", memory_max="max", cpu_max="max 100000")
    assert memory_limit() is None
    assert cpu_quota() is None


def test_v2_inside_a_container_our_group_is_the_root(kernel: FakeKernel) -> None:
    kernel.belong("0::/")
    kernel.group(".", memory_max=1 << 28, cpu_max="200000 100000")
    assert memory_limit() == 1 << 28
    assert cpu_quota() == 2.0


def test_v1_each_controller_has_its_own_tree(kernel: FakeKernel) -> None:
    kernel.belong("4:memory:/docker/a", "1:cpu:/docker/b", "9:name=systemd:/")
    kernel.group("memory/docker/a", memory_limit_in_bytes=1 << 29)
    kernel.group("memory/docker/b", memory_limit_in_bytes=1)
    kernel.group("cpu/docker/b", cpu_cfs_quota_us=250_000, cpu_cfs_period_us=100_000)
    assert memory_limit() == 1 << 29
    assert cpu_quota() == 2.5


def test_v1_no_limit_is_a_very_large_number(kernel: FakeKernel) -> None:
    kernel.belong("4:memory:/a", "1:cpu:/a")
    kernel.group("memory/a", memory_limit_in_bytes=9223372036854771712)
    kernel.group("cpu/a", cpu_cfs_quota_us=-1, cpu_cfs_period_us=100_000)
    assert memory_limit() is None
    assert cpu_quota() is None


def test_v2_the_group_that_is_closest_to_its_limit_counts_without_copies_of_files(kernel: FakeKernel) -> None:
    kernel.belong("0::/slice/job")
    kernel.group("slice", memory_max=1000, memory_current=900, memory_stat="active_file 1\ninactive_file 2")
    kernel.group(
        "slice/job", memory_max=800, memory_current=790, memory_stat="anon 5\nactive_file 200\ninactive_file 0"
    )
    assert memory_use() == (897, 1000)


def test_v1_and_v2_side_by_side(kernel: FakeKernel) -> None:
    """The hybrid layout of systemd: v2 without the memory controller."""
    kernel.belong("4:memory:/a", "0::/user")
    kernel.group("memory/a", memory_limit_in_bytes=1 << 29)
    kernel.group("user")
    assert memory_limit() == 1 << 29


def test_v1_in_a_container_the_path_of_the_host_is_not_there(kernel: FakeKernel) -> None:
    """/proc/self/cgroup names the host's path, while the container's own group is mounted at the root."""
    kernel.belong("4:memory:/docker/0123", "1:cpu,cpuacct:/docker/0123")
    kernel.group("memory", memory_limit_in_bytes=1 << 27)
    assert memory_limit() == 1 << 27


def test_v1_controllers_that_share_a_tree(kernel: FakeKernel) -> None:
    kernel.belong("1:cpu,cpuacct:/a")
    kernel.group("cpu/a", cpu_cfs_quota_us=100_000, cpu_cfs_period_us=100_000)
    assert cpu_quota() == 1.0


@pytest.mark.parametrize("text", ["", "0 0", "soon", "1 2 3"])
def test_nonsense_is_no_quota(kernel: FakeKernel, text: str) -> None:
    kernel.belong("0::/job")
    kernel.group("job", cpu_max=text, memory_max=text)
    assert cpu_quota() is None
    assert memory_limit() is None


def test_a_path_may_have_a_colon(kernel: FakeKernel) -> None:
    kernel.belong("0::/a:b")
    kernel.group("a:b", memory_max=77)
    assert memory_limit() == 77


# -- whom the kernel killed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "path", "files"),
    [
        ("0::/job", "job", {"memory_max": 1 << 20, "memory_events": "oom 7\noom_kill {}\noom_group_kill 0"}),
        (
            "4:memory:/job",
            "memory/job",
            {"memory_limit_in_bytes": 1 << 20, "memory_oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill {}"},
        ),
    ],
    ids=["v2", "v1"],
)
def test_a_kill_in_our_group_has_its_limit(kernel: FakeKernel, own: str, path: str, files: dict[str, Any]) -> None:
    def kills(number: int) -> None:
        kernel.group(path, **{name: str(text).format(number) for name, text in files.items()})

    kernel.belong(own)
    kills(2)
    watch = OomWatch()
    assert watch.killed() is None
    kills(3)
    assert watch.killed() == OomKill(1 << 20, str(kernel.root / path))
    assert watch.killed() == OomKill(1 << 20, str(kernel.root / path)), "it is told of every rank of the attempt"


def test_v2_the_kill_is_also_counted_by_groups_without_a_limit(kernel: FakeKernel) -> None:
    """memory.events counts the kills in all groups below."""
    kernel.belong("0::/slice/job")
    kernel.group("slice", memory_max=1 << 20, memory_events="oom_kill 0")
    kernel.group("slice/job", memory_max="max", memory_events="oom_kill 0")
    watch = OomWatch()
    kernel.group("slice", memory_events="oom_kill 1")
    kernel.group("slice/job", memory_events="oom_kill 1")
    assert watch.killed() == OomKill(1 << 20, str(kernel.root / "slice"))


def test_a_kill_somewhere_on_the_host(kernel: FakeKernel) -> None:
    watch = OomWatch()
    kernel.vmstat.write_text("nr_free_pages 5\noom_kill 4\n")
    assert watch.killed() == OomKill(0, "")


def test_files_that_are_not_there_or_disappear_are_no_kill(kernel: FakeKernel) -> None:
    kernel.belong("0::/job")
    folder = kernel.group("job", memory_max=1 << 20, memory_events="oom_kill 5")
    watch = OomWatch()
    (folder / "memory.events").unlink()
    kernel.vmstat.unlink()
    assert watch.killed() is None
