"""Models that come with the package, found by name: folders `spyglass/models/<name>`, their adapters in `adapters/`.

A folder that exists is taken as it is; a name is looked up only when there is no such folder.
"""

from __future__ import annotations

import os
from pathlib import Path

from spyglass.errors import AdapterError

SHIPPED = Path(__file__).resolve().parents[1] / "models"


def shipped_models(root: Path = SHIPPED) -> tuple[str, ...]:
    """Names of the models that come with the package, in order; the first is what is run unless another is named."""
    return tuple(sorted(path.parent.name for path in root.glob("*/config.json")))


def find_model(name_or_path: str | os.PathLike[str], root: Path = SHIPPED) -> Path:
    """The folder of a shipped model by its name; anything else is a path and comes back as it is."""
    if not os.path.isdir(name_or_path) and os.fspath(name_or_path) in shipped_models(root):
        return root / name_or_path
    return Path(name_or_path)


def shipped_adapters(model: Path) -> tuple[str, ...]:
    """Names of the adapters that come with the model in the folder `model`, in order."""
    return tuple(sorted(path.parent.name for path in model.glob("adapters/*/adapter_config.json")))


def find_adapter(name_or_path: str | os.PathLike[str], model: Path) -> Path:
    """The folder of an adapter that comes with the model in the folder `model`, by its name; else the path as it is.

    Raises:
        AdapterError: a name that is neither a folder nor one of the adapters that come with the model.
    """
    path, known = Path(name_or_path), shipped_adapters(model)
    if path.is_dir() or len(path.parts) != 1 or not known:
        return path
    if path.name in known:
        return model / "adapters" / path.name
    raise AdapterError(
        f"there is no folder {path} here, and {model.name} comes with the adapters {', '.join(known)}; "
        "name one of them or the folder that PEFT saved"
    )
