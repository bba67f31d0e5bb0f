"""API keys: what may be written, and that nothing but hashes is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from spyglass.config.keys import ApiKey, digest_of, read_api_keys
from spyglass.config.server import ServerConfig, read_server_config
from spyglass.errors import ConfigError

HASH = digest_of("s3cret")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("s3cret", ApiKey(name="key1", digest=HASH)),
        ("  s3cret ", ApiKey(name="key1", digest=HASH)),
        ("c2VjcmV0==", ApiKey(name="key1", digest=digest_of("c2VjcmV0=="))),
        ("two words", ApiKey(name="key1", digest=digest_of("two words"))),
        ("alice=s3cret", ApiKey(name="alice", digest=HASH)),
        ("alice=YWI=", ApiKey(name="alice", digest=digest_of("YWI="))),
        (f"a.b-c_1=sha256:{HASH}", ApiKey(name="a.b-c_1", digest=HASH)),
        ("bob=s3cret share=3  tokens=9000", ApiKey(name="bob", digest=HASH, share=3, tokens=9000)),
        ("bob=s3cret images=4 requests=5", ApiKey(name="bob", digest=HASH, images=4, requests=5)),
    ],
)
def test_a_key_is_a_text_or_a_name_with_what_it_may_have(text: str, key: ApiKey) -> None:
    assert read_api_keys([text]) == (key,)
    assert read_api_keys([str(key)]) == (key,), "it may be given as it is kept"


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (["alice=s3cret request=5"], "setting 'request=5'"),
        (["alice=s3cret requests=0"], "setting 'requests=0'"),
        (["alice=s3cret share=1 share=2"], "setting 'share=2'"),
        (["alice= s3cret"], "means nothing"),
        (["alice=sha256:abc"], "64 hexadecimal digits"),
        (["alice=one", "alice=two"], "api_key 2 has the name 'alice'"),
        (["alice=s3cret", "s3cret"], "is the same key as 'alice'"),
    ],
)
def test_what_means_nothing_is_told_without_the_key(texts: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as told:
        ServerConfig(api_key=tuple(texts))
    assert "s3cret" not in str(told.value)


def test_keys_come_from_a_file_and_the_environment_too(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# the team\nalice=sha256:{HASH} share=2\n\nother\n")
    config = read_server_config({"api_key_file": str(file)}, {"SPYGLASS_SERVER_API_KEY": "one, bob=two requests=3"})
    keys = read_api_keys(config.api_key, config.api_key_file)
    assert [(key.name, key.share, key.requests) for key in keys] == [
        ("key1", 1, None), ("bob", 1, 3), ("alice", 2, None), ("key4", 1, None),
    ]  # fmt: skip
    for text, why in (("", "has no key"), ("alice=a\nalice=b", "line 2 has the name")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=why):
            ServerConfig(api_key_file=str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        ServerConfig(api_key_file=str(tmp_path / "none"))


def test_a_configuration_holds_no_key() -> None:
    config = ServerConfig(api_key=("alice=s3cret requests=7", "plain-one"))
    assert "s3cret" not in repr(config) and "plain-one" not in repr(config)
    assert ServerConfig(api_key=config.api_key) == config
