"""The chart through Helm's engine: valid for Kubernetes old and new, and true to the programs."""

from __future__ import annotations

import json
import os
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("helm_python", reason="make test-helm has Helm's engine")

import helm_python
import kubernetes_validate
import yaml

from tests.helm.chart import CHART, NAMESPACE, ROOT, container, environment, notes, render, the
from tests.helm.switches import combined

pytestmark = pytest.mark.helm

VERSIONS = ("1.25", "1.28", "1.31", "1.34", "1.37")
FOREIGN = ("monitoring.coreos.com/v1", "cert-manager.io/v1")  # not Kubernetes' own kinds
FIELDS = {"spec.nodeName": "gpu-17", "status.hostIP": "10.1.2.3"}


@cache
def _combinations() -> list[tuple[dict, list[dict]]]:  # type: ignore[type-arg]
    return [(values, render(values)) for values in combined()]


def test_lint_finds_nothing() -> None:
    for values in (
        {},
        {"tls": {"mode": "certManager"}, "monitoring": {"podMonitor": {"enabled": True}}},
    ):
        report = helm_python.lint(CHART, values, strict=True)
        assert report["errors"] == []
        worse = [m for m in report["messages"] if m["severity"] > 1]
        assert worse == []


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_valid(version: str) -> None:
    """In every combination; `appArmorProfile` is a field from 1.30 on, an annotation before."""
    seen = set()
    for values, objects in _combinations():
        old = bool(values["kubeVersion"])
        for found in objects:
            text = json.dumps(found, sort_keys=True)
            if found["apiVersion"] in FOREIGN or text in seen:
                continue
            if found["kind"] == "DaemonSet" and not old and version < "1.30":
                continue
            seen.add(text)
            kubernetes_validate.validate(found, version, strict=True)
    assert len(seen) > 50


def test_foreign_objects_have_what_their_operators_need() -> None:
    kinds = set()
    for _, objects in _combinations():
        for found in objects:
            if found["apiVersion"] not in FOREIGN:
                continue
            kinds.add(found["kind"])
            spec = found["spec"]
            match found["kind"]:
                case "ServiceMonitor":
                    service = the(
                        objects, "Service", the(objects, "StatefulSet")["metadata"]["name"]
                    )
                    assert (
                        spec["selector"]["matchLabels"].items()
                        <= service["metadata"]["labels"].items()
                    )
                    ports = {p["name"] for p in service["spec"]["ports"]}
                    assert {e["port"] for e in spec["endpoints"]} <= ports
                case "PodMonitor":
                    pod = the(objects, "DaemonSet")["spec"]["template"]
                    assert (
                        spec["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
                    )
                    ports = {p["name"] for p in pod["spec"]["containers"][0]["ports"]}
                    assert {e["port"] for e in spec["podMetricsEndpoints"]} <= ports
                case "PrometheusRule":
                    rules = yaml.safe_load((CHART / "rules" / "lanterne.rules.yaml").read_text())
                    assert spec == rules
                case "Certificate":
                    issuers = {o["metadata"]["name"] for o in objects if o["kind"] == "Issuer"}
                    assert spec["issuerRef"]["name"] in issuers | {"corp"}
                    assert spec["secretName"]
                case "Issuer":
                    assert spec == {"selfSigned": {}} or spec["ca"]["secretName"]
                case kind:
                    pytest.fail(f"unexpected {kind}")
    assert kinds == {"ServiceMonitor", "PodMonitor", "PrometheusRule", "Certificate", "Issuer"}


def test_names_and_references_fit_together() -> None:
    """What is mounted, selected, referred to exists in the release, or is the user's by name."""
    users = {
        "lanterne-web",
        "mine",
        "lanterne-agent-tls",
        "lanterne-collector-tls",
        "watch-agent-tls",
        "watch-collector-tls",
    }
    for values, objects in _combinations():
        names = {(o["kind"], o["metadata"]["name"]) for o in objects}
        assert len(names) == len(objects)
        made = {o["spec"]["secretName"] for o in objects if o["kind"] == "Certificate"}
        for kind in ("DaemonSet", "StatefulSet"):
            for owner in (o for o in objects if o["kind"] == kind):
                assert owner["metadata"]["namespace"] == NAMESPACE
                pod = owner["spec"]["template"]
                assert (
                    owner["spec"]["selector"]["matchLabels"].items()
                    <= pod["metadata"]["labels"].items()
                )
                volumes = {v["name"]: v for v in pod["spec"]["volumes"]}
                claims = {
                    c["metadata"]["name"] for c in owner["spec"].get("volumeClaimTemplates", ())
                }
                mounts = pod["spec"]["containers"][0]["volumeMounts"]
                assert {m["name"] for m in mounts} == set(volumes) | claims
                for volume in volumes.values():
                    if "configMap" in volume:
                        assert ("ConfigMap", volume["configMap"]["name"]) in names
                    if "secret" in volume:
                        secret = volume["secret"]["secretName"]
                        assert secret in made | users or ("Secret", secret) in names
                account = pod["spec"]["serviceAccountName"]
                assert account == "default" or ("ServiceAccount", account) in names
                if kind == "StatefulSet":
                    assert ("Service", owner["spec"]["serviceName"]) in names
        assert all(len(name) <= 63 for kind, name in names if kind != "ClusterRole")
        if values["commonLabels"]:
            assert all(o["metadata"]["labels"]["team"] == "gpu" for o in objects)


def test_agents_report_to_every_collector_by_name() -> None:
    objects = render({"collector": {"replicas": 2}}, name="x" * 53)
    address = environment(container(objects, "DaemonSet"), FIELDS)[
        "LANTERNE_AGENT_COLLECTOR_ADDRESSES"
    ]
    owner = the(objects, "StatefulSet")["metadata"]["name"]
    service = the(objects, "StatefulSet")["spec"]["serviceName"]
    assert the(objects, "Service", service)["spec"]["clusterIP"] == "None"
    assert address.split(",") == [f"{owner}-{i}.{service}.{NAMESPACE}.svc:4319" for i in range(2)]
    assert all(len(label) <= 63 for label in address.split(".")[:2])


def test_the_agent_is_as_closed_as_it_can_be() -> None:
    pod = the(render(), "DaemonSet")["spec"]["template"]["spec"]
    (part,) = pod["containers"]
    context = part["securityContext"]
    assert context["capabilities"] == {
        "drop": ["ALL"],
        "add": ["BPF", "PERFMON", "SYS_PTRACE", "DAC_READ_SEARCH", "CHECKPOINT_RESTORE"],
    }
    assert (context["privileged"], context["allowPrivilegeEscalation"]) == (False, False)
    assert context["readOnlyRootFilesystem"]
    assert "hostNetwork" not in pod
    writable = {m["mountPath"] for m in part["volumeMounts"] if not m.get("readOnly")}
    assert writable == {"/tmp", "/var/lib/lanterne"}
    collector = the(render(), "StatefulSet")["spec"]["template"]["spec"]
    assert collector["securityContext"]["runAsNonRoot"]
    assert collector["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_scrapes_and_probes_ask_as_the_programs_answer() -> None:
    """By HTTPS where a web configuration is given, and with the password only there."""
    login = {"basicAuth": {"username": {"name": "web", "key": "user"}}, "enabled": True}
    for secret in ("", "lanterne-web"):
        objects = render(
            {
                "agent": {"webConfigSecret": secret},
                "collector": {"webConfigSecret": secret},
                "monitoring": {"podMonitor": login, "serviceMonitor": login},
            }
        )
        for owner, monitor, endpoints, variable in (
            ("DaemonSet", "PodMonitor", "podMetricsEndpoints", "AGENT_METRICS"),
            ("StatefulSet", "ServiceMonitor", "endpoints", "COLLECTOR_HTTP"),
        ):
            part = container(objects, owner)
            (asked,) = the(objects, monitor)["spec"][endpoints]
            assert asked.get("scheme", "http") == ("https" if secret else "http")
            assert ("basicAuth" in asked) == bool(secret)
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert part[probe]["httpGet"]["scheme"] == ("HTTPS" if secret else "HTTP")
            file = environment(part, FIELDS).get(f"LANTERNE_{variable}_WEB_CONFIG")
            assert file == ("/etc/lanterne/web/web.yml" if secret else None)
            assert ("/etc/lanterne/web" in {m["mountPath"] for m in part["volumeMounts"]}) == bool(
                secret
            )


def _check(
    program: str, env: dict[str, str], arguments: list[str]
) -> subprocess.CompletedProcess[str]:
    own = {k: v for k, v in os.environ.items() if not k.startswith("LANTERNE_")}
    return subprocess.run(
        [ROOT / ".venv" / "bin" / program, *arguments, "--check-config"],
        env=own | env,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_programs_take_what_the_chart_gives(tmp_path: Path) -> None:
    """Every environment variable and argument of every combination, by their own check."""
    done = set()
    for _, objects in _combinations():
        for kind, program in (
            ("DaemonSet", "lanterne-agent"),
            ("StatefulSet", "lanterne-collector"),
        ):
            for owner in (o for o in objects if o["kind"] == kind):
                part = owner["spec"]["template"]["spec"]["containers"][0]
                env = {
                    k: v for k, v in environment(part, FIELDS).items() if k.startswith("LANTERNE_")
                }
                key = (program, *sorted(env.items()))
                if key in done:
                    continue
                done.add(key)
                config = tmp_path / "config.toml"
                data = the(objects, "ConfigMap", owner["metadata"]["name"])["data"]
                config.write_text(next(iter(data.values())))
                arguments = [config if a.startswith("/etc/lanterne/") else a for a in part["args"]]
                run = _check(program, env, [str(a) for a in arguments])
                assert run.returncode == 0, run.stderr
    assert len(done) > 10


def test_values_are_checked() -> None:
    for values, names in (
        ({"agents": {}}, "agents"),
        ({"agent": {"nvlm": False}}, "nvlm"),
        ({"collector": {"replicas": 0}}, "replicas"),
        ({"tls": {"mode": "mtls"}}, "mode"),
        ({"agent": {"collectors": ["no-port"]}}, "collectors"),
    ):
        with pytest.raises(helm_python.HelmValuesError, match=names):
            render(values)
    with pytest.raises(helm_python.HelmRenderError, match=r"token\.value or token\.existingSecret"):
        render({"token": {"enabled": True}})


def test_notes_name_what_is_installed() -> None:
    text = notes()
    assert f"kubectl -n {NAMESPACE} exec ds/lanterne-agent -- lanterne-agent doctor" in text
    assert "without TLS" in text
    assert "without TLS" not in notes({"tls": {"mode": "secret"}})
    assert "lanterne-agent doctor" not in notes({"agent": {"enabled": False}})


def test_every_value_is_documented() -> None:
    def leaves(values: object, path: str) -> list[str]:
        if (
            isinstance(values, dict)
            and values
            and not path.endswith(
                ("odeSelector", "issuerRef", "seccompProfile", "resources", "dashboards.labels")
            )
        ):
            return [
                leaf for k, v in values.items() for leaf in leaves(v, f"{path}.{k}".lstrip("."))
            ]
        return [path]

    told = set(re.findall(r"^\| `([\w.]+)` ", (CHART / "README.md").read_text(), re.M))
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert told == set(leaves(values, ""))
