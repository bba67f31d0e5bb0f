"""Compiles the C++ kernels of `csrc/` for this machine's processor, once, into the user's cache.

`python -m spyglass.ops.build` does it ahead of time; otherwise the first model that is built does. One library per
instruction set, named after what went into it (sources, compiler, flags), so a stale one is never loaded. It gets its
name when it is whole; what a build leaves that is killed, the next one removes. Without a compiler the reference ops
run, and `why_not` says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import TextIO

from spyglass.errors import DeviceError

_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512")
# Best first: what /proc/cpuinfo must name, and what the compiler is told.
_X86_ISAS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "amx_bf16": (
        ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512vbmi", "fma", "amx_tile", "amx_bf16"),
        (*_AVX512, "-mavx512bf16", "-mavx512vbmi", "-mamx-tile", "-mamx-bf16"),
    ),
    "avx512_bf16": (
        ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512vbmi", "fma"),
        (*_AVX512, "-mavx512bf16", "-mavx512vbmi"),
    ),
    "avx512": (
        ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"),
        _AVX512,
    ),
    "avx2": (("avx2", "fma", "f16c"), ("-mavx2", "-mfma", "-mf16c")),
}
PLAIN = "plain"  # no flags: 16-byte vectors, which every 64-bit processor has
SOURCES = Path(__file__).with_name("csrc")
_UNFINISHED = ".unfinished-"  # in the name of a folder, behind that of the library that is built in it
WORD_EVERY, _LOOK_EVERY = 15.0, 0.2  # seconds
_LOG = logging.getLogger(__name__)
_FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-w")


def isas() -> tuple[str, ...]:
    """Instruction sets this processor can run, best first; `PLAIN` is always the last."""
    names = processor_flags()
    if "amx_tile" in names and not tiles_allowed():
        names -= {"amx_tile"}
    return (*(isa for isa, (needs, _) in _X86_ISAS.items() if names.issuperset(needs)), PLAIN)


@cache
def tiles_allowed() -> bool:
    """Ask the system to let this process (all its threads, and its children until they run another program) use tiles.

    They are off until asked for, since they make the state of a thread 8 KB larger (Linux 5.16 and later).
    """
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


@cache
def processor_flags() -> frozenset[str]:
    """What /proc/cpuinfo calls the abilities of this processor; empty where it is no x86 or cannot be asked."""
    info = Path("/proc/cpuinfo")
    if platform.machine() not in ("x86_64", "AMD64") or not info.exists():
        return frozenset()
    for line in info.read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def why_not() -> str | None:
    """Why the kernels cannot run here; None when they can: a built library, or a compiler and a place to build it.

    Cheap, never raises, compiles nothing and does not load torch.
    """
    if sys.platform != "linux":
        return f"the CPU kernels are built on Linux only, this is {sys.platform}"
    if find_compiler() is None:
        return "no C++ compiler was found (g++); install one, then run python -m spyglass.ops.build"
    path = library_path(isas()[0])
    note = _failure_note(path)
    if note.exists():
        return note.read_text()
    existing = next(folder for folder in path.parents if folder.exists())
    if not path.exists() and not os.access(existing, os.W_OK):
        return f"the CPU kernels cannot be stored in {path.parent}: {existing} is not writable; set XDG_CACHE_HOME"
    return None


def usable(device_type: str, dtype: str) -> bool:
    """Whether the kernels can serve this device type and dtype name; as cheap as `why_not`."""
    return device_type == "cpu" and dtype in ("float32", "bfloat16") and why_not() is None


@cache
def find_compiler() -> str | None:
    """The C++ compiler of this machine, None without one."""
    return shutil.which("g++") or shutil.which("c++")


def library_path(isa: str) -> Path:
    """Where the library for `isa` lies once it is built."""
    compiler = Path(find_compiler() or "none").resolve()
    parts = [
        path.name.encode() + path.read_bytes() for path in sorted(SOURCES.iterdir()) if path.suffix in (".h", ".cpp")
    ]
    stamp = compiler.stat().st_mtime_ns if compiler.exists() else 0
    parts.append(repr((str(compiler), stamp, _FLAGS, _flags_of(isa), _openmp_runtime())).encode())
    return _cache_folder() / f"cpu-{isa}-{hashlib.sha256(b''.join(parts)).hexdigest()[:20]}.so"


def _flags_of(isa: str) -> tuple[str, ...]:
    return () if isa == PLAIN else _X86_ISAS[isa][1]


def _cache_folder() -> Path:
    # the one place outside the engine's configuration that reads the environment: where a user's caches go
    root = os.environ.get("XDG_CACHE_HOME") or _home() / ".cache"
    return Path(root) / "spyglass"


def _home() -> Path:
    """The user's folder; without one (no entry in the list of users) one of this user alone among temporary files."""
    try:
        return Path.home()
    except RuntimeError:
        folder = Path(tempfile.gettempdir()) / f"spyglass-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()  # a library is loaded from there: nobody else may have put one in
    alone = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return folder if alone else Path(tempfile.mkdtemp(prefix="spyglass-"))


def _openmp_runtime() -> str | None:
    """Torch's own OpenMP library: two of them in one process would start two sets of threads."""
    spec = importlib.util.find_spec("torch")
    folders = [] if spec is None or spec.origin is None else [Path(spec.origin).parent]
    for folder in [*(f / "lib" for f in folders), *(f.parent / "torch.libs" for f in folders)]:
        for found in sorted(folder.glob("libgomp*.so*")):
            return str(found)
    return None


def _failure_note(path: Path) -> Path:
    return path.with_suffix(".failed")


def build(isa: str) -> Path:
    """The library for `isa`, compiled if it is not there yet; several processes may ask at once.

    Raises:
        DeviceError: there is no compiler, it failed, or the cache cannot be written.
    """
    path = library_path(isa)
    if path.exists():
        return path
    # a warning, because this is shown unless somebody silenced it, and nobody likes half a minute of silence
    _LOG.warning("building the CPU kernels for this processor: once, about half a minute")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent)
        with path.with_suffix(".lock").open("w") as lock:
            _wait_for(lock)
            if not path.exists():
                compile_library(isa, path)
    except OSError as error:
        raise DeviceError(
            f"the CPU kernels could not be stored in {path.parent}: {error}; use ops='reference'"
        ) from error
    return path


def _sweep(folder: Path) -> None:
    """Remove what builds left that were killed: the folders of those whose lock nobody holds any more."""
    for left in folder.glob(f"*{_UNFINISHED}*"):
        with (folder / f"{left.name.partition(_UNFINISHED)[0]}.lock").open("w") as lock:
            if _take(lock):
                shutil.rmtree(left, ignore_errors=True)


def _take(lock: TextIO) -> bool:
    """Lock the file, if no other process has; the lock goes when the file is closed, or its owner ends."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for(lock: TextIO) -> None:
    """Lock the file, and say from time to time that another process builds the same library."""
    began = told = time.monotonic()
    while not _take(lock):
        time.sleep(_LOOK_EVERY)
        if time.monotonic() - told >= WORD_EVERY:
            told = time.monotonic()
            _LOG.warning("another process builds the CPU kernels; waited for it for %.0f s", told - began)


def prepare() -> bool:
    """Build the best library if it is missing. False where that is not possible; `why_not()` then says why."""
    if why_not() is not None:
        return False
    try:
        build(isas()[0])
    except DeviceError:
        return False
    return True


def compile_library(isa: str, path: Path) -> None:
    """Compile the kernels for `isa` into the library at `path`. Raises DeviceError."""
    compiler, runtime = find_compiler(), _openmp_runtime()
    if compiler is None:
        raise DeviceError("no C++ compiler was found (g++); install one or use ops='reference'")
    with tempfile.TemporaryDirectory(prefix=path.stem + _UNFINISHED, dir=path.parent) as folder:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
        commands = [
            [compiler, *_FLAGS, *_flags_of(isa), "-c", str(source), "-o", target]
            for source, target in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            done = _results([pool.submit(_run, command) for command in commands])
        library = str(Path(folder) / path.name)
        # without -fopenmp here, the only OpenMP library it can ask for is torch's
        done.append(_run([compiler, "-shared", *objects, "-o", library, runtime or "-fopenmp"]))
        wrong = next((one for one in done if one.returncode), None)
        if wrong is not None:
            reason = f"the CPU kernels did not compile ({' '.join(wrong.args)}): {wrong.stderr[-2000:]}"
            note = _failure_note(path)
            note.write_text(f"{reason.strip()}; to try once more (memory may have been short) remove {note}")
            raise DeviceError(f"{reason}; use ops='reference'")
        os.replace(library, path)


def _results(runs: Sequence[Future[subprocess.CompletedProcess[str]]]) -> list[subprocess.CompletedProcess[str]]:
    """What compilers said, in order; from time to time a line tells how many of them are done."""
    began = time.monotonic()
    while not_done := wait(runs, timeout=WORD_EVERY).not_done:
        done, spent = len(runs) - len(not_done), time.monotonic() - began
        _LOG.warning("building the CPU kernels: %d of %d files after %.0f s", done, len(runs), spent)
    return [run.result() for run in runs]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def main() -> int:
    """Build for the best instruction set of this machine; a machine without compiler is no failure."""
    reason = why_not()
    if reason is not None:
        print(f"CPU kernels not built, the reference ops will run: {reason}")
        return 0
    try:
        print(f"CPU kernels: {build(isas()[0])}")
    except DeviceError as error:
        print(f"CPU kernels not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
