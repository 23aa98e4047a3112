"""Precedence, refusals and the shipped sample of the agent's configuration."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest

from lanterne.agent import config
from lanterne.agent.config import AgentConfig, load
from lanterne.agent.errors import ConfigError

SAMPLE = Path(config.__file__).with_name("lanterne-agent.toml")


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "agent.toml"
    path.write_text(text)
    return path


def test_defaults_take_the_host_name() -> None:
    assert load(None, {}).node.name == socket.gethostname()


def test_the_sample_file_states_every_key_with_its_default() -> None:
    loaded = load(SAMPLE, {})
    assert msgspec.structs.replace(loaded, node=config.Node()) == AgentConfig()
    text = SAMPLE.read_text()
    for name, kind in config.SECTIONS.items():
        assert f"[{name}]" in text
        for key in kind.__struct_fields__:
            assert f"\n{key} =" in text or f"[{name}.{key}]" in text, f"{name}.{key}"


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[window]\nseconds = 2\ndrain_seconds = 0.1\nscan_seconds = 3\n")
    env = {"LANTERNE_AGENT_WINDOW_SECONDS": "3", "LANTERNE_AGENT_WINDOW_DRAIN_SECONDS": "0.2"}
    loaded = load(path, env, {"window.seconds": "4", "window.scan_seconds": None})
    assert (loaded.window.seconds, loaded.window.drain_seconds) == (4.0, 0.2)
    assert loaded.window.scan_seconds == 3.0


def test_lists_and_booleans_come_from_text() -> None:
    env = {
        "LANTERNE_AGENT_COLLECTOR_ADDRESSES": "a:1, [::1]:2",
        "LANTERNE_AGENT_SOURCES_NVML": "off",
        "LANTERNE_AGENT_IDENTITY_ROLES": "ep*=expert",
        "LANTERNE_AGENT_PROBES_METHOD": "perf",
    }
    loaded = load(None, env)
    assert loaded.collector.addresses == ("a:1", "[::1]:2")
    assert loaded.sources.nvml is False
    assert loaded.identity.roles == {"ep*": "expert"}
    assert loaded.probes.method == "perf"


def test_the_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    path = write(tmp_path, '[node]\nname = "n7"\n')
    assert load(None, {"LANTERNE_AGENT_CONFIG": str(path)}).node.name == "n7"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[window]\nseconds = 0", ["window.seconds", "0", "0.1", "60"]),
        ('[window]\nseconds = "1"', ["window.seconds", "'1'", "number"]),
        ("[window]\nsecond = 1", ["window.second", "did you mean seconds", "drain_seconds"]),
        ("[windows]\nseconds = 1", ["[windows]", "did you mean window"]),
        ("window = 3", ["window = 3", "[window]"]),
        ("[probes]\nring_bytes = 5000", ["probes.ring_bytes", "5000", "power of two", "8192"]),
        ("[probes]\ndevice_ring_bytes = 5000", ["probes.device_ring_bytes", "power of two"]),
        ("[probes]\nkernel_ring_bytes = 5000", ["probes.kernel_ring_bytes", "power of two"]),
        ('[probes]\nlook_into = "x*"', ["probes.look_into", "a list of path patterns"]),
        ('[probes]\nmethod = "kprobe"', ["probes.method", "'kprobe'", "'auto'", "'multi'"]),
        ("[sources]\nnvml = 1", ["sources.nvml", "true or false"]),
        ("[collector]\naddresses = []", ["collector.addresses", "HOST:PORT", "at least 1"]),
        ('[collector]\naddresses = ["host"]', ["collector.addresses", "host", "HOST:PORT"]),
        ('[collector]\naddresses = ["h:70000"]', ["collector.addresses", "h:70000", "65535"]),
        ('[metrics]\nlisten = "nine"', ["metrics.listen", "nine", "HOST:PORT"]),
        ("[evidence]\nmax_sync_age_seconds = 0", ["max_sync_age_seconds", "above 0"]),
        ('[node]\nname = "a b"', ["node.name", "'a b'", "letters, digits"]),
        ("not toml at all", ["not valid TOML"]),
    ],
)
def test_a_bad_file_is_refused_in_words(tmp_path: Path, text: str, words: list[str]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        load(path, {})
    for word in [str(path), *words]:
        assert word in str(refused.value)
    assert "regex" not in str(refused.value)  # said in words


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read: No such file"):
        load(tmp_path / "absent.toml", {})


def test_a_misspelt_variable_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        load(None, {"LANTERNE_AGENT_WINDOW_SECOND": "1"})
    assert "did you mean LANTERNE_AGENT_WINDOW_SECONDS?" in str(refused.value)


def test_a_bad_variable_and_a_bad_flag_name_their_origin() -> None:
    with pytest.raises(ConfigError, match="environment variable LANTERNE_AGENT_LOG_LEVEL"):
        load(None, {"LANTERNE_AGENT_LOG_LEVEL": "loud"})
    with pytest.raises(ConfigError, match=r"flag for log\.level: log\.level = 'loud'"):
        load(None, {}, {"log.level": "loud"})
    with pytest.raises(ConfigError, match=r"unknown key log\.colour"):
        load(None, {}, {"log.colour": "red"})


def test_other_variables_are_left_alone() -> None:
    assert load(None, {"LANTERNE_WORKLOAD": "x", "PATH": "/bin"}).log.level == "info"


def test_engines_and_files_from_every_origin(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '[experts]\nengines = [{ address = "127.0.0.1:8000", kind = "vllm" }]\n'
        'files = [{ path = "/tmp", kind = "sglang_dump", ranks = 8 }]\n',
    )
    experts = load(path, {}).experts
    assert (experts.engines[0].address, experts.engines[0].kind) == ("127.0.0.1:8000", "vllm")
    assert (experts.files[0].kind, experts.files[0].ranks) == ("sglang_dump", 8)
    text = '[{"address": "h:1", "kind": "sglang", "workload": "w"}]'
    experts = load(None, {"LANTERNE_AGENT_EXPERTS_ENGINES": text}).experts
    assert experts.engines[0].workload == "w"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('engines = [{ address = "h", kind = "vllm" }]', "engines"),
        ('engines = [{ address = "h:1", kind = "tgi" }]', "engines"),
        ('engines = [{ address = "h:1", kind = "vllm", extra = 1 }]', "extra"),
        ('files = [{ path = "relative", kind = "numpy" }]', "files"),
        ('listen = "0.0.0.0:80"', "of this host only"),
        ('socket = "relative"', "absolute path"),
    ],
)
def test_what_experts_may_not_be(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(write(tmp_path, f"[experts]\n{text}\n"), {})


def test_an_engine_list_that_is_no_json_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"experts\.engines"):
        load(None, {"LANTERNE_AGENT_EXPERTS_ENGINES": "[{broken"})
