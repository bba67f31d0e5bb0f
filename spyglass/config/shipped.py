"""Models that come with the package, found by name: folders `spyglass/models/<name>`, their adapters in `adapters/`.

A folder that exists is taken as it is; a name is looked up only when there is no such folder.
"""

from __future__ import annotations

import os
from pathlib import Path

SHIPPED = Path(__file__).resolve().parents[1] / "models"


def shipped_models(root: Path = SHIPPED) -> tuple[str, ...]:
    """Names of the models that come with the package, in order; the first is what is run unless another is named."""
    return tuple(sorted(path.parent.name for path in root.glob("*/config.json")))


def find_model(name_or_path: str | os.PathLike[str], root: Path = SHIPPED) -> Path:
    """The folder of a shipped model by its name; anything else is a path and comes back as it is."""
    if not os.path.isdir(name_or_path) and os.fspath(name_or_path) in shipped_models(root):
        return root / name_or_path
    return Path(name_or_path)


def find_adapter(name_or_path: str | os.PathLike[str], model: Path) -> Path:
    """The folder of an adapter that comes with the model in the folder `model`, by its name; else the path as it is."""
    shipped = model / "adapters" / name_or_path
    known = not os.path.isdir(name_or_path) and len(Path(name_or_path).parts) == 1 and shipped.is_dir()
    return shipped if known else Path(name_or_path)
