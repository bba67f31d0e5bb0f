"""Models of the Hugging Face hub by id (`ORG/NAME[@revision]`) or address: downloaded once, checked, kept in its cache.

`huggingface_hub` underneath: its cache (`HF_HOME`, `HF_HUB_CACHE`), token (`HF_TOKEN`, or `hf auth login`), offline
mode (`HF_HUB_OFFLINE=1`) and endpoint (`HF_ENDPOINT`). What has been downloaded whole is used without asking the hub;
`pull` asks it for something newer.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spyglass.errors import ConfigError
from spyglass.progress import Progress, shown_bytes, tell

_ADDRESS = re.compile(
    r"(?:https?:/{1,2})?(?:www\.)?(?:huggingface\.co|hf\.co)(?:/(?P<path>[^\s?#]*))?(?:[?#]\S*)?", re.IGNORECASE
)
_OTHER_PAGES = {"datasets", "spaces", "models", "collections", "papers", "docs", "blog", "organizations", "settings"}
_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:(?:@|/tree/)(?P<revision>[\w./-]+?))?/?",
    re.ASCII,
)
_WANTED = ("*.json", "*.safetensors", "*.txt", "*.md", "LICENSE*")
_SNAPSHOT = re.compile(r"models--(?P<organisation>.+?)--(?P<name>.+)")
_CHUNK = 1 << 24
_SPARE_BYTES = 1 << 28  # left free on the disk


@dataclass(frozen=True, slots=True)
class HubId:
    """A model of the hub; `revision` is a branch, tag or commit, None the newest of its main branch."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Downloaded:
    """One revision in the cache."""

    repo: str
    commit: str
    refs: tuple[str, ...]
    folder: Path
    nbytes: int


def read_hub_id(text: str) -> HubId | None:
    """The hub id that a text has the form of, or whose page's address it is; None if it has another form.

    Raises:
        ConfigError: it is an address of the hub, and not that of a model's page.
    """
    if (address := _ADDRESS.fullmatch(text)) is None:
        return _hub_id(text)
    path: str = address["path"] or ""
    organisation, name = [*path.split("/"), ""][:2]
    is_model = organisation.lower() not in _OTHER_PAGES
    if is_model and (found := _hub_id(path)) is not None:
        return found
    meant = f"{organisation}/{name}" if is_model and _hub_id(f"{organisation}/{name}") else "ORG/NAME[@revision]"
    raise ConfigError(
        f"{text!r} is an address of the hub, and not that of a model's page; a model is named {meant}, or "
        "https://huggingface.co/ORG/NAME"
    )


def _hub_id(text: str) -> HubId | None:
    found = _ID.fullmatch(text)
    return None if found is None or ".." in text else HubId(found["repo"], found["revision"])


def hub_name(folder: Path) -> str | None:
    """`ORG/NAME` of a folder in the hub's cache, None of any other folder."""
    kept = folder.resolve().parent
    found = _SNAPSHOT.fullmatch(kept.parent.name) if kept.name == "snapshots" else None
    return None if found is None else f"{found['organisation']}/{found['name']}"


def downloaded_folder(hub: HubId) -> Path | None:
    """Where a model lies that has been downloaded whole, without asking the hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(hub.repo, revision=hub.revision, local_files_only=True, allow_patterns=list(_WANTED))
    except LocalEntryNotFoundError:  # also one that is there in part
        return None
    return Path(found)


def fetch(hub: HubId) -> Path:
    """The folder of a model, downloaded if it is not there yet.

    Raises:
        ConfigError: as `pull`.
    """
    return downloaded_folder(hub) or pull(hub)


def pull(hub: HubId, *, progress: bool = True) -> Path:
    """Download the newest files of a model's revision; files that are there are kept, a connection that breaks is taken
    up where it broke. What arrived is compared with the hub's checksums, and removed where it differs.

    Raises:
        ConfigError: the hub cannot be reached or has no such model or revision, wants a token, or the disk is full; the
            model is none that Spyglass reads (before its weights are downloaded); a checksum is another.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.hf_api import RepoFile

    from spyglass.config.read import read_model_config

    with _hub_errors(hub):
        api = HfApi()
        commit = api.model_info(hub.repo, revision=hub.revision).sha
        assert commit is not None, "the hub names the commit of a revision"
        listed = api.list_repo_tree(hub.repo, recursive=True, revision=commit)
        wanted = (file for file in listed if isinstance(file, RepoFile))
        files = {file.path: file for file in wanted if any(fnmatch.fnmatch(file.path, each) for each in _WANTED)}
        missing = [file for file in files.values() if not _is_cached(hub.repo, file.path, commit)]
        if "config.json" not in files:
            raise ConfigError(f"{hub} on the hub has no config.json: it is no checkpoint that Spyglass reads")
        read_model_config(Path(api.hf_hub_download(hub.repo, "config.json", revision=commit)).parent)
        nbytes = sum(file.size for file in missing)
        _require_disk_space(hub, nbytes)
        if missing and progress:
            tell(f"downloading {hub}: {shown_bytes(nbytes)} in {len(missing)} files")
        folder = Path(
            snapshot_download(
                hub.repo,
                revision=hub.revision,
                allow_patterns=list(_WANTED),
                tqdm_class=_bars(nbytes, show=progress and bool(missing)),
            )
        )
    _verify(hub, folder, missing, progress=progress)
    return folder


def downloads() -> list[Downloaded]:
    """Every model in the cache, whatever program put it there, by name."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return []
    found = [
        Downloaded(
            repo=repo.repo_id,
            commit=revision.commit_hash,
            refs=tuple(sorted(revision.refs)),
            folder=revision.snapshot_path,
            nbytes=revision.size_on_disk,
        )
        for repo in cache.repos
        if repo.repo_type == "model"
        for revision in repo.revisions
    ]
    return sorted(found, key=lambda entry: (entry.repo, entry.commit))


def remove(hub: HubId) -> int:
    """Delete a model from the cache, all its revisions or the one that is named; the bytes that became free.

    Raises:
        ConfigError: it is not there.
    """
    from huggingface_hub import scan_cache_dir

    chosen = [
        entry.commit
        for entry in downloads()
        if entry.repo == hub.repo
        and (hub.revision is None or hub.revision in entry.refs or entry.commit.startswith(hub.revision))
    ]
    if not chosen:
        raise ConfigError(f"{hub} has not been downloaded; `spyglass list` shows what has")
    strategy = scan_cache_dir().delete_revisions(*chosen)
    strategy.execute()
    return int(strategy.expected_freed_size)


def _is_cached(repo: str, path: str, commit: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(repo, path, revision=commit), str)


def _require_disk_space(hub: HubId, nbytes: int) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE

    place = Path(HF_HUB_CACHE).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if nbytes and nbytes + _SPARE_BYTES > free:
        raise ConfigError(
            f"{hub} needs {shown_bytes(nbytes)} more and {place} has {shown_bytes(free)} free; make room "
            "(`spyglass list`, `spyglass rm`), or set HF_HOME to a folder on a larger disk"
        )


def _bars(nbytes: int, *, show: bool) -> type[Progress]:
    """The class of the library's bars, of which the one that counts bytes on disk is shown, with the whole total."""

    class Bar(Progress):
        def __init__(self, *args: Any, **options: Any) -> None:
            told = str(options.get("desc", ""))
            counts = not told.startswith(("Downloading", "Fetching"))
            options |= {"desc": "downloading", "total": nbytes, "bar_format": None} if counts else {}
            super().__init__(*args, **{**options, "show": show and counts})

        @property
        def total(self) -> int:
            return nbytes

        @total.setter
        def total(self, value: object) -> None:
            """The library counts files as it comes to them."""

        def set_description(self, desc: str | None = None, refresh: bool | None = True) -> None:
            """It stays what it is."""

    return Bar


def _verify(hub: HubId, folder: Path, files: list[Any], *, progress: bool) -> None:
    """Compare files with the hub's checksums: SHA-256 of large ones, git's SHA-1 of small ones."""
    wrong = []
    total = sum(file.size for file in files)
    with Progress(total=total, unit="B", unit_scale=True, desc="checking", show=progress) as bar:
        for file in files:
            path = folder / file.path
            large = file.lfs is not None
            digest = hashlib.sha256() if large else hashlib.sha1(f"blob {path.stat().st_size}\0".encode())
            with path.open("rb") as stream:
                while chunk := stream.read(_CHUNK):
                    digest.update(chunk)
                    bar.update(len(chunk))
            if digest.hexdigest() != (file.lfs.sha256 if large else file.blob_id):
                wrong.append(file.path)
                path.resolve().unlink()
                path.unlink(missing_ok=True)
    if wrong:
        raise ConfigError(
            f"{hub}: {', '.join(wrong)} arrived with another checksum than the hub states, and was removed; pull again"
        )


@contextlib.contextmanager
def _hub_errors(hub: HubId) -> Iterator[None]:
    """What goes wrong with a hub, in words that say what to do."""
    import httpx2
    from huggingface_hub import errors
    from huggingface_hub.constants import ENDPOINT

    try:
        yield
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{hub} is open only to those who accepted its terms: do so at {ENDPOINT}/{hub.repo}, then set HF_TOKEN or "
            "run `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"there is no folder {hub} here, and {ENDPOINT} has no model {hub.repo}, or shows it only with a token "
            "(HF_TOKEN, or `hf auth login`)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"{hub.repo} has no revision {hub.revision!r}; it is a branch, a tag or a commit") from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, httpx2.TransportError) as error:
        offline = isinstance(error, errors.OfflineModeIsEnabled)
        why = "HF_HUB_OFFLINE forbids asking the hub" if offline else f"{ENDPOINT} cannot be reached"
        raise ConfigError(
            f"there is no folder {hub} here, it has not been downloaded (whole), and {why}; name a folder, or run "
            f"`spyglass pull {hub}` where there is a network"
        ) from error
    except errors.HfHubHTTPError as error:
        code = error.response.status_code
        why = "the token is not valid there (HF_TOKEN, or `hf auth login`)" if code in (401, 403) else "try again later"
        raise ConfigError(f"{ENDPOINT} answers {code} for {hub}: {why}") from error
    except (errors.HFValidationError, OSError) as error:
        raise ConfigError(f"{hub} cannot be downloaded: {error}") from error
