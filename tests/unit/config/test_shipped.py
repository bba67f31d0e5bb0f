"""Models and adapters that come with the package are found by name; a folder that exists is taken as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spyglass.cli import options
from spyglass.config.read import read_model_config
from spyglass.config.shipped import (
    SHIPPED,
    base_note,
    default_model,
    find_adapter,
    find_model,
    shipped_adapters,
    shipped_models,
)
from spyglass.errors import AdapterError, ConfigError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("second", "first"):
        for adapter in ("roman", "french"):
            (tmp_path / "models" / name / "adapters" / adapter).mkdir(parents=True)
            (tmp_path / "models" / name / "adapters" / adapter / "adapter_config.json").write_text("{}")
        (tmp_path / "models" / name / "config.json").write_text("{}")
    (tmp_path / "models" / "no-model").mkdir()
    return tmp_path / "models"


def test_shipped_models_are_the_folders_with_a_config_in_order(root: Path) -> None:
    assert shipped_models(root) == ("first", "second")
    assert shipped_models(root / "nothing") == ()
    assert SHIPPED.parent.name == "spyglass" and set(shipped_models()) <= {path.name for path in SHIPPED.glob("*")}


def test_names_are_told_in_order_whatever_order_the_disk_has(tmp_path: Path) -> None:
    for name in "dbeac":
        (tmp_path / name / "adapters" / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / "a" / "adapters" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "a" / "adapters" / name / "adapter_config.json").write_text("{}")
    assert shipped_models(tmp_path) == shipped_adapters(tmp_path / "a") == tuple("abcde")


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        ("tiny", None),
        ("Some-Org/Tiny", None),
        ("/models/tiny/", None),
        ("", None),
        (None, None),
        (5, None),
        ("tiny/other", "other"),
        ("tiny-2", "tiny-2"),
    ],
)
def test_an_adapter_of_another_model_is_remarked_on(stated: object, told: str | None, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": stated}))
    note = base_note(tmp_path, "tiny")
    assert note is None if told is None else note is not None and f"made for {told!r}, this is 'tiny'" in note


@pytest.mark.parametrize("content", [None, "{", "[]", "{}"])
def test_what_cannot_be_read_is_left_to_who_reads_it(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "adapter_config.json").write_text(content)
    assert base_note(tmp_path, "tiny") is None


def test_a_folder_wins_over_a_name(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_model("first", root) == root / "first"
    assert find_model("no-model", root) == Path("no-model") and find_model("./x/y", root) == Path("./x/y")
    (tmp_path / "first").mkdir()
    assert find_model("first", root) == Path("first")


def test_adapters_are_found_beside_their_model(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = root / "first" / "adapters" / "roman"
    assert shipped_adapters(root / "first") == ("french", "roman") and shipped_adapters(root) == ()
    assert find_adapter("roman", root / "first") == shipped
    with pytest.raises(AdapterError, match=r"no folder greek.*first comes with the adapters french, roman;"):
        find_adapter("greek", root / "first")
    assert find_adapter("greek", root) == Path("greek"), "a model without any"
    assert find_adapter("some/roman", root / "first") == Path("some/roman")
    (tmp_path / "roman").mkdir()
    assert find_adapter("roman", root / "first") == Path("roman")


def test_a_name_of_another_shipped_models_adapter_is_answered_with_that_model(root: Path) -> None:
    only = root / "second" / "adapters" / "greek"
    only.mkdir()
    (only / "adapter_config.json").write_text("{}")
    told = r"no folder greek.*first comes with the adapters french, roman; greek comes with second; name one.*run that"
    with pytest.raises(AdapterError, match=told):
        find_adapter("greek", root / "first", root)
    (root / "bare").mkdir()
    with pytest.raises(AdapterError, match="bare comes with no adapters; roman comes with first and second; name the"):
        find_adapter("roman", root / "bare", root)
    assert find_adapter("nothing", root / "bare", root) == Path("nothing"), "its own error names the file it lacks"


def test_an_empty_name_is_no_folder(root: Path) -> None:
    """As a path it would be the folder that one stands in."""
    with pytest.raises(ConfigError, match=r"name is empty; give a checkpoint folder or first, second \('\.'"):
        find_model("", root)
    with pytest.raises(AdapterError, match=r"folder is empty; give a PEFT folder or french, roman \('\.'"):
        find_adapter("", root / "first")
    assert find_model(".", root) == Path(".") and find_adapter(".", root / "first") == Path(".")


def test_what_is_no_folder_is_answered_with_the_names_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spyglass.config.read.shipped_models", lambda: ("first", "second"))
    with pytest.raises(ConfigError, match=r"frist: not a folder.*\(first, second\) or a hub id.*did you mean first\?$"):
        read_model_config("frist")
    monkeypatch.setattr("spyglass.config.read.shipped_models", lambda: ())
    with pytest.raises(ConfigError, match=r"config\.json or a hub id \(ORG/NAME\)$"):
        read_model_config("frist")


def test_the_default_is_the_first_shipped_model(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options, "default_model", lambda: default_model(root))
    monkeypatch.setattr(options, "find_model", lambda name: find_model(name, root))
    assert default_model(root) == "first" and options.model_folder(None) == root / "first"
    assert options.model_folder("second") == root / "second" and options.model_folder("./x/y") == Path("x/y")
    monkeypatch.setattr(options, "default_model", lambda: default_model(tmp_path))
    assert default_model(tmp_path) == "demo-model"
    with pytest.raises(ConfigError, match="name a model with --model"):
        options.model_folder(None)


def test_help_tells_which_adapters_come_with_which_model(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "shipped_models", lambda: ("first", "no-model"))
    monkeypatch.setattr(options, "find_model", lambda name: root / name)
    assert options.told_adapters() == ", or the name of one that comes with first french, roman"
    monkeypatch.setattr(options, "shipped_models", lambda: ("no-model",))
    assert options.told_adapters() == ""
