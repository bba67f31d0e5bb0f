"""What all modules of one model share when they are built, and how they tell a checkpoint what they need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from spyglass.ops.declare import Ops
from spyglass.parallel.group import ALONE, Group
from spyglass.params.shard import WHOLE, Shard
from spyglass.params.table import Param, ParamTable
from spyglass.quant.codec import decode
from spyglass.quant.formats import BF16, F32
from spyglass.quant.packed import Packed, WeightSlot

if TYPE_CHECKING:
    from spyglass.layers.hosted import HostSide

RunPart = Callable[..., Any]


class SideStreams:
    """Work of a step that may run beside other work of it: side streams of a device, used while a graph is captured.

    Only there do their launches cost the host nothing; elsewhere all runs in order.

    What a branch reads must be held until `join`: memory that the main stream gives back sooner is used again at once.
    What a branch made is read after `join`, and given back before the next branch begins.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._open: list[torch.cuda.Stream] = []

    @contextmanager
    def branch(self, which: int = 0) -> Iterator[None]:
        """Launches inside go to side stream `which`, behind what the main stream has been given so far."""
        if self._device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            self._open.clear()  # of a capture that failed
            yield
            return
        if which not in self._streams:
            # first in line: there is little to do in a branch, and the main stream waits for its end
            self._streams[which] = torch.cuda.Stream(self._device, priority=-1)
        side = self._streams[which]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            yield
        self._open.append(side)

    def join(self) -> None:
        """What follows comes behind all branches."""
        for side in self._open:
            torch.cuda.current_stream().wait_stream(side)
        self._open.clear()


def run_part(part: torch.nn.Module, *inputs: Any) -> Any:
    """How a stack runs one of its layers, unless a driver puts another way in its place (see `train.recompute`)."""
    return part(*inputs)


@dataclass(slots=True)
class WeightsVersion:
    """A number that changes whenever weights or adapters of a model are put, taken out or moved."""

    number: int = 0

    def bump(self) -> None:
        self.number += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """`dtype` is the activation dtype (float32 or bfloat16). `expand`: decode packed weights to it when they arrive.

    `params`: the parameters of the whole model; a model puts in the table of its configuration. This process has
    `shard` of them and meets the others in `group`. `host`: whose routed experts lie in host memory; None = nobody's.
    """

    ops: Ops
    device: torch.device
    dtype: torch.dtype
    expand: bool = False
    params: ParamTable = field(default_factory=dict)
    version: WeightsVersion = field(default_factory=WeightsVersion)
    shard: Shard = WHOLE
    group: Group = ALONE
    host: HostSide | None = None
    side: SideStreams = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "side", SideStreams(self.device))

    def param(self, name: str) -> Param:
        """A parameter with the shape that this process has of it."""
        return self.shard.held(self.params[name])

    def rows(self, name: str) -> range:
        """Which rows of a parameter this process has."""
        cut = self.shard.cut(self.params[name])
        return range(self.params[name].shape[0]) if cut is None else range(cut.start, cut.stop)

    def hold(self, name: str, weight: Packed) -> Packed:
        """The weight as the model keeps it: on the device, packed as found unless `expand` asks for plain numbers.

        A float32 matrix stays float32: expanding never loses digits.

        Raises:
            DeviceError: the kernels chosen cannot hold the values of the weight `name`.
        """
        self.version.bump()
        if not self.expand and self.dtype == torch.bfloat16:
            self.ops.check_weight(name, weight)
        scale = None if weight.scale is None else weight.scale.to(self.device)
        held = Packed(weight.format, weight.data.to(self.device), scale, weight.shape)
        if not self.expand or weight.format.name == "f32":
            return held
        return Packed(BF16 if self.dtype == torch.bfloat16 else F32, decode(held, self.dtype), None, weight.shape)


@runtime_checkable
class Loadable(Protocol):
    """A leaf module that holds checkpoint tensors."""

    def slots(self) -> list[WeightSlot]: ...


def held_tensors(root: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Every tensor that a module below `root` holds: packed ones, those in a dict, those of what has `tensors()`."""
    for module in root.modules():
        for value in vars(module).values():
            for held in value.values() if isinstance(value, dict) else (value,):
                if isinstance(held, torch.Tensor):
                    yield held
                elif isinstance(held, Packed):
                    yield from (held.data,) if held.scale is None else (held.data, held.scale)
                elif hasattr(held, "tensors"):  # `isinstance` of a protocol takes 30 us
                    yield from held.tensors()


def weight_slots(root: torch.nn.Module) -> list[WeightSlot]:
    """Every place below `root` that a checkpoint tensor fills, in module order."""
    return [slot for module in root.modules() if isinstance(module, Loadable) for slot in module.slots()]
