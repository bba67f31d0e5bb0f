"""What this process may use of the machine it runs on: memory, cores, GPUs. Torch is not imported.

A process has what the kernel's control groups leave of it: its own group and all above that one, as far as a container
shows them (`/sys/fs/cgroup`; version 1 has a folder for memory and one for processor time). The folder that stands for
`/sys` is an argument, so that machines of any kind can be described by one.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SYSTEM, GROUPS = Path("/sys"), Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Device:
    """Memory of one kind that a model could live in; `free` is what is unused now."""

    name: str
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Host memory and the GPUs of this machine."""

    ram: Device
    gpus: tuple[Device, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """Processors that this process may run on.

    `cores`: of each physical core the processors that may be used; hyperthreads of one core share what computes.
    `nodes`: those with memory of their own. `quota`: processors' worth of time that its control groups allow.
    """

    cores: tuple[tuple[int, ...], ...]
    nodes: tuple[int, ...]
    quota: float | None

    @property
    def threads(self) -> int:
        """How many threads are worth starting: one on each physical core, and none that would only use up the quota.

        A quota of 1.6 and more counts as 2: one thread would leave a third of it."""
        return max(1, min(len(self.cores), int(len(self.cores) if self.quota is None else self.quota + 0.4)))

    def __str__(self) -> str:
        count, processors = len(self.cores), sum(map(len, self.cores))
        text = f"{count} physical core{'s' if count > 1 else ''}"
        text += f" with {processors} processors" if processors > count else ""
        text += f", memory in {len(self.nodes)} nodes" if len(self.nodes) > 1 else ""
        return text if self.quota is None else f"{text}, time of {self.quota:.3g} allowed by the control group"


def usable_cores(system: Path = SYSTEM, groups: Path = GROUPS, allowed: Collection[int] | None = None) -> Cores:
    """The cores that this process may use; `allowed`: processors, those of its affinity unless stated."""
    if allowed is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores: dict[str, list[int]] = {}
    for processor in sorted(allowed):
        siblings = system / f"devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
        cores.setdefault(_text(siblings) or str(processor), []).append(processor)
    nodes = [
        int(node.name.removeprefix("node"))
        for node in (system / "devices/system/node").glob("node[0-9]*")
        if not set(allowed).isdisjoint(_processors(_text(node / "cpulist") or ""))
    ]
    quotas = [quota for group in _groups(system, groups, "cpu") if (quota := _quota(group)) is not None]
    return Cores(cores=tuple(map(tuple, cores.values())), nodes=tuple(sorted(nodes)), quota=min(quotas, default=None))


def _processors(text: str) -> Iterator[int]:
    """The numbers of a list such as 0-3,8."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _quota(group: Path) -> float | None:
    """Processors' worth of time that a control group has, by either version; None without a limit."""
    words = (_text(group / "cpu.max") or "").split()
    if len(words) != 2:
        words = [_text(group / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    return int(words[0]) / int(words[1]) if all(map(str.isdecimal, words)) and int(words[1]) else None


def _groups(system: Path, groups: Path, controller: str) -> Iterator[Path]:
    """Folders of the control groups that this process is in, of both versions, each with all those above it."""
    # where nothing is said of version 1, as where /proc is hidden, its top is looked at
    for line in [*(_text(groups) or "0::/").splitlines(), f"0:{controller}:/"]:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top = system / "fs/cgroup"
        elif controller in controllers.split(","):
            top = system / "fs/cgroup" / controller
        else:
            continue
        own = top / path.lstrip("/")  # a container names the group on its host, which it does not see
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(top) and os.path.isdir(folder))


def this_machine() -> Machine:
    """Memory of this machine, as the kernel and the GPU driver report it."""
    return Machine(host_memory(), tuple(_gpus()))


def host_memory(system: Path = SYSTEM, groups: Path = GROUPS) -> Device:
    """Memory of this machine, of the container it is, or that this process may have; all zero where unknown."""
    memory, free = _meminfo()
    total = memory
    for group in _groups(system, groups, "memory"):
        for limit_file, used_file, cached in (
            ("memory.max", "memory.current", ("active_file", "inactive_file")),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
        ):
            limit, used = (_read_number(group / file) for file in (limit_file, used_file))
            if limit is not None and limit < memory:
                held = (used or 0) - _cached_files(group / "memory.stat", cached)
                total, free = min(total, limit), min(free, max(limit - held, 0))
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]  # `ulimit -v`: addresses, of which libraries take many
    if limit != resource.RLIM_INFINITY:
        total, free = min(total, limit), min(free, max(limit - _addresses(), 0))
    return Device("this machine's memory", total, free)


def shared_memory(folder: Path = Path("/dev/shm")) -> int | None:
    """Bytes that are free where programs share memory by name; None where there is no such place."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _addresses() -> int:
    """Bytes of addresses that this process has; zero where unknown."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _cached_files(stat: Path, names: tuple[str, ...]) -> int:
    """Bytes of cached files, which a container's count of used memory holds and the kernel gives back when asked."""
    try:
        rows = (line.split() for line in stat.read_text(encoding="ascii").splitlines())
    except OSError:
        return 0
    return sum(int(row[1]) for row in rows if len(row) == 2 and row[0] in names)


def _meminfo() -> tuple[int, int]:
    """Total and available bytes; zero where unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0, 0
    values = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return values["MemTotal"], values["MemAvailable"]


def _read_number(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text is not None and text.isdecimal() else None


def _text(file: Path) -> str | None:
    """What a file of the kernel says; None where it is not there, or not for us."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _gpus() -> Iterable[Device]:
    """GPUs that the driver's own tool lists; none without it."""
    if shutil.which("nvidia-smi") is None:
        return
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=5.0, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return
    for line in answer.splitlines():
        name, total, free = (field.strip() for field in line.rsplit(",", 2))
        if total.isdecimal() and free.isdecimal():
            yield Device(name, int(total) << 20, int(free) << 20)
