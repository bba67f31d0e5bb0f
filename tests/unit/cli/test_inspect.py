"""`spyglass inspect`: the numbers of a picture and its sheet."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from spyglass.cli.main import main
from spyglass.config.shipped import default_model
from tests.unit.prompt.pictures import encode, noise

CONFIGS = Path(__file__).resolve().parents[2] / "golden" / "data" / "configs"


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "photo.jpg"
    path.write_bytes(encode(noise(640, 480), "JPEG", exif=exif))
    return path


def numbers(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["inspect", *map(str, arguments), "--json"]) == 0
    seen: dict[str, Any] = json.loads(capsys.readouterr().out)
    return seen


def test_numbers_are_those_of_the_plan(photo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert numbers(capsys, photo, "--family", "v4") == {
        "stored": [640, 480],
        "size": [480, 640],
        "resized": [490, 644],
        "stretch": False,
        "patch_size": 14,
        "vit_grid": [46, 35],
        "llm_grid": [16, 12],
        "num_tokens": 210,
        "start": 2,
        "lead": 1,
        "length": 211,
        "roles": {"START": 1, "PAD": 1, "IMAGE": 192, "NEWLINE": 16, "END": 1},
    }
    assert not list(photo.parent.glob("*.png"))


def test_family_rules_and_start_are_options(photo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert numbers(capsys, photo, "--family", "v4", "--rules", "reference")["num_tokens"] == 206
    assert [numbers(capsys, photo, "--start", start)["lead"] for start in range(4)] == [3, 2, 1, 0]
    v41 = numbers(capsys, photo, "--family", "v41", "--start", 5)
    assert (v41["lead"], v41["roles"]) == (0, {"START": 1, "IMAGE": 192, "NEWLINE": 16, "END": 1})


def test_a_checkpoint_folder_decides_for_itself(
    photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((CONFIGS / "v4-vision.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vision_max_n_token": 100}))
    assert numbers(capsys, photo, "--model", folder)["num_tokens"] <= 97
    (folder / "config.json").write_text((CONFIGS / "v4-text.json").read_text())
    assert main(["inspect", str(photo), "--model", str(folder)]) == 2
    assert "takes no images" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["v4", "v41"])
@pytest.mark.parametrize("size", [(640, 480), (3, 1000), (4000, 300), (1, 1)])
def test_the_sheet_is_drawn_for_any_shape(
    tmp_path: Path, family: str, size: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.png"
    noise(*size).save(path)
    assert main(["inspect", str(path), "--family", family, "--start", "70"]) == 0
    assert f"drawn to {path}.inspect.png" in capsys.readouterr().out
    with Image.open(f"{path}.inspect.png") as sheet:
        assert sheet.width == 1600
        colours = {colour for _, colour in sheet.convert("RGB").getcolors(1 << 24)}
    assert {(34, 139, 94), (200, 60, 70), (240, 160, 40)} <= colours  # START, END and NEWLINE of the token block


def test_what_cannot_be_shown_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = tmp_path / "good.png"
    noise(9, 9).save(good)
    (tmp_path / "bad.png").write_bytes(b"nothing")
    for arguments, message in (
        (["nowhere.png"], "nowhere.png cannot be read"),
        ([str(tmp_path / "bad.png")], "bad.png is none of JPEG"),
        ([str(good), "--start", "-1"], "--start is -1"),
        ([str(good), "-o", str(tmp_path / "no" / "x.png")], "cannot be written"),
    ):
        assert main(["inspect", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_inspecting_needs_no_torch(photo: Path) -> None:
    script = (
        "import sys; from spyglass.cli.main import main; "
        f"code = main(['inspect', {str(photo)!r}]); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0


def test_the_model_that_is_run_is_the_one_that_is_planned_for(photo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert numbers(capsys, photo) == numbers(capsys, photo, "--model", default_model())
