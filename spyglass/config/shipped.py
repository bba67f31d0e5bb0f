"""Which folder a model's name means: a folder, a model that comes with the package, or one of the hub.

A folder that exists is taken as it is; a name is looked up only when there is no such folder. What comes with the
package lies in `spyglass/models/<name>`, its adapters in `adapters/`.
"""

from __future__ import annotations

import os
from pathlib import Path

from spyglass.config.hub import fetch, hub_name, read_hub_id
from spyglass.config.json_file import read_json_object
from spyglass.errors import AdapterError, ConfigError

SHIPPED = Path(__file__).resolve().parents[1] / "models"
_WITHOUT_SHIPPED = "demo-model"


def shipped_models(root: Path = SHIPPED) -> tuple[str, ...]:
    """Names of the models that come with the package, in order; the first is what is run unless another is named."""
    return tuple(sorted(path.parent.name for path in root.glob("*/config.json")))


def default_model(root: Path = SHIPPED) -> str:
    """What is run when no model is named: the first that comes with the package, else the demo's folder."""
    return next(iter(shipped_models(root)), _WITHOUT_SHIPPED)


def find_model(name_or_path: str | os.PathLike[str], root: Path = SHIPPED) -> Path:
    """The folder of a shipped model by its name, or of a hub's model by its id, which is downloaded if it is not there
    yet; anything else is a path and comes back as it is.

    Raises:
        ConfigError: the text is empty, which as a path would be the folder one stands in, or the hub's model cannot be
            had.
    """
    text = os.fspath(name_or_path)
    if not text:
        raise ConfigError(
            f"the model's name is empty; give a checkpoint folder{_or(shipped_models(root))} ('.' is the folder here)"
        )
    if not os.path.lexists(text):
        if text in shipped_models(root):
            return root / text
        if (hub := read_hub_id(text)) is not None:
            return fetch(hub)
    return Path(text)


def model_name(folder: Path) -> str:
    """What the model in a folder is called: `ORG/NAME` of one from the hub, else the folder's name."""
    return hub_name(folder) or folder.resolve().name


def shipped_adapters(model: Path) -> tuple[str, ...]:
    """Names of the adapters that come with the model in the folder `model`, in order."""
    return tuple(sorted(path.parent.name for path in model.glob("adapters/*/adapter_config.json")))


def find_adapter(name_or_path: str | os.PathLike[str], model: Path, root: Path = SHIPPED) -> Path:
    """The folder of an adapter that comes with the model in the folder `model`, by its name; else the path as it is.

    Raises:
        AdapterError: nothing but an empty text, or a name that is neither a folder nor one of the adapters that come
            with the model, while this or another shipped model has some; the message says which.
    """
    path, known = Path(name_or_path), shipped_adapters(model)
    if not os.fspath(name_or_path):
        raise AdapterError(f"an adapter's folder is empty; give a PEFT folder{_or(known)} ('.' is the folder here)")
    if path.is_dir() or len(path.parts) != 1:
        return path
    if path.name in known:
        return model / "adapters" / path.name
    having = [name for name in shipped_models(root) if path.name in shipped_adapters(root / name)]
    if not known and not having:
        return path
    elsewhere = f"; {path} comes with {' and '.join(having)}" if having else ""
    raise AdapterError(
        f"there is no folder {path} here, and {model.resolve().name} comes with "
        f"{'the adapters ' + ', '.join(known) if known else 'no adapters'}{elsewhere}; "
        f"name {'one of them or ' if known else ''}the folder that PEFT saved{', or run that model' if having else ''}"
    )


def _or(names: tuple[str, ...]) -> str:
    return f" or {', '.join(names)}" if names else ""


def base_note(adapter: Path, model_name: str) -> str | None:
    """A warning if an adapter says that it was made for a model of another name, else None.

    A name is the last part of a path or of a hub's name, upper and lower case alike. An adapter that cannot be read
    says nothing here.
    """
    try:
        stated = read_json_object(adapter / "adapter_config.json").get("base_model_name_or_path")
    except ConfigError:
        return None
    if not isinstance(stated, str) or not stated:
        return None
    base = stated.rstrip("/").rpartition("/")[2]
    if base.lower() == model_name.rpartition("/")[2].lower():
        return None
    note = f"the adapter {adapter.name} was made for {base!r}, this is {model_name!r}"
    return f"{note}; unless they are the same model, what it answers means nothing"
