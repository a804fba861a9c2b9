"""Host memory that is there to take: the machine's, and what the control groups leave of it."""

from pathlib import Path

import pytest

from sglang_hs_capture.staging.memory import available_bytes

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def v1(folder: str, limit: int, used: int, cached: int) -> dict[str, str]:
    return {
        f"sys/fs/cgroup/memory{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"sys/fs/cgroup/memory{folder}/memory.usage_in_bytes": f"{used}\n",
        f"sys/fs/cgroup/memory{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {cached}\n",
    }


def v2(folder: str, limit: str, used: int, cached: int) -> dict[str, str]:
    return {
        f"sys/fs/cgroup{folder}/memory.max": f"{limit}\n",
        f"sys/fs/cgroup{folder}/memory.current": f"{used}\n",
        f"sys/fs/cgroup{folder}/memory.stat": f"anon 5\ninactive_file {cached - 3}\nactive_file 3\n",
    }


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("", {}, 64 * GIB),
        ("0::/\n", {}, 64 * GIB),
        ("0::/a\n", v2("/a", "max", 5 * GIB, GIB), 64 * GIB),
        ("0::/a/b\n", v2("/a/b", str(9 * GIB), 5 * GIB, GIB), 5 * GIB),
        # The tightest of the groups around a process counts.
        ("0::/a/b\n", v2("/a/b", "max", GIB, 0) | v2("/a", str(4 * GIB), 2 * GIB, GIB), 3 * GIB),
        # The path is the one outside the container, whose own group is what it sees at the base.
        ("0::/docker/0123\n", v2("", str(8 * GIB), 2 * GIB, 3), 6 * GIB + 3),
        ("0::/../../x\n", v2("", str(8 * GIB), 2 * GIB, 3), 6 * GIB + 3),
        ("4:cpu,memory:/a\n1:cpu:/b\n0::/\n", v1("/a", 3 * GIB, 2 * GIB, 7), GIB + 7),
        ("4:memory:/a\n", v1("/a", 2**63 - 4096, 2 * GIB, 7), 64 * GIB),
        ("4:memory:/a\n", v1("/a", GIB, 2 * GIB, 7), 0),
    ],
)
def test_the_tightest_limit_counts(tmp_path, groups, files, expected):
    write(tmp_path, {"proc/meminfo": "MemTotal: 99999999999 kB\nMemAvailable: 67108864 kB\n"} | files)
    write(tmp_path, {"proc/self/cgroup": groups})
    assert available_bytes(tmp_path) == expected


def test_a_machine_without_control_groups_has_its_own_memory(tmp_path):
    write(tmp_path, {"proc/meminfo": "MemAvailable: 4 kB\n"})
    assert available_bytes(tmp_path) == 4096


def test_this_machine_has_memory():
    assert 2**20 < available_bytes() < 2**50
