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


@pytest.mark.parametrize(
    ("groups", "files", "limit", "quota"),
    [
        ([], {}, None, None),
        (["0::/slice/job"], {"slice/job": {"memory_max": 1 << 30, "cpu_max": "150000 100000"}}, 1 << 30, 1.5),
        (
            ["0::/slice/job"],
            {
                "slice": {"memory_max": 1 << 20, "cpu_max": "50000 100000"},
                "slice/job": {"memory_max": 1 << 30, "cpu_max": "400000 100000"},
            },
            1 << 20,
            0.5,
        ),
        (["0::/job"], {"job": {"memory_max": "max", "cpu_max": "max 100000"}}, None, None),
        (["0::/"], {".": {"memory_max": 1 << 28, "cpu_max": "200000 100000"}}, 1 << 28, 2.0),
        (["0::/a:b"], {"a:b": {"memory_max": 77}}, 77, None),
        *((["0::/job"], {"job": {"cpu_max": text, "memory_max": text}}, None, None) for text in ("", "0 0", "soon")),
        (
            ["4:memory:/docker/a", "1:cpu:/docker/b", "9:name=systemd:/"],
            {
                "memory/docker/a": {"memory_limit_in_bytes": 1 << 29},
                "memory/docker/b": {"memory_limit_in_bytes": 1},
                "cpu/docker/b": {"cpu_cfs_quota_us": 250_000, "cpu_cfs_period_us": 100_000},
            },
            1 << 29,
            2.5,
        ),
        (["4:memory:/a"], {"memory/a": {"memory_limit_in_bytes": 9223372036854771712}}, None, None),
        (["1:cpu,cpuacct:/a"], {"cpu/a": {"cpu_cfs_quota_us": 100_000, "cpu_cfs_period_us": 100_000}}, None, 1.0),
        (["1:cpu:/a"], {"cpu/a": {"cpu_cfs_quota_us": -1, "cpu_cfs_period_us": 100_000}}, None, None),
        # the hybrid layout of systemd: v2 without the memory controller
        (["4:memory:/a", "0::/user"], {"memory/a": {"memory_limit_in_bytes": 1 << 29}, "user": {}}, 1 << 29, None),
        # in a container of v1, the path is the host's, while the container's own group is mounted at the root
        (["4:memory:/docker/0123"], {"memory": {"memory_limit_in_bytes": 1 << 27}}, 1 << 27, None),
    ],
)
def test_limits_are_those_of_our_group_and_the_groups_above(
    kernel: FakeKernel, groups: list[str], files: dict[str, dict[str, Any]], limit: int | None, quota: float | None
) -> None:
    kernel.belong(*groups)
    for path, contents in files.items():
        kernel.group(path, **contents)
    assert (memory_limit(), cpu_quota()) == (limit, quota)


def test_v2_the_group_that_is_closest_to_its_limit_counts_without_copies_of_files(kernel: FakeKernel) -> None:
    kernel.belong("0::/slice/job")
    kernel.group("slice", memory_max=1000, memory_current=900, memory_stat="active_file 1\ninactive_file 2")
    kernel.group(
        "slice/job", memory_max=800, memory_current=790, memory_stat="anon 5\nactive_file 200\ninactive_file 0"
    )
    assert memory_use() == (897, 1000)


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


def test_files_that_are_not_there_or_disappear_are_no_kill(kernel: FakeKernel) -> None:
    kernel.belong("0::/job")
    folder = kernel.group("job", memory_max=1 << 20, memory_events="oom_kill 5")
    watch = OomWatch()
    (folder / "memory.events").unlink()
    kernel.vmstat.unlink()
    assert watch.killed() is None
