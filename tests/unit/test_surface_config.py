"""The collector's configuration: what is accepted, and what each error says."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from lanterne.collector import config
from lanterne.collector.config import CollectorConfig, load
from lanterne.collector.errors import ConfigError

SAMPLE = Path(config.__file__).with_name("lanterne-collector.toml")


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(text)
    return path


def test_the_sample_shows_every_key_with_its_default() -> None:
    assert load(SAMPLE, {}, {}) == CollectorConfig()
    text = SAMPLE.read_text()
    for section, key in config.settings():
        assert f"\n{key} = " in text.split(f"[{section}]", 1)[1].split("\n[", 1)[0], key


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path, '[http]\naddress = "a:1"\nthreads = 2\n[analysis]\nwindow_seconds = 30\n'
    )
    env = {"LANTERNE_COLLECTOR_HTTP_ADDRESS": "b:2", "LANTERNE_COLLECTOR_INGEST_MAX_NODES": "4"}
    found = load(path, env, {"http.address": "[::1]:0"})
    assert found.http.address == "[::1]:0"
    assert found.http.threads == 2
    assert found.analysis.window_seconds == 30.0
    assert found.ingest.max_nodes == 4
    assert load(path, env, {}).http.address == "b:2"
    assert config.split_address("[::1]:0") == ("::1", 0)
    assert config.split_address("0.0.0.0:4319") == ("0.0.0.0", 4319)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[http]\nthreads = 65\n", ["http.threads", "65", "a whole number from 1 to 64"]),
        ('[http]\nthreads = "4"\n', ["http.threads", "'4'", "a whole number"]),
        ("[http]\nthreads = true\n", ["http.threads", "True", "a whole number"]),
        (
            "[analysis]\nwindow_seconds = nan\n",
            ["analysis.window_seconds", "nan", "a number from 1"],
        ),
        ('[http]\naddress = "9478"\n', ["http.address", "'9478'", "host:port"]),
        ('[http]\naddress = "a:65536"\n', ["http.address", "65536", "host:port"]),
        ('[log]\nlevel = "loud"\n', ["log.level", "'loud'", "debug, info, warning, error"]),
        ("[http]\nport = 1\n", ["http.port", "1", "address, threads"]),
        ("[web]\n", ["[web]", ", ".join(config.SECTIONS)]),
        ("http = 1\n", ["http = 1", "[http]"]),
        ("[http\n", ["not valid TOML"]),
    ],
)
def test_an_error_names_file_key_value_and_what_is_allowed(
    tmp_path: Path, text: str, parts: list[str]
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(path, {}, {})
    for part in [str(path), *parts]:
        assert part in str(caught.value)


def test_errors_of_variables_and_flags_name_them() -> None:
    with pytest.raises(ConfigError, match=r"LANTERNE_COLLECTOR_HTTP_THREADS = 'x'.*whole number"):
        load(None, {"LANTERNE_COLLECTOR_HTTP_THREADS": "x"}, {})
    with pytest.raises(ConfigError, match="unknown variable LANTERNE_COLLECTOR_HTPP_THREADS"):
        load(None, {"LANTERNE_COLLECTOR_HTPP_THREADS": "4"}, {})
    with pytest.raises(ConfigError, match=r"--ingest-address = 'nowhere'.*host:port"):
        load(None, {}, {"ingest.address": "nowhere"})
    with pytest.raises(ConfigError, match=r"/no/such.toml: cannot be read"):
        load(Path("/no/such.toml"), {}, {})


def test_the_path_variable_and_strangers_are_let_be() -> None:
    assert load(None, {"LANTERNE_COLLECTOR_CONFIG": "x", "HOME": "/"}, {}) == CollectorConfig()


def test_defaults_obey_their_own_limits() -> None:
    document = msgspec.to_builtins(CollectorConfig())
    assert msgspec.convert(document, CollectorConfig) == CollectorConfig()
