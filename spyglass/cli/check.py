"""`spyglass check DIR`: what a checkpoint is and whether it would load here, from its headers alone, without torch."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spyglass.cli.check_experts import expert_lines, hosted_experts
from spyglass.cli.check_plan import plan_lines, speed_here
from spyglass.cli.options import add_model, note_bases, required_model
from spyglass.progress import shown_bytes

if TYPE_CHECKING:
    from spyglass.config import ModelConfig

HELP = (
    "Say from headers alone whether a checkpoint would load, what would run, and where it fits. The exit code is 0 if "
    "its files are sound (and its numbers, if they are compared), 1 if not."
)
WOULD_NOT_LOAD = 1
_AGREE = {"agree": True}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_model(parser, default=False)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--lora",
        metavar="DIR",
        action="append",
        default=[],
        help="an adapter that would be served with it, by folder or shipped name: judged and counted too",
    )
    parser.add_argument(
        "--numbers",
        action="store_true",
        help="also load the model and compare each op with its reference, on this machine and its default device",
    )
    parser.add_argument("--plan", action="store_true", help="print only what fits and runs where, and how fast")


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 if the checkpoint would load, 1 if not."""
    from spyglass.config.shipped import find_model
    from spyglass.errors import SpyglassError

    directory = str(find_model(required_model(args, "check")))
    report: dict[str, Any] = {"directory": directory, "would_load": False, "faults": []}
    try:
        note_bases({name: name for name in args.lora}, Path(directory))
        _examine(directory, report, args.lora, measures=args.plan)
        if args.numbers and not report["faults"]:
            report["numbers"] = _compare_numbers(directory, args.lora)
    except SpyglassError as error:
        report["faults"].append(str(error))
    report["would_load"] = not report["faults"]
    print(json.dumps(report, indent=2) if args.json else _as_text(report, plan_only=args.plan))
    return 0 if report["would_load"] and report.get("numbers", _AGREE)["agree"] else WOULD_NOT_LOAD


def _compare_numbers(directory: str, adapters: list[str]) -> dict[str, Any]:
    """What the comparison of ops with their references found; loads the model."""
    from spyglass.engine.llm import LLM

    llm = LLM(directory, numbers="on", adapters={f"adapter{n}": place for n, place in enumerate(adapters)})
    if llm.numbers is None:
        return {"agree": True, "text": "not compared: the weights are drawn"}
    return {**llm.numbers.as_json(), "text": str(llm.numbers)}


def _examine(directory: str, report: dict[str, Any], adapters: list[str], *, measures: bool) -> None:
    """Fill the report as far as the folder allows. `measures`: bandwidths beside a GPU, which takes seconds."""
    from spyglass.checkpoint.match import match
    from spyglass.checkpoint.origin import mixed_revisions
    from spyglass.checkpoint.safetensors import open_checkpoint
    from spyglass.checkpoint.zeros import zero_stretches
    from spyglass.config import read_model_config
    from spyglass.machine import this_machine, usable_cores
    from spyglass.ops.build import why_not
    from spyglass.params.hf_names import to_native
    from spyglass.params.table import COMPONENTS, component_of, draft_kind, most_tensors, param_table
    from spyglass.plan import plan_memory

    config = read_model_config(directory)
    report["family"] = config.family
    report["model"] = _describe_model(config)
    checkpoint = open_checkpoint(directory, most_tensors(config))
    matched = match(checkpoint, param_table(config))
    groups: dict[str, dict[str, int]] = {group: {"tensors": 0, "bytes": 0} for group in COMPONENTS}
    for name, header in checkpoint.tensors.items():
        entry = groups[component_of(to_native(name))]
        entry["tensors"] += 1
        entry["bytes"] += header.nbytes
    report["tensors"] = len(checkpoint.tensors)
    report["bytes"] = checkpoint.nbytes
    report["files"] = len(checkpoint.files)
    report["groups"] = {group: entry for group, entry in groups.items() if entry["tensors"]}
    report["draft"] = draft_kind(matched.skipped["draft"])
    report["formats"] = dict(Counter(str(source.format) for source in matched.sources.values()))
    report["left_at_init"] = matched.at_init
    report["ignored_files"] = list(checkpoint.ignored_files)
    report["sparse_files"] = list(checkpoint.sparse_files())
    report["tokenizer"], tokenizer_faults = _examine_tokenizer(directory, config)
    report["mixed_revisions"] = mixed_revisions(checkpoint)
    stretches = zero_stretches(checkpoint)
    unfilled = [str(one) for one in stretches if not (one.whole and one.file.name in report["sparse_files"])]
    report["faults"] = matched.faults() + unfilled + tokenizer_faults + _engram_faults(Path(directory), config)
    machine = this_machine()
    report["ops"] = _describe_ops(has_gpu=bool(machine.gpus))
    report["gpu_kernels"] = standings() if machine.gpus else {}
    report["no_cpu_kernels"] = why_not()
    report["vision_graphs"] = config.vision is not None and _has_graphs(report["ops"])
    beside = sum(_adapter_bytes(Path(directory), adapter, config) for adapter in adapters)
    report["memory"] = asdict(
        plan_memory(
            config,
            matched.sources,
            machine,
            packed=checkpoint.has_packed_weights,
            threads=usable_cores().threads,
            adapter_bytes=beside,
        )
    )
    report["experts"] = hosted_experts(config, matched.sources, machine, beside, measures=measures)
    stored = report["memory"]["rows"]["cpu"] == "packed"
    report["speed"] = speed_here(config, matched.sources, stored) if measures else {}
    here = [*report["memory"]["here"], *(row for row in report["experts"] if row["here"])]
    report["fits_here"] = any(fit["context"] for fit in here)


def _adapter_bytes(model: Path, adapter: str, config: ModelConfig) -> int:
    """What an adapter takes beside the weights. Its values are read, so this loads torch.

    Raises:
        AdapterError: it is damaged, or does not fit the model.
    """
    from spyglass.config.shipped import find_adapter
    from spyglass.lora.peft import read_adapter

    return read_adapter(find_adapter(adapter, model), config).bank_bytes()


def _examine_tokenizer(directory: str, config: ModelConfig) -> tuple[bool, list[str]]:
    """Whether the folder has a tokenizer, and what would keep it from being used with this model."""
    from spyglass.errors import PromptError
    from spyglass.prompt.placeholder import resolve_placeholder
    from spyglass.prompt.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(directory)
        resolve_placeholder(config, tokenizer)
    except PromptError as error:
        return True, [str(error)]
    return tokenizer is not None, []


def _engram_faults(directory: Path, config: ModelConfig) -> list[str]:
    """What would keep engram tables from being opened, without counting the classes of a whole tokenizer."""
    if config.text.engram is None:
        return []
    from spyglass.engram import TOKEN_MAP_NAME, TOKENIZER_NAME, hash_constants, read_classes

    hash_constants(config.text.engram)
    if (directory / TOKEN_MAP_NAME).exists():
        read_classes(directory, config.text.engram, config.text.vocab_size)
    elif not (directory / TOKENIZER_NAME).exists():
        return [f"{directory}: engram layers need {TOKENIZER_NAME} or {TOKEN_MAP_NAME}; neither is there"]
    return []


def _describe_model(config: ModelConfig) -> dict[str, Any]:
    """The few numbers that tell one model from another."""
    text, vision = config.text, config.vision
    ratios = Counter(plan.ratio for plan in text.layers)
    return {
        "layers": text.num_hidden_layers,
        "layers_by_ratio": {str(ratio): ratios[ratio] for ratio in sorted(ratios)},
        "hash_layers": sum(plan.router == "hash" for plan in text.layers),
        "hidden_size": text.hidden_size,
        "experts": text.n_routed_experts,
        "experts_per_token": text.num_experts_per_tok,
        "vocab_size": text.vocab_size,
        "max_position_embeddings": text.max_position_embeddings,
        "draft_layers": config.num_draft_layers,
        "vision_layers": vision.num_hidden_layers if vision is not None else 0,
    }


def _describe_ops(*, has_gpu: bool) -> dict[str, dict[str, str]]:
    """Which implementation of each op would run, per device and its default activation dtype."""
    from spyglass.ops.table import describe

    devices = [("cpu", "bfloat16"), *([("cuda", "bfloat16")] if has_gpu else [])]
    return {f"{device} {dtype}": describe(device, dtype) for device, dtype in devices}


def standings() -> dict[str, str]:
    """What is known of the Triton kernels on each GPU that torch sees, by its name and compute capability."""
    import torch

    from spyglass.ops.tuned import standing

    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return {f"{gpu.name} ({gpu.major}.{gpu.minor})": standing((gpu.major, gpu.minor)) for gpu in found}


def _has_graphs(ops: dict[str, dict[str, str]]) -> bool:
    """Whether images would go through CUDA graphs (`vision_graphs='auto'`)."""
    on_gpu = [chosen["vit_attention"] for device, chosen in ops.items() if device.startswith("cuda")]
    if not on_gpu:
        return False
    from spyglass.ops.declare import capabilities  # loads torch, which a machine without a GPU is spared

    return any("capturable" in capabilities("vit_attention", chosen) for chosen in on_gpu)


def _as_text(report: dict[str, Any], *, plan_only: bool = False) -> str:
    lines = [report["directory"]]
    if "model" in report and not plan_only:
        lines += _model_lines(report)
    if "groups" in report and not plan_only:
        lines += _tensor_lines(report)
    if not report.get("tokenizer", True) and not plan_only:
        lines.append("no tokenizer.json: takes token ids and images, but no text")
    if "ops" in report and not plan_only:
        lines += _ops_lines(report["ops"])
        lines += [f"Triton kernels on {name}: {known}" for name, known in report["gpu_kernels"].items()]
        if report["no_cpu_kernels"] is not None:
            lines.append(f"the fast kernels for processors cannot run: {report['no_cpu_kernels']}")
        lines.append(f"images through CUDA graphs: {'yes' if report['vision_graphs'] else 'no'}")
    if "memory" in report:
        lines += plan_lines(report) + expert_lines(report["experts"])
    if "numbers" in report:
        lines.append(f"numbers: {report['numbers']['text']}")
    lines += [f"fault: {fault}" for fault in report["faults"]]
    lines.append(_last_line(report))
    return "\n".join(lines)


def _last_line(report: dict[str, Any]) -> str:
    if not report["would_load"]:
        return "would load: NO"
    hollow = ", once its files hold values" if report["sparse_files"] else ""
    return f"would load: yes{hollow}" + ("" if report["fits_here"] else ", but not into this machine's free memory")


def _model_lines(report: dict[str, Any]) -> list[str]:
    model = report["model"]
    ratios = ", ".join(f"{count} of ratio {ratio}" for ratio, count in model["layers_by_ratio"].items())
    tower = f"image tower of {model['vision_layers']} layers" if model["vision_layers"] else "text only, no images"
    return [
        f"family: {report['family']}, {tower}",
        f"layers: {model['layers']} ({ratios}; {model['hash_layers']} routed by token id), hidden size "
        f"{model['hidden_size']}, {model['experts_per_token']} of {model['experts']} experts per token, "
        f"up to {model['max_position_embeddings']:,} tokens",
    ]


def _tensor_lines(report: dict[str, Any]) -> list[str]:
    lines = [f"tensors: {report['tensors']:,}, {shown_bytes(report['bytes'])} in {report['files']} files"]
    for group, entry in report["groups"].items():
        kind = f" ({report['draft']}, not loaded)" if group == "draft" and report["draft"] else ""
        lines.append(f"  {group:<8} {entry['tensors']:>7,}  {shown_bytes(entry['bytes']):>10}{kind}")
    lines.append("formats: " + ", ".join(f"{count:,} {name}" for name, count in sorted(report["formats"].items())))
    remarks = (
        ("left at init", report["left_at_init"]),
        ("files the index does not name", report["ignored_files"]),
        ("files that are mostly holes (headers only, or an unfinished download)", report["sparse_files"]),
        ("parts of more than one release", report["mixed_revisions"]),
    )
    return lines + [f"{what}: {_few(names)}" for what, names in remarks if names]


def _ops_lines(ops: dict[str, dict[str, str]]) -> list[str]:
    lines = []
    for device, chosen in ops.items():
        by_name: dict[str, list[str]] = {}
        for op, name in chosen.items():
            by_name.setdefault(name, []).append(op)
        lines.append(
            f"ops on {device}: " + "; ".join(f"{name}: {', '.join(by_name[name])}" for name in sorted(by_name))
        )
    return lines


def _few(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
