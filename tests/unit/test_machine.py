"""What a process may use of its machine, from files of the kernel that describe machines of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from spyglass.machine import host_memory, shared_memory, this_machine, usable_cores


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    """The control groups of a process that is in none but the one that its container is."""
    (tmp_path / "groups").write_text("0::/\n")
    return tmp_path / "groups"


def system_of(folder: Path, cores: list[list[int]], nodes: list[str]) -> Path:
    """Files of a machine: processors of each core, and of each node with memory."""
    for core in cores:
        for processor in core:
            topology = folder / f"devices/system/cpu/cpu{processor}/topology"
            topology.mkdir(parents=True)
            (topology / "thread_siblings_list").write_text(",".join(map(str, core)) + "\n")
    for number, processors in enumerate(nodes):
        (folder / f"devices/system/node/node{number}").mkdir(parents=True)
        (folder / f"devices/system/node/node{number}/cpulist").write_text(processors + "\n")
    return folder


def test_a_core_counts_once_whatever_its_hyperthreads(tmp_path: Path, groups: Path) -> None:
    system = system_of(tmp_path, [[n, n + 96] for n in range(96)], ["0-47,96-143", "48-95,144-191"])
    all_of_it = usable_cores(system, groups, range(192))
    assert (len(all_of_it.cores), all_of_it.threads, all_of_it.nodes) == (96, 96, (0, 1))
    assert str(all_of_it) == "96 physical cores with 192 processors, memory in 2 nodes"
    some = usable_cores(system, groups, {0, 1, 96, 100, 4})
    assert some.cores == ((0, 96), (1,), (4, 100)) and some.threads == 3 and some.nodes == (0,)


def test_processors_of_which_nothing_is_said_are_cores(tmp_path: Path, groups: Path) -> None:
    found = usable_cores(tmp_path, groups, range(3))
    assert found.cores == ((0,), (1,), (2,)) and found.nodes == () and str(found) == "3 physical cores"
    assert usable_cores(tmp_path, tmp_path / "missing", range(1)).threads == 1


@pytest.mark.parametrize(
    ("quotas", "threads"),
    [({}, 8), ({".": "max 100000"}, 8), ({".": "350000 100000"}, 3), ({".": "50000 100000"}, 1),
     ({".": "190000 100000"}, 2),
     ({".": "600000 100000", "a": "max 100000", "a/b": "700000 100000"}, 6), ({"a/b": "200000 100000"}, 2),
     ({"other": "100000 100000"}, 8)],
)  # fmt: skip
def test_no_thread_is_started_for_time_that_a_control_group_does_not_give(
    quotas: dict[str, str], threads: int, tmp_path: Path, groups: Path
) -> None:
    """Groups above the process's own count as much as its own."""
    groups.write_text("0::/a/b\n")
    for folder, quota in quotas.items():
        (tmp_path / "fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs/cgroup" / folder / "cpu.max").write_text(quota + "\n")
    assert usable_cores(tmp_path, groups, range(8)).threads == threads


def test_control_groups_of_the_first_version_limit_time_too(tmp_path: Path, groups: Path) -> None:
    groups.write_text("4:cpu,cpuacct:/docker/x\n3:memory:/docker/x\n0::/\n")  # the host's name: only the top is seen
    (tmp_path / "fs/cgroup/cpu").mkdir(parents=True)
    (tmp_path / "fs/cgroup/cpu/cpu.cfs_period_us").write_text("100000\n")
    for quota, threads in (("-1", 8), ("400000", 4)):
        (tmp_path / "fs/cgroup/cpu/cpu.cfs_quota_us").write_text(quota + "\n")
        assert usable_cores(tmp_path, groups, range(8)).threads == threads


def test_this_process_has_cores() -> None:
    assert usable_cores().threads >= 1


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_has_its_limit_and_gets_cached_files_back(version: int, tmp_path: Path, groups: Path) -> None:
    """Files that were read, the checkpoint's own for instance, are counted as used and are free for the asking."""
    folder, limit, used, prefix = (
        (tmp_path / "fs/cgroup", "memory.max", "memory.current", "")
        if version == 2
        else (tmp_path / "fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    )
    groups.write_text("0::/\n" if version == 2 else "7:memory:/docker/x\n")
    folder.mkdir(parents=True)
    (folder / limit).write_text("1000\n")
    (folder / used).write_text("900\n")
    (folder / "memory.stat").write_text(f"anon 200\n{prefix}active_file 300\n{prefix}inactive_file 400\nslab 9\n")
    found = host_memory(tmp_path, groups)
    assert (found.total, found.free) == (1000, 800)
    (folder / "memory.stat").unlink()
    assert host_memory(tmp_path, groups).free == 100


def test_a_limit_of_any_group_above_a_process_is_its_limit(tmp_path: Path, groups: Path) -> None:
    """A service of systemd has no container around it, and its slice may have the smaller limit."""
    groups.write_text("0::/system.slice/spyglass.service\n")
    for folder, limit, used in (
        ("", "max", 9000),
        ("system.slice", "5000", 4500),
        ("system.slice/spyglass.service", "2000", 100),
    ):
        (tmp_path / "fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs/cgroup" / folder / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "fs/cgroup" / folder / "memory.current").write_text(f"{used}\n")
    found = host_memory(tmp_path, groups)
    assert (found.total, found.free) == (2000, 500)


def test_this_machine_has_memory() -> None:
    machine = this_machine()
    assert 0 < machine.ram.free <= machine.ram.total


@pytest.mark.parametrize(
    ("answer", "cards"),
    [
        ("NVIDIA H200, 143771, 143000\nCard, odd, 143771, 10\n", [("NVIDIA H200", 143771), ("Card, odd", 143771)]),
        ("NVIDIA GB10, [N/A], [N/A]\n", []),
        ("", []),
    ],
)
def test_gpus_are_those_the_driver_lists(
    answer: str, cards: list[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{answer}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert [(gpu.name, gpu.total >> 20) for gpu in this_machine().gpus] == cards


def test_a_driver_that_fails_means_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert this_machine().gpus == ()


def test_f5_a_limit_on_the_addresses_of_a_process_is_a_limit_on_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    free = host_memory()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (10**15, -1))
    assert host_memory().total == free.total
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (10**6, -1))
    assert (host_memory().total, host_memory().free) == (10**6, 0)


def test_shared_memory_is_what_its_place_has_left(tmp_path: Path) -> None:
    found = shared_memory(tmp_path)
    assert found is not None and found > 0
    assert shared_memory(tmp_path / "missing") is None


def test_names_of_groups_in_any_alphabet_and_folders_that_may_not_be_searched_are_no_fault(tmp_path: Path) -> None:
    (tmp_path / "groups").write_bytes("0::/ü/b\n".encode())
    assert usable_cores(tmp_path, tmp_path / "groups", range(2)).quota is None
    closed = tmp_path / "fs/cgroup"
    (closed / "a").mkdir(parents=True)
    (tmp_path / "groups").write_text("0::/a/b\n")
    closed.chmod(0)
    try:
        assert usable_cores(tmp_path, tmp_path / "groups", range(2)).quota is None
    finally:
        closed.chmod(0o700)
