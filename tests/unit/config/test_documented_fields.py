"""The field table of docs/formats.md says what the reader does, field by field."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest

from spyglass.config import parse_model_config, read_v41
from spyglass.config.read_v4 import REFERENCE_NAMES
from spyglass.errors import ConfigError
from tests.unit.config import v41_released
from tests.unit.config.family_configs import flash_vision

FORMATS = Path(__file__).resolve().parents[3] / "docs" / "formats.md"
ROW = re.compile(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", re.MULTILINE)
SECTION = FORMATS.read_text(encoding="utf-8").split("### DeepSeek-V4\n")[1].split("\n### ")[0]
ROWS = {field: (short, rule) for field, short, rule in ROW.findall(SECTION)}


@pytest.mark.parametrize("field", ROWS)
def test_a_field_may_be_left_out_exactly_where_the_table_says_so(field: str) -> None:
    values = copy.deepcopy(flash_vision())
    values.pop(field, None)
    if ROWS[field][1].startswith("needed"):
        with pytest.raises(ConfigError, match=f"{field} is missing"):
            parse_model_config(values, "config.json")
    else:
        assert ROWS[field][1].startswith(("default", "if present"))
        parse_model_config(values, "config.json")


def test_every_field_that_is_read_stands_in_the_table() -> None:
    config = parse_model_config(flash_vision(), "config.json")
    read = flash_vision().keys() - config.informational.keys() - config.draft.keys()
    assert read <= ROWS.keys()


def test_the_short_names_are_the_ones_that_are_read() -> None:
    documented = {field: short.strip("`") for field, (short, _) in ROWS.items() if re.fullmatch(r"`\w+`", short)}
    assert documented == {field: short for field, short in REFERENCE_NAMES.items() if field in ROWS}


SECTION_V41 = FORMATS.read_text(encoding="utf-8").split("### DeepSeek-V4.1\n")[1].split("\n### ")[0]
ROWS_V41 = {field: (short, rule) for field, short, rule in ROW.findall(SECTION_V41)}


@pytest.mark.parametrize("field", ROWS_V41)
def test_a_v41_field_may_be_left_out_exactly_where_the_table_says_so(field: str) -> None:
    values = v41_released.official()
    values["text_config"].pop(field, None)
    if ROWS_V41[field][1].startswith("needed"):
        with pytest.raises(ConfigError, match=f"{field} is missing|rope_parameters is missing"):
            parse_model_config(values, "config.json")
    elif field == "candidate_source_layer_id":
        assert parse_model_config(values, "config.json").text.candidates is None
    else:
        parse_model_config(values, "config.json")


def test_every_v41_field_of_its_own_stands_in_the_table() -> None:
    config = parse_model_config(v41_released.official(), "config.json")
    text = v41_released.official()["text_config"]
    read = text.keys() - config.informational.keys() - config.draft.keys() - {"model_type"}
    assert read <= ROWS.keys() | ROWS_V41.keys()
    documented = {field: short.strip("`") for field, (short, _) in ROWS_V41.items() if short not in ("same", "flat")}
    assert documented == {field: short for field, short in read_v41.REFERENCE_NAMES.items() if field in documented}
