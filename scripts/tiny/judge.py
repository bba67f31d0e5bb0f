"""Whether models may be shipped: `python -m scripts.tiny.judge DIR` asks them and their adapters everything, on a CPU.

DIR is laid out as `spyglass/models`. Printed is a table by kind for each model; the program ends with 1 where a goal is
missed, each named.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.tiny.adapters import RECIPES
from scripts.tiny.models import FAMILIES, NAMES, Family
from spyglass.config.shipped import SHIPPED
from spyglass.engine import LLM, RequestOutput, SamplingParams
from spyglass.tiny_world.cases import Split
from spyglass.tiny_world.evaluate import Report, evaluate
from spyglass.tiny_world.uses import use_kinds_of

ALL = "overall"
OF_ADAPTERS: Mapping[str, float] = {ALL: 0.95}
GOALS: Mapping[tuple[str, Split], Mapping[str, float]] = {
    ("taught", "test"): {ALL: 0.97, "": 0.92},  # "" = each kind
    ("taught", "unseen"): {ALL: 0.90, "count": 0.85},
    ("uses", "test"): {ALL: 0.92, "": 0.85},
    ("uses", "unseen"): {ALL: 0.85},
}
OF_FAMILY: Mapping[tuple[Family, str, Split], Mapping[str, float]] = {
    ("v41", "taught", "test"): {"count": 0.92, "grounding": 0.97}
}


@dataclass(frozen=True, slots=True)
class WithAdapter:
    """A model with one of its adapters, as `evaluate` asks it."""

    llm: LLM
    adapter: str

    def chat(self, messages: Sequence[Any], params: SamplingParams, **options: Any) -> list[RequestOutput]:
        """Answers to conversations, in order."""
        return self.llm.chat(messages, params, adapter=self.adapter, **options)


def shares(report: Report) -> dict[str, float]:
    """The share of right answers of each kind, and of all."""
    kinds = {verdict.kind for verdict in report.verdicts}
    by_kind = {kind: [v.right for v in report.verdicts if v.kind == kind] for kind in sorted(kinds)}
    return {kind: sum(right) / len(right) for kind, right in by_kind.items()} | {ALL: report.accuracy}


def missed(found: Mapping[str, float], goals: Mapping[str, float]) -> Iterator[str]:
    """The goals that a report misses, in words."""
    for kind, share in found.items():
        goal = goals.get(kind, 0.0 if kind == ALL else goals.get("", 0.0))
        if share < goal:
            yield f"{kind} {100 * share:.1f} % of {100 * goal:.0f} %"


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path, nargs="?", default=SHIPPED)
    parser.add_argument("--num", type=int, default=2000, help="questions about what was always taught; others fewer")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--only", choices=FAMILIES, action="append")
    args = parser.parse_args(arguments)
    faults = []
    for family in args.only or FAMILIES:
        llm = LLM(args.models / NAMES[family], device="cpu")
        for (what, split), goals in GOALS.items():
            num = max(1, args.num * (10 if split == "test" else 3) // 10)
            kinds = use_kinds_of(split) if what == "uses" else None
            report = evaluate(llm, num, args.seed, split=split, kinds=kinds)
            print(f"\n{NAMES[family]}, {what}, {split}\n{report.table()}", flush=True)
            goals = {**goals, **OF_FAMILY.get((family, what, split), {})}
            faults += [f"{NAMES[family]}, {what}, {split}: {fault}" for fault in missed(shares(report), goals)]
        for recipe in RECIPES.values():
            if recipe.family == family:
                llm.add_adapter(recipe.name, args.models / recipe.place)
                asked = WithAdapter(llm, recipe.name)
                report = evaluate(asked, max(1, args.num // 4), args.seed, variant=recipe.variant)
                print(f"\n{NAMES[family]}, {recipe.name}\n{report.table()}", flush=True)
                faults += [f"{recipe.key}: {fault}" for fault in missed(shares(report), OF_ADAPTERS)]
    print("\n" + "\n".join(faults or ["every goal is reached"]), flush=True)
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
