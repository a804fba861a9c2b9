"""How much host memory there is to take: on the machine, and in the control groups that this process runs in."""

from collections.abc import Iterator
from pathlib import Path

# Files of a control group: its limit, its use, and what of that the kernel gives back when asked.
_V2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that the kernel lets this process have without swapping, and without killing a process of its group.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    lines = (root / "proc/meminfo").read_text().splitlines()
    (kibibytes,) = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return max(0, min([kibibytes * 1024, *_left_in_groups(root)]))


def _left_in_groups(root: Path) -> Iterator[int]:
    """Bytes left below the limit of each memory control group around this process, as far as it can see them."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        base, names = root / "sys/fs/cgroup", _V2
        if controllers:
            base, names = base / "memory", _V1
        group = base / path.lstrip("/")
        # In a container the path may be the one outside; the container's own group is then at the base.
        for folder in [group, *group.parents]:
            if folder.is_relative_to(base) and ".." not in folder.parts:
                yield from _left_in_group(folder, *names)


def _left_in_group(folder: Path, limit_name: str, used_name: str, reclaimable: tuple[str, ...]) -> Iterator[int]:
    try:
        limit = (folder / limit_name).read_text().strip()
        if limit != "max":
            stat = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
            cached = sum(int(stat.get(name, 0)) for name in reclaimable)
            yield int(limit) - int((folder / used_name).read_text()) + cached
    except (OSError, ValueError):
        return
