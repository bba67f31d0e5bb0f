"""Models of the hub, downloaded by the command line from a server on loopback that speaks the hub's API."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spyglass.config.hub import HubId, hub_name, read_hub_id
from spyglass.config.shipped import SHIPPED, model_name
from spyglass.errors import ConfigError
from tests.unit.config.fake_hub import Hub, serving

OLD, NEW = "a" * 40, "b" * 40
NAMES = ("config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json", "tokenizer.json")
WEIGHTS = NAMES[1]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    model = SHIPPED / "spyglass-tiny-v4"
    files = {name: model / name for name in NAMES}
    card, unwanted = tmp_path / "README.md", tmp_path / "pytorch_model.bin"
    card.write_text("---\nlicense: mit\n---\nA model.\n")
    unwanted.write_bytes(b"\0" * 1000)
    new = {**files, "README.md": card, "pytorch_model.bin": unwanted}
    with serving(Hub(commits={OLD: files, NEW: new}, refs={"main": NEW, "v1": OLD})) as served:
        yield served


def spyglass(hub: Hub, home: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "0"}
    return subprocess.run(
        [sys.executable, "-m", "spyglass", *words],
        capture_output=True,
        text=True,
        cwd=home,
        env={**env, **variables, "PYTHONPATH": str(Path(__file__).parents[3])},
        check=False,
        timeout=300,
    )


def refused(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2 and done.stdout == "", done
    assert done.stderr.startswith("spyglass: error: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_a_model_is_pulled_listed_shown_used_and_removed(hub: Hub, tmp_path: Path) -> None:
    done = spyglass(hub, tmp_path, "pull", hub.repo)
    assert done.returncode == 0 and "downloading deep/tiny: 11.9 MB in 5 files" in done.stderr
    folder = Path(done.stdout.strip())
    assert {path.name for path in folder.iterdir()} == {*NAMES, "README.md"}, "no weights in formats nobody reads"
    assert all((folder / name).read_bytes() == (SHIPPED / "spyglass-tiny-v4" / name).read_bytes() for name in NAMES)
    assert hub_name(folder) == model_name(folder) == hub.repo
    hub.requests.clear()
    shown = spyglass(hub, tmp_path, "show", hub.repo)
    assert "licence         mit" in shown.stdout and f"the hub, commit {NEW}" in shown.stdout
    answered = spyglass(hub, tmp_path, "run", hub.repo, "Which colour is the sky?", "--max-tokens", "2")
    assert answered.returncode == 0 and answered.stdout.strip()
    listed = json.loads(spyglass(hub, tmp_path, "list", "--json").stdout)
    assert listed[-1]["model"] == hub.repo and "in part" not in listed[-1]["from"]
    assert hub.requests == [], "what is there whole is used without asking"
    assert spyglass(hub, tmp_path, "rm", hub.repo).stdout == "deep/tiny deleted, 11.9 MB freed\n"
    assert not folder.exists() and "has not been downloaded" in refused(spyglass(hub, tmp_path, "rm", hub.repo))


def test_a_revision_is_a_branch_a_tag_or_a_commit_and_each_is_kept(hub: Hub, tmp_path: Path) -> None:
    for revision, commit in (("v1", OLD), (OLD, OLD), ("main", NEW)):
        folder = Path(spyglass(hub, tmp_path, "pull", f"{hub.repo}@{revision}").stdout.strip())
        assert folder.name == commit
    assert [row["model"] for row in json.loads(spyglass(hub, tmp_path, "list", "--json").stdout)][-2:] == [
        f"{hub.repo}@v1",
        hub.repo,
    ]
    assert "has no revision 'v9'" in refused(spyglass(hub, tmp_path, "pull", f"{hub.repo}@v9"))
    spyglass(hub, tmp_path, "rm", f"{hub.repo}@v1")
    assert f"commit {NEW}" in spyglass(hub, tmp_path, "show", hub.repo, HF_HUB_OFFLINE="1").stdout


def test_pull_takes_what_is_newer_and_keeps_what_is_the_same(hub: Hub, tmp_path: Path) -> None:
    hub.refs["main"] = OLD
    spyglass(hub, tmp_path, "pull", hub.repo)
    hub.refs["main"] = NEW
    hub.requests.clear()
    done = spyglass(hub, tmp_path, "pull", hub.repo)
    assert done.stdout.strip().endswith(NEW)
    assert not [path for method, path, _ in hub.requests if method == "GET" and path.endswith(".safetensors")]


def test_a_connection_that_breaks_is_taken_up_where_it_broke(hub: Hub, tmp_path: Path) -> None:
    hub.breaks.add(WEIGHTS)
    done = spyglass(hub, tmp_path, "pull", hub.repo)
    assert done.returncode == 0, done.stderr
    ranges = [begin for method, path, begin in hub.requests if method == "GET" and path.endswith(WEIGHTS)]
    assert ranges[0] is None and any(begin and begin != "bytes=0-" for begin in ranges[1:])
    assert (Path(done.stdout.strip()) / WEIGHTS).read_bytes() == hub.commits[NEW][WEIGHTS].read_bytes()


def test_a_download_that_was_ended_goes_on_with_the_files_that_are_missing(hub: Hub, tmp_path: Path) -> None:
    folder = Path(spyglass(hub, tmp_path, "pull", hub.repo).stdout.strip())
    (folder / "tokenizer.json").resolve().unlink()
    (folder / "tokenizer.json").unlink()
    assert "in part" in spyglass(hub, tmp_path, "list").stdout
    hub.requests.clear()
    done = spyglass(hub, tmp_path, "run", hub.repo, "Which colour is the sky?", "--max-tokens", "1")
    assert done.returncode == 0 and (folder / "tokenizer.json").is_file()
    assert {path.rpartition("/")[2] for method, path, _ in hub.requests if method == "GET" and "resolve" in path} == {
        "tokenizer.json"
    }


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"])
def test_a_file_with_another_checksum_is_refused_and_removed(name: str, hub: Hub, tmp_path: Path) -> None:
    hub.lies.add(name)
    done = spyglass(hub, tmp_path, "pull", hub.repo)
    assert done.returncode == 2 and f"deep/tiny: {name} arrived with another checksum" in done.stderr
    hub.lies.clear()
    folder = Path(spyglass(hub, tmp_path, "pull", hub.repo).stdout.strip())
    assert (folder / name).read_bytes() == hub.commits[NEW][name].read_bytes()


def test_a_token_opens_a_private_model_and_a_gated_one_names_its_terms(hub: Hub, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    told = refused(spyglass(hub, tmp_path, "pull", hub.repo))
    assert f"{hub.url} has no model deep/tiny, or shows it only with a token (HF_TOKEN" in told
    hub.gated = True
    told = refused(spyglass(hub, tmp_path, "pull", hub.repo, HF_TOKEN="hf_other"))
    assert f"accepted its terms: do so at {hub.url}/deep/tiny" in told
    assert spyglass(hub, tmp_path, "pull", hub.repo, HF_TOKEN="hf_secret").returncode == 0


def test_offline_and_unreachable_are_said_with_what_to_do(hub: Hub, tmp_path: Path) -> None:
    told = refused(spyglass(hub, tmp_path, "show", hub.repo, HF_HUB_OFFLINE="1"))
    assert "HF_HUB_OFFLINE forbids asking the hub" in told and "`spyglass pull deep/tiny`" in told
    told = refused(spyglass(hub, tmp_path, "show", hub.repo, HF_ENDPOINT="http://127.0.0.1:1"))
    assert "http://127.0.0.1:1 cannot be reached" in told


def test_a_disk_without_room_is_told_before_the_download(hub: Hub, tmp_path: Path) -> None:
    hub.declared[WEIGHTS] = 10**18
    told = refused(spyglass(hub, tmp_path, "pull", hub.repo))
    assert "needs 1,000,000,000.00 GB more and " in told and "set HF_HOME to a folder on a larger disk" in told
    assert not [path for _, path, _ in hub.requests if path.endswith(WEIGHTS)]


def test_a_model_of_another_family_is_refused_before_its_weights_come(hub: Hub, tmp_path: Path) -> None:
    other = tmp_path / "config.json"
    other.write_text('{"model_type": "llama"}')
    hub.commits[NEW]["config.json"] = other
    assert "model_type" in refused(spyglass(hub, tmp_path, "pull", hub.repo))
    assert not [path for _, path, _ in hub.requests if path.endswith(WEIGHTS)]
    del hub.commits[NEW]["config.json"]
    hub.refs["main"], hub.commits["c" * 40] = "c" * 40, hub.commits[NEW]
    assert "has no config.json" in refused(spyglass(hub, tmp_path, "pull", hub.repo))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubId("org/name")),
        ("org/Name-1.5_x@v1", HubId("org/Name-1.5_x", "v1")),
        ("org/name@refs/pr/1", HubId("org/name", "refs/pr/1")),
        ("https://huggingface.co/org/name", HubId("org/name")),
        ("https://huggingface.co/org/name/", HubId("org/name")),
        ("https://huggingface.co/org/name?library=x#card", HubId("org/name")),
        ("https://huggingface.co/org/name/tree/v1", HubId("org/name", "v1")),
        ("hf.co/org/name@v1", HubId("org/name", "v1")),
        ("https://example.com/org/name", None),
        ("name", None),
        ("./org/name", None),
        ("/org/name", None),
        ("a/b/c", None),
        ("org/..", None),
        ("org/name@", None),
        ("what is 1/2 of it", None),
    ],
)
def test_a_hub_id_is_an_organisation_a_name_and_perhaps_a_revision_or_the_address_of_its_page(
    text: str, expected: HubId | None
) -> None:
    assert read_hub_id(text) == expected


@pytest.mark.parametrize("start", ["https://huggingface.co", "http://www.huggingface.co", "hf.co", "HuggingFace.co"])
@pytest.mark.parametrize(
    ("path", "right"),
    [
        ("", "ORG/NAME[@revision]"),
        ("/", "ORG/NAME[@revision]"),
        ("/org", "ORG/NAME[@revision]"),
        ("/org/", "ORG/NAME[@revision]"),
        ("/datasets/name", "ORG/NAME[@revision]"),
        ("/spaces/org/name", "ORG/NAME[@revision]"),
        ("/models?search=vision", "ORG/NAME[@revision]"),
        ("/org/name/blob/main/config.json", "org/name"),
        ("/org/name/discussions", "org/name"),
    ],
)
def test_an_address_of_the_hub_that_is_no_models_page_is_refused_with_the_right_form(
    start: str, path: str, right: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"a model is named {right}, or https://huggingface.co/ORG/NAME")):
        read_hub_id(start + path)
