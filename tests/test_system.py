"""What is available: of the machine, and of control groups of both versions, in made-up file systems."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddnn.util.system import available_memory, compute_resources

MIB = 1 << 20


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def machine(root: Path, mib: int, groups: str) -> Path:
    write(root / "proc/meminfo", f"MemTotal: 99 kB\nMemAvailable:   {mib * 1024} kB\n")
    write(root / "proc/self/cgroup", groups)
    return root


def group(folder: Path, limit: str, used: int, cached: int = 0, version: int = 2) -> None:
    names = ("memory.max", "memory.current", "") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes",
                                                                       "total_")  # fmt: skip
    write(folder / names[0], f"{limit}\n")
    write(folder / names[1], f"{used * MIB}\n")
    stat = f"anon 5\n{names[2]}inactive_file {cached * MIB // 2}\n{names[2]}active_file {cached * MIB // 2}\nodd\n"
    write(folder / "memory.stat", stat)


def test_without_limits(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, 1000, "0::/user\n")) == 1000 * MIB
    group(tmp_path / "sys/fs/cgroup/user", "max", 10)
    assert available_memory(tmp_path) == 1000 * MIB


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None


def test_this_one() -> None:
    found = available_memory()
    assert found is None or 0 < found < 1 << 50


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_job(tmp_path: Path, version: int) -> None:
    """Files in the cache count as used, but give way."""
    text = "0::/slurm/job_5\n" if version == 2 else "3:cpu:/\n2:memory,hugetlb:/slurm/job_5\n"
    folder = machine(tmp_path, 1000, text) / "sys/fs/cgroup" / ("" if version == 2 else "memory") / "slurm/job_5"
    group(folder, str(300 * MIB), 250, cached=40, version=version)
    assert available_memory(tmp_path) == 90 * MIB
    group(folder.parent, str(400 * MIB), 330, version=version)
    assert available_memory(tmp_path) == 70 * MIB, "the group above has less left"
    group(folder.parent, str(400 * MIB), 430, version=version)
    assert available_memory(tmp_path) == 0


def test_the_limit_above_which_a_group_is_slowed_down(tmp_path: Path) -> None:
    folder = machine(tmp_path, 1000, "0::/x\n") / "sys/fs/cgroup/x"
    group(folder, str(300 * MIB), 50)
    write(folder / "memory.high", str(200 * MIB))
    assert available_memory(tmp_path) == 150 * MIB


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_that_sees_only_its_own_group(tmp_path: Path, version: int) -> None:
    """Its path is that of the host; what is mounted begins with its own."""
    text = "0::/../docker/4711\n" if version == 2 else "4:memory:/docker/4711\n"
    folder = machine(tmp_path, 1000, text) / "sys/fs/cgroup" / ("" if version == 2 else "memory")
    group(folder, str(100 * MIB), 20, version=version)
    assert available_memory(tmp_path) == 80 * MIB


def test_no_limit_in_version_1_is_a_huge_number(tmp_path: Path) -> None:
    folder = machine(tmp_path, 1000, "4:memory:/\n") / "sys/fs/cgroup/memory"
    group(folder, "9223372036854771712", 20, version=1)
    assert available_memory(tmp_path) == 1000 * MIB


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=30).filter(lambda s: "\0" not in s), st.text(max_size=60))
def test_whatever_the_files_say(tmp_path: Path, path: str, content: str) -> None:
    machine(tmp_path, 1000, f"0::/x\n2:memory:/x\nodd\n:\n0::/{path}\n4:memory:{path}\n")
    for name in ("memory.max", "memory.current", "memory.stat"):
        write(tmp_path / "sys/fs/cgroup/x" / name, content)
    found = available_memory(tmp_path)
    assert found is not None and 0 <= found <= 1000 * MIB


def test_cores_are_counted_where_workers_have_the_fewest() -> None:
    """Workers that are each bound to a core of their own share none; hosts and kinds of machine may differ."""
    assert compute_resources([["Xeon", "n1", [0, 1, 2, 3]]]) == ("Xeon", 4.0)
    assert compute_resources([["Xeon", "n1", [0]], ["Xeon", "n1", [1]]]) == ("Xeon", 1.0)
    assert compute_resources([["Xeon", "n1", [0]], ["Xeon", "n1", [0]], ["EPYC", "n2", [0, 1]]]) == ("EPYC; Xeon", 0.5)
