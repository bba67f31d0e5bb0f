"""How much memory rows may take: what is free once the weights are there, less the maximum that a step works with.

It is taken at the start, so a request that was accepted cannot run out of it later. (On a CPU the system hands out
memory when it is first touched, so a large limit costs nothing by itself.)
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from spyglass.config.cache import cache_plans
from spyglass.config.engine import EngineConfig
from spyglass.config.model import VisionConfig
from spyglass.engine.cache.allocator import CacheAllocator
from spyglass.engine.cache.pages import PageMemory
from spyglass.engine.engine import Engine
from spyglass.engine.fit import free_memory, total_memory
from spyglass.engine.lead import LeadMemory
from spyglass.engine.ranks import Ranks
from spyglass.engine.rehearsal import captured_bytes
from spyglass.engine.warm_up import largest_images
from spyglass.engram.feed import EngramFeed
from spyglass.errors import CapacityError
from spyglass.model import LoadedModel
from spyglass.placement import DRAWING, PREFIX_SHARE
from spyglass.plan import USABLE, decoded_bytes, step_bytes


def with_cache_bytes(
    options: EngineConfig, loaded: LoadedModel, engram: EngramFeed | None, ranks: Ranks | None = None
) -> EngineConfig:
    """The options with `cache_bytes` and `prefix_cache_bytes` filled in, for a model that is loaded.

    What was stated stays. On a system that does not tell what is free, rows take memory as they need it.

    Raises:
        CapacityError: nothing is left for rows.
    """
    if options.cache_bytes is not None:
        return options
    device = loaded.device
    on_gpu = device.type == "cuda"
    step = measured_step(options, loaded, engram, ranks) if on_gpu else estimated_step(options, loaded)
    free = free_memory(device)
    if free is not None and options.gpu_memory_utilization is not None:
        free = max(free - int(total_memory(device) * (1 - options.gpu_memory_utilization)), 0)
    if ranks is not None:
        free = ranks.least_free(free)
    if free is None:
        return options
    prefixes = free // PREFIX_SHARE if options.prefix_cache_bytes is None else options.prefix_cache_bytes
    left = int(free * USABLE) - step - prefixes - options.image_cache_bytes
    if left <= 0:
        raise CapacityError(
            f"{free:,} bytes may be taken on {device} beside the weights; a step takes {step:,} of them and the caches "
            f"{prefixes + options.image_cache_bytes:,}, which leaves nothing for requests: lower max_step_tokens, "
            "prefix_cache_bytes or image_cache_bytes, or raise gpu_memory_utilization if it is set"
        )
    return replace(options, cache_bytes=left, prefix_cache_bytes=prefixes)


def with_pace(options: EngineConfig, loaded: LoadedModel) -> EngineConfig:
    """The options with steps that are not cut by time where a GPU gets copies of experts in host memory: such a step
    costs the copies, however few its rows are, and with too few rows the host computes them at a fraction of the speed.
    """
    host = loaded.model.options.build.host
    return options if host is None or host.many is None else replace(options, step_milliseconds=0)


def estimated_step(options: EngineConfig, loaded: LoadedModel) -> int:
    """Bytes that a full step works with: the text part (`plan.step_bytes`) with rows that threads decode, and the tower
    on a step of images."""
    config = loaded.config
    wide = 2 if loaded.dtype == torch.float32 else 1  # `step_bytes` counts bfloat16
    text = wide * step_bytes(config, options.max_step_tokens, options.max_sequences)
    if loaded.stores_rows:
        longest = options.context_length(config.text.max_position_embeddings)
        threads = torch.get_num_threads() * options.tensor_parallel_size
        text += decoded_bytes(config.text, longest, threads, 2 * wide)
    if config.vision is None or not options.images:
        return text
    return text + _tower_bytes(config.vision, options.max_step_tokens)


def measured_step(
    options: EngineConfig, loaded: LoadedModel, engram: EngramFeed | None, ranks: Ranks | None = None
) -> int:
    """The maximum of bytes that torch held on a GPU above what it holds now, while a full step with an image ran.

    The trial draws one token; what drawing takes for `max_sequences` answers at once is added, and what all captured
    steps take, of which the two largest are tried: the first brings the memory that all share.
    """
    allocator = CacheAllocator(
        cache_plans(loaded.config.text, stored=loaded.stores_rows),
        dtype=loaded.dtype,
        device=loaded.device,
        max_sequences=options.max_sequences,
        step_tokens=options.max_step_tokens,
        max_length=loaded.config.text.max_position_embeddings,
        memory=PageMemory if ranks is None else partial(LeadMemory, ranks),
    )
    trial = replace(options, prefix_cache_bytes=0, image_cache_bytes=0)
    engine = Engine(
        loaded.model,
        loaded.config,
        trial,
        dtype=loaded.dtype,
        device=loaded.device,
        allocator=allocator,
        engram=engram,
        ranks=ranks,
    )
    torch.cuda.reset_peak_memory_stats(loaded.device)
    before = torch.cuda.memory_allocated(loaded.device)
    engine.warm_up(options.max_step_tokens)
    drawing = options.max_sequences * loaded.config.text.vocab_size * DRAWING
    step = torch.cuda.max_memory_allocated(loaded.device) - before + drawing
    return step + captured_bytes(engine, loaded.model, lambda: torch.cuda.mem_get_info(loaded.device)[0])


def _tower_bytes(vision: VisionConfig, tokens: int) -> int:
    """Patches of one call (a step's worth of image tokens, or one image), times what is alive beside each."""
    largest = largest_images(vision)
    patches = max(plan.vit_grid[0] * plan.vit_grid[1] for plan in largest)
    patches = max(patches, tokens * vision.downsample_ratio**2)
    return patches * 4 * (6 * vision.hidden_size + 2 * vision.intermediate_size)
