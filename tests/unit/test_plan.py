"""Memory plans: the printed numbers, and laws of what fits where."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spyglass import plan
from spyglass.checkpoint.match import match
from spyglass.checkpoint.random import new_checkpoint
from spyglass.checkpoint.safetensors import open_checkpoint
from spyglass.config.presets import Preset, preset_config
from spyglass.config.read import parse_model_config, read_model_config
from spyglass.errors import CapacityError
from spyglass.machine import Device, Machine
from spyglass.model import load_model
from spyglass.params.shard import even_sizes
from spyglass.params.table import param_table
from spyglass.plan import Fit, MemoryPlan, cache_bytes, plan_memory

GB = 10**9
ROOMY = Machine(Device("host", 900 * GB, 800 * GB), (Device("A", 100 * GB, 90 * GB), Device("B", 100 * GB, 40 * GB)))


def planned(folder: Path, preset: Preset, machine: Machine = ROOMY, *, format: str = "packed") -> MemoryPlan:
    new_checkpoint(folder, preset, headers_only=True, format=format)  # type: ignore[arg-type]
    config = read_model_config(folder)
    checkpoint = open_checkpoint(folder)
    matched = match(checkpoint, param_table(config))
    assert not matched.faults()
    return plan_memory(config, matched.sources, machine, packed=checkpoint.has_packed_weights)


def planned_here(folder: Path) -> MemoryPlan:
    config, checkpoint = read_model_config(folder), open_checkpoint(folder)
    sources = match(checkpoint, param_table(config)).sources
    return plan_memory(config, sources, ROOMY, packed=checkpoint.has_packed_weights)


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> MemoryPlan:
    return planned(tmp_path_factory.mktemp("flash"), "flash-vision")


def test_printed_cache_sizes() -> None:
    """Spec v4 4.7: growth per token of the whole model, and the windows of one sequence."""
    text = parse_model_config(preset_config("flash-vision", packed=True), "flash").text
    assert cache_bytes(text, "bfloat16").per_token == 21 * (1024 + 256) / 4 + 20 * 1024 / 128 == 6880
    assert cache_bytes(text, "packed").per_token == 21 * (584 + 68) / 4 + 20 * 584 / 128 == 3514.25
    state = 21 * 8 * 4 * 2 * 2 * (512 + 128) + 20 * 128 * 4 * 2 * 512  # un-pooled rows in fp32 (spec v4 5.4)
    assert cache_bytes(text, "packed").fixed - state == 43 * 128 * 584
    assert cache_bytes(text, "bfloat16").fixed - state == 43 * 128 * 1024
    assert cache_bytes(text, "float32").per_token == 2 * 6880


def test_released_weights(flash: MemoryPlan) -> None:
    assert flash.weights["experts"].stored == 43 * 3_422_552_064
    assert flash.total.stored == 156_015_745_244 + 823_685_120 + 109_068_288 + 32_768
    assert flash.weights["vision"].stored == 823_685_120 + 109_068_288 + 32_768
    assert flash.weights["experts"].expanded == 43 * 256 * 3 * 4096 * 2048 * 2


def test_where_the_released_weights_fit(flash: MemoryPlan) -> None:
    """157 GB: not one card of 141 GB, but one of 192, two of 96, four of 48."""
    fits = {(fit.name, fit.count): fit.context for fit in flash.gpus}
    assert not fits["141 GB", 1] and fits["192 GB", 1]
    assert not fits["80 GB", 1] and fits["96 GB", 2] and fits["48 GB", 4]
    assert not fits["24 GB", 4]


def test_more_memory_or_more_cards_never_fit_less(flash: MemoryPlan) -> None:
    by_size: dict[str, list[Fit]] = {}
    for fit in flash.gpus:
        by_size.setdefault(fit.name, []).append(fit)
    for row in by_size.values():
        assert [fit.count for fit in row] == [1, 2, 4, 8]
        assert all(a.weights > b.weights and a.context <= b.context for a, b in itertools.pairwise(row))
    for count in range(4):
        column = [row[count].context for row in by_size.values()]
        assert column == sorted(column)


def test_conversations_at_once_are_what_the_rest_of_the_memory_holds(flash: MemoryPlan) -> None:
    for fit in (*flash.here, *flash.gpus):
        rows = flash.cache[flash.rows["cpu" if fit in flash.here else "cuda"]]
        text = parse_model_config(preset_config("flash-vision", packed=True), "flash").text
        decoded = plan.decoded_bytes(text, text.max_position_embeddings, 1) if fit.name == "host" else 0
        room = fit.usable - fit.weights - flash.step_bytes - decoded
        each = rows.fixed + rows.per_token * plan.CONVERSATION
        assert fit.conversations == (int(room / each) if fit.context else 0)


def test_threads_that_decode_rows_take_memory_and_plain_rows_take_none(tmp_path: Path) -> None:
    """V4-Flash: a query of a layer with ratio 128 attends 8,192 rows behind a million tokens, one of ratio 4 no more
    than 512; each is 512 numbers wide. Of so many threads there are fewer than two queries each that share heads out,
    and each decodes one more for itself."""
    text = parse_model_config(preset_config("flash-vision", packed=True), "flash").text
    assert plan.decoded_bytes(text, 1 << 20, 1) == 2 * (128 + 16 + 8192) * 512 * 2
    assert plan.decoded_bytes(text, 1 << 20, 8) == 23 * (128 + 16 + 8192) * 512 * 2
    assert plan.decoded_bytes(text, 8192, 2, 4) == 5 * (128 + 16 + 512) * 512 * 4
    new_checkpoint(tmp_path, "tiny", headers_only=True)
    config, checkpoint = read_model_config(tmp_path), open_checkpoint(tmp_path)
    sources = match(checkpoint, param_table(config)).sources
    for packed in (True, False):
        one, many = (plan_memory(config, sources, ROOMY, packed=packed, threads=n).processor_bytes for n in (1, 64))
        assert (many > one) == packed


def test_a_plan_has_rows_as_the_model_will_where_drafts_alone_are_packed(tmp_path: Path) -> None:
    """Loading goes by every tensor of the folder; drafts are not read, and still the released code would round."""
    folder = tmp_path / "m"
    new_checkpoint(folder, "tiny", format="bf16")
    assert planned_here(folder).rows["cpu"] == "bfloat16"
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["mtp.0.attn.wq_a.weight"] = torch.zeros(4, 4, dtype=torch.float8_e4m3fn)
    for path in (file, *folder.glob("*.index.json")):
        path.unlink()
    save_file(tensors, folder / "model.safetensors")
    assert load_model(folder).numerics == "reference" and planned_here(folder).rows["cpu"] == "packed"


def test_only_numbers_of_gpus_that_a_model_divides_into_are_planned(tmp_path: Path) -> None:
    found = planned(tmp_path, "tiny")
    sizes = even_sizes(param_table(read_model_config(tmp_path)))
    assert sorted({fit.count for fit in found.gpus}) == [count for count in plan.GPU_COUNTS if count in sizes]


def test_the_memory_that_a_processor_needs_is_the_least_that_fits(tmp_path: Path) -> None:
    first = planned(tmp_path, "tiny")
    config = read_model_config(tmp_path)
    sources = match(open_checkpoint(tmp_path), param_table(config)).sources
    for free, fits in ((first.processor_bytes + 64, True), (first.processor_bytes - 64, False)):
        found = plan_memory(config, sources, Machine(Device("host", free, free), ()), packed=True)
        assert bool(found.here[0].context) == fits


def test_fine_tuning_takes_its_adapters_four_times_over_and_the_streams_of_all_layers(flash: MemoryPlan) -> None:
    """V4-Flash: 157 GB of weights, adapters of rank 16, 43 layers' streams of 4 x 4,096, and a layer backwards."""
    config = parse_model_config(preset_config("flash-vision", packed=True), "flash")
    params = param_table(config)
    taken = plan.training_bytes(config, params)
    pairs = sum(16 * sum(param.shape) for param in params.values() if param.adapter in ("attention", "shared"))
    streams = 43 * 4 * 4096 * 2 * 4096
    assert taken == 16 * pairs + streams + int(4.2 * plan.step_bytes(config, 4096, 0))
    assert flash.training_bytes == int((flash.total.stored + taken) / plan.USABLE)


def test_what_is_free_here_decides(flash: MemoryPlan) -> None:
    host, cards = flash.here
    assert (host.name, host.count, host.usable) == ("host", 1, int(800 * GB * plan.USABLE))
    assert host.weights == flash.total.stored and host.context == 1_048_576
    assert (cards.name, cards.count, cards.context) == ("B", 2, 0), "the fullest card decides"


def test_a_split_model_copies_what_cannot_be_split(flash: MemoryPlan) -> None:
    one, eight = flash.gpus[0].weights, flash.gpus[3].weights
    copied = flash.weights["copied"].stored + flash.weights["vision"].stored
    assert one == flash.total.stored
    assert eight == pytest.approx((one - copied) / 8 + copied, abs=8)


def test_widened_weights_are_those_of_the_bf16_checkpoint(tmp_path: Path) -> None:
    packed = planned(tmp_path / "packed", "mini")
    plain = planned(tmp_path / "plain", "mini", format="bf16")
    assert packed.total.expanded == plain.total.stored == plain.total.expanded > 2 * packed.total.stored


def test_a_context_too_short_to_use_does_not_count_as_fitting(tmp_path: Path) -> None:
    """Room for weights and one step, but not for 4,096 tokens."""
    first = planned(tmp_path, "tiny")
    config = read_model_config(tmp_path)
    sources = match(open_checkpoint(tmp_path), param_table(config)).sources
    rows = first.cache[first.rows["cpu"]]
    bare = first.total.stored + first.step_bytes + rows.fixed
    bare += plan.decoded_bytes(config.text, config.text.max_position_embeddings, 1)
    for tokens, fits in ((4000, False), (4200, True)):
        free = int((bare + tokens * rows.per_token) / plan.USABLE)
        found = plan_memory(config, sources, Machine(Device("host", free, free), ()), packed=True)
        assert bool(found.here[0].context) == fits


def test_adapters_take_room_on_every_device(tmp_path: Path) -> None:
    planned(tmp_path, "tiny")
    config = read_model_config(tmp_path)
    sources = match(open_checkpoint(tmp_path), param_table(config)).sources
    machine = Machine(Device("host", 1 << 40, 1 << 40), (Device("gpu", 1 << 35, 1 << 35),) * 2)
    without, beside = (plan_memory(config, sources, machine, packed=True, adapter_bytes=count) for count in (0, 12345))
    pairs = list(zip(without.here + without.gpus, beside.here + beside.gpus, strict=True))
    assert all(b.weights == a.weights + 12345 for a, b in pairs) and beside.adapter_bytes == 12345
    full = plan_memory(config, sources, machine, packed=True, adapter_bytes=1 << 35)
    assert without.here[1].context and not full.here[1].context


def test_a_longer_step_needs_more_memory() -> None:
    config = parse_model_config(preset_config("flash-vision", packed=True), "flash")
    steps = [plan.step_bytes(config, tokens) for tokens in (1, 128, 2048)]
    assert steps == sorted(steps) and 0.5 * GB < steps[2] < 5 * GB


def test_weights_need_room_each_part_where_it_is_loaded(tmp_path: Path) -> None:
    found = planned(tmp_path, "tiny-v41")
    stored = {name: share.stored for name, share in found.weights.items()}
    text = found.total.stored - stored["vision"]
    assert stored["vision"] and stored["engram"]
    for need, options in (
        (text, {"images": False}),
        (found.total.stored, {}),
        (found.total.stored + stored["engram"], {"tables": True}),
        (found.total.expanded, {"expand": True}),
        (found.total.stored + 1000, {"adapters": 1000}),
    ):
        plan.require_memory(tmp_path, need, **options)
        with pytest.raises(CapacityError, match="--plan"):
            plan.require_memory(tmp_path, need - 1, **options)
