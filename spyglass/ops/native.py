"""The compiled CPU kernels as Python functions, and what every op that calls them checks first.

A kernel sees addresses and sizes only, so it knows neither gradients nor strides: a tensor that wants a gradient is
refused (training uses the reference), a strided one is copied. Threads follow `torch.get_num_threads()`.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from spyglass.errors import DeviceError
from spyglass.ops.build import build, isas
from spyglass.quant.codec import decode
from spyglass.quant.formats import FakeQuant, StoredRow
from spyglass.quant.packed import Packed

_CODES: Mapping[str, Any] = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}
# One letter per argument: pointer, 64-bit integer, int, float.
_SIGNATURES = {
    "sg_keep_memory": "",
    "sg_replay": "pl",
    "sg_linear": "pillppiilliiiiippp" + "ii",
    "sg_linear_argmax": "pilppiilliiiiippp" + "i",
    "sg_experts": "pillpp" + "pppppp" + "lll" + "iiii" + "f" + "iii" + "ppli" + "pppp" * 3 + "pi",
    "sg_lora_delta": "pilll" + "ppppp" + "ll" + "pi",
    "sg_engram_gate": "pilll" + "pppp" + "f" + "pi",
    "sg_router": "pill" + "pill" + "f" + "pppppp" + "ppi",
    "sg_attention": "pilll" + "pllpl" + "ppp" + "pfl" + "pllpl" + "ppll" + "pi",
    "sg_index_topk": "pipif" + "lll" + "pllpl" + "pp" + "pll" + "lli" + "pi",
    "sg_compress_pool": "ppp" + "llli" + "pii",
    "sg_compress_rows": "pppp" + "ll" + "pi",
    "sg_hyper_mix": "pilll" + "ppp" + "ffl" + "pppi",
    "sg_hyper_head": "pilll" + "ppp" + "ff" + "pi",
    "sg_hyper_collapse": "pilll" + "ppi",
    "sg_hyper_expand": "ppilll" + "pppi",
    "sg_rope": "pilll" + "pplipi",
    "sg_rms_norm": "pill" + "pfipi",
    "sg_fake_quant": "pill" + "liiii" + "pi",
    "sg_hadamard": "pill" + "pi",
    "sg_cache_write": "pipill" + "pi",
    "sg_store_rows": "plpill" + "pi",
    "sg_swiglu": "ppill" + "f" + "pi",
    "sg_add_shared": "ppill" + "pi",
}
_NOT_ON_TAPE = ("sg_keep_memory", "sg_replay")
Function = Callable[..., None]
NO_QUANT = (0, 0, 0)
_WORD = (1 << 64) - 1
PAIR_ISAS = ("amx_bf16", "avx512_bf16")  # those that multiply bf16 pairs
PAIR_SCALES = (127 - 117, 127 + 119)  # e8m0 bytes
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_FORMATS = {"f32": 0, "bf16": 1, "fp8": 2, "fp4": 3}


@dataclass(frozen=True, slots=True)
class Kernels:
    """The functions of one library.

    `replay` makes many calls at once (see `runtime/cpu_graph.py`), by what `on_tape` knows of each function: the
    address of the form that takes words, and the letters of its arguments. `replay_one` is the address of a C function
    of one pointer that makes the call whose words lie there.
    """

    on_tape: Mapping[str, tuple[int, str]]
    replay_one: int
    replay: Function
    linear: Function
    linear_argmax: Function
    experts: Function
    lora_delta: Function
    engram_gate: Function
    router: Function
    attention: Function
    index_topk: Function
    compress_pool: Function
    compress_rows: Function
    hyper_mix: Function
    hyper_head: Function
    hyper_collapse: Function
    hyper_expand: Function
    rope: Function
    rms_norm: Function
    fake_quant: Function
    hadamard: Function
    cache_write: Function
    store_rows: Function
    swiglu: Function
    add_shared: Function


class _Listener(threading.local):
    hear: Callable[[str, tuple[Any, ...]], None] | None = None


_LISTENER = _Listener()


@contextmanager
def hearing(hear: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Inside, `hear` is told of every kernel call of this thread after it was made: name in `Kernels` and arguments."""
    assert _LISTENER.hear is None, "one capture at a time"
    _LISTENER.hear = hear
    try:
        yield
    finally:
        _LISTENER.hear = None


def _call(name: str, function: Function, *arguments: Any) -> None:
    function(*arguments)
    if _LISTENER.hear is not None:
        _LISTENER.hear(name, arguments)


@cache
def kernels_for(isa: str) -> Kernels:
    """The library for one instruction set, built if need be.

    Raises:
        DeviceError: it cannot be built, or this processor cannot run it.
    """
    if isa not in isas():
        raise DeviceError(f"this processor has no {isa}; it has {', '.join(isas())}")
    path = build(isa)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise DeviceError(f"the CPU kernels in {path} cannot be loaded: {error}; use ops='reference'") from error
    functions: dict[str, Function] = {}
    on_tape: dict[str, tuple[int, str]] = {}
    for name, letters in _SIGNATURES.items():
        function = library[name]
        function.argtypes = [_CODES[letter] for letter in letters]
        function.restype = None
        short = name.removeprefix("sg_")
        functions[short] = function
        if name not in _NOT_ON_TAPE:
            functions[short] = partial(_call, short, function)
            address_of = ctypes.cast(library[f"{name}_on_tape"], ctypes.c_void_p).value
            assert address_of is not None
            on_tape[short] = address_of, letters
    functions.pop("keep_memory")()
    replay_one = ctypes.cast(library["sg_replay_one"], ctypes.c_void_p).value
    assert replay_one is not None
    return Kernels(on_tape=on_tape, replay_one=replay_one, **functions)


def append_words(words: list[int], kernels: Kernels, name: str, arguments: tuple[Any, ...]) -> list[tuple[int, int]]:
    """Append a call as `csrc/tape.cpp` reads it; its pointers: word and address."""
    address, letters = kernels.on_tape[name]
    words += [address, len(arguments)]
    pointers: list[tuple[int, int]] = []
    for letter, value in zip(letters, arguments, strict=True):
        if letter == "p" and value:
            pointers.append((len(words), value))
        words.append(struct.unpack("<I", struct.pack("<f", value))[0] if letter == "f" else int(value or 0) & _WORD)
    return pointers


@cache
def best() -> Kernels:
    """The library for this machine. Raises DeviceError when it cannot be built."""
    return kernels_for(isas()[0])


def refuse_gradient(op: str, *tensors: torch.Tensor | None) -> None:
    """Raises DeviceError when autograd would have to see through a kernel."""
    if not torch.is_grad_enabled():
        return
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            raise DeviceError(
                f"the CPU kernel of {op} has no backward; train with ops='reference' or use torch.no_grad()"
            )


def dtype_code(op: str, tensor: torch.Tensor) -> int:
    """How the kernels call the dtype of activations. Raises DeviceError for any but float32 and bfloat16."""
    code = DTYPES.get(tensor.dtype)
    if code is None or not tensor.is_cpu:
        raise DeviceError(
            f"the CPU kernel of {op} takes float32 or bfloat16 on the CPU, not {tensor.dtype} on {tensor.device}"
        )
    return code


def row_code(op: str, pages: torch.Tensor, format: StoredRow | None) -> int:
    """How the kernels call what rows of these pages are: `RowForm` in `csrc/stored.h`.

    Raises:
        DeviceError: a dtype without kernel, bytes of no format or of another width, or strided pages.
    """
    if not pages.is_contiguous():
        raise DeviceError(f"the CPU kernel of {op} needs contiguous pages")
    if pages.dtype != torch.uint8:
        return dtype_code(op, pages)
    if format is None or pages.shape[-1] != format.row_bytes or not pages.is_cpu:
        raise DeviceError(f"the CPU kernel of {op} cannot read rows of {pages.shape[-1]} bytes as {format}")
    element, block, e4m3_scale = quant_codes(format.quant)
    return element << 1 | e4m3_scale << 3 | block << 4 | format.dims << 20


def quant_codes(rounding: FakeQuant | None) -> tuple[int, int, int]:
    """Element, block and kind of scale of an activation rounding."""
    if rounding is None:
        return NO_QUANT
    return 1 if rounding.element == "e4m3" else 2, rounding.block, int(rounding.scale == "e4m3")


def weight_codes(op: str, weight: Packed) -> tuple[int, int, int, int]:
    """Format, kind of scale, rows and columns per scale. Raises DeviceError for blocks narrower than 32 inputs."""
    format = weight.format
    if format.block is None:
        return _FORMATS[format.name], 0, 1, 1
    rows, columns = format.block
    if columns % 32:
        raise DeviceError(f"the CPU kernel of {op} needs one scale for a multiple of 32 inputs, not {columns}")
    return _FORMATS[format.name], 2 if format.scale_dtype == "F32" else 1, rows, columns


def matrix_arguments(op: str, weight: Packed) -> tuple[int | None, ...]:
    """A matrix as the products of `csrc/linear.cpp` take it. Raises DeviceError as `weight_codes`."""
    format, kind, rows, columns = weight_codes(op, weight)
    return weight.data.data_ptr(), address(weight.scale), format, kind, *weight.shape, rows, columns


def refuse_scales(name: str, weight: Packed) -> None:
    """Refuse a weight that the bf16 pair products would multiply by another power of two than its own.

    They take e8m0 bytes of 2^-117 .. 2^119 (`csrc/product.h`). A scale outside of that whose codes are all zero passes.

    Raises:
        DeviceError: the weight `name` has other values there.
    """
    scale = weight.scale
    if scale is None or scale.dtype != torch.uint8 or isas()[0] not in PAIR_ISAS:
        return
    held = scale.clamp(*PAIR_SCALES)
    if torch.equal(held, scale):
        return
    if not torch.equal(decode(weight, torch.float32), decode(replace(weight, scale=held), torch.float32)):
        raise DeviceError(
            f"{name} has scales outside 2^-117 .. 2^119, which the bf16 CPU kernels cannot hold; "
            "load it with ops='reference' or dtype='float32'"
        )


def address(tensor: torch.Tensor | None) -> int | None:
    """Where its data lies; None for no tensor."""
    return None if tensor is None else tensor.data_ptr()


def int32(tensor: torch.Tensor) -> torch.Tensor:
    """As contiguous int32."""
    if tensor.dtype is torch.int32 and tensor.is_contiguous():
        return tensor
    return tensor.to(torch.int32).contiguous()


def float32(tensor: torch.Tensor) -> torch.Tensor:
    """As contiguous float32."""
    if tensor.dtype is torch.float32 and tensor.is_contiguous():
        return tensor
    return tensor.to(torch.float32).contiguous()
