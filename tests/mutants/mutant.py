"""What a mutant is: one fault in one file, and the tests that should fail because of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old` occurs exactly once in `file` (a path from the repository's root) and becomes `new`.

    `tests`: pytest arguments of the tests expected to notice. `fault`: what is wrong now, in a few words.
    """

    file: str
    old: str
    new: str
    tests: str
    fault: str

    def mutate(self, source: str) -> str:
        """The source with the fault in it; refuses a row that does not fit the file (any more)."""
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.file}: {self.old!r} occurs {count} times, expected once ({self.fault})")
        changed = source.replace(self.old, self.new)
        if changed == source:
            raise ValueError(f"{self.file}: the row changes nothing ({self.fault})")
        if self.file.endswith(".py"):
            compile(changed, self.file, "exec")
        return changed


def faults(file: str, tests: str, *rows: tuple[str, str, str]) -> list[Mutant]:
    """Mutants of one file that the same tests notice; a row is (fault, old, new)."""
    return [Mutant(file, old, new, tests, fault) for fault, old, new in rows]
