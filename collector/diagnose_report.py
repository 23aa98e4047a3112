"""The findings of `diagnose` as JSON and as a report, and where its input comes from."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from lanterne.collector.advice_json import advice_json
from lanterne.collector.client import Client
from lanterne.collector.diagnose_findings import Finding, Looked, ranked
from lanterne.collector.errors import RecordingError
from lanterne.collector.experts_json import experts_json
from lanterne.collector.json_view import snapshot_json
from lanterne.collector.replay_series import Series
from lanterne.collector.report import Document, Section, share

Found = dict[str, Any]

TIMEOUT_SECONDS = 10.0
MOST_BYTES = 256 << 20
UNAUTHORIZED = 401
FOUND = 3  # exit status where something costs time

_NAMES = {
    "memory": "GPU memory",
    "clocks": "GPU clocks",
    "stages": "Time of each stage",
    "skew": "Assignment skew",
    "bytes": "Bytes by domain",
    "advice": "Advice",
    "visibility": "What can be seen",
}


def of_collector(address: str, client: Client) -> tuple[Found, Found, Found]:
    """(snapshot, experts, advice) of a running collector. Raises RecordingError."""
    snapshot, experts, advice = ask(address, client, "snapshot", "experts", "advice")
    return snapshot, experts, advice


def ask(address: str, client: Client, *views: str) -> list[Found]:
    """`address`: host:port or a URL; `views`: of /api/v1. Raises RecordingError."""
    url = address if "://" in address else f"{client.scheme}://{address}"
    if not url.startswith(("http://", "https://")):
        raise RecordingError(f"{address!r} must be host:port or an http URL")
    return [_fetch(f"{url.rstrip('/')}/api/v1/{view}", client) for view in views]


def _fetch(url: str, client: Client) -> Found:
    request = urllib.request.Request(url, headers=dict(client.headers))
    try:
        with urllib.request.urlopen(
            request, timeout=TIMEOUT_SECONDS, context=client.context
        ) as answer:
            found = json.loads(answer.read(MOST_BYTES))
    except urllib.error.HTTPError as error:
        remedy = "; give --user and --password-file" if error.code == UNAUTHORIZED else ""
        with error:
            raise RecordingError(f"{url} answered {error.code}: {error.reason}{remedy}") from error
    except (OSError, http.client.HTTPException) as error:
        raise RecordingError(
            f"no collector answers at {url} ({getattr(error, 'reason', error)}); start one with "
            "`lanterne-collector`, or name the HTTP address of one (with --ca where it has TLS)"
        ) from error
    except ValueError as error:
        raise RecordingError(f"{url} is no Lanterne collector of this version: {error}") from error
    if not isinstance(found, dict):
        raise RecordingError(f"{url} is no Lanterne collector of this version")
    return found


def of_recording(series: Series) -> tuple[Found, Found, Found]:
    """The same of the last moment of a recording in which a job did something."""
    moment = series.busy or series.last
    if moment is None:
        raise RecordingError("the recording holds nothing to be looked at")
    snapshot, experts, advice = (
        json.loads(made(moment)) for made in (snapshot_json, experts_json, advice_json)
    )
    return snapshot, experts, advice


def earlier(series: Series, steps: list[Looked]) -> None:
    """Adds who was named in the recording, and is not at that moment."""
    stages = next(step for step in steps if step.step == "stages")
    for episode in series.named():
        if (series.busy_seconds or series.seconds) - episode.last <= 2.0:
            continue
        where = f" on {episode.node}" if episode.node else ""
        stages.findings.append(
            Finding(
                "stages",
                "notice",
                f"{episode.comm}: the others waited for rank {episode.rank}{where} "
                f"({episode.klass.replace('_', ' ')}), and no longer do",
                (
                    f"named from second {episode.first:.0f} to {episode.last:.0f}; "
                    f"{share(episode.blame_share)} of the whole recording",
                ),
                ("Replay the recording for the times.",),
                episode.blame_share,
            )
        )


def status(steps: list[Looked]) -> int:
    """0: nothing that costs time; FOUND otherwise. Notices alone do not count."""
    grave = any(f.severity != "notice" for step in steps for f in step.findings)
    return FOUND if grave else 0


def as_json(steps: list[Looked], source: str) -> dict[str, object]:
    return {
        "format": "diagnosis",
        "source": source,
        "findings": [
            {
                "step": f.step,
                "severity": f.severity,
                "title": f.title,
                "evidence": list(f.evidence),
                "try": list(f.try_),
                "cost_share": f.cost,
            }
            for f in ranked(steps)
        ],
        "steps": [
            {
                "step": s.step,
                "state": "found" if s.findings else "unknown" if s.unknown else "sound",
                "seen": s.seen,
                "unknown": s.unknown,
            }
            for s in steps
        ],
    }


def document(steps: list[Looked], source: str) -> Document:
    found = ranked(steps)
    grave = [f for f in found if f.severity != "notice"]
    if grave:
        lead = f"{grave[0].title}."
    elif all(step.unknown for step in steps[:-1]):
        lead = "Nothing could be looked at: see below."
    else:
        lead = "Nothing found that costs time."
    walked = tuple((_NAMES[s.step], _state(s)) for s in steps)
    sections = tuple(
        Section(
            f"{number}. {f.title} [{f.severity}]",
            (*(f"Evidence: {e}" for e in f.evidence), *(f"Try: {t}" for t in f.try_)),
        )
        for number, f in enumerate(found, 1)
    )
    return Document(f"Diagnosis of {source}", lead, walked, sections)


def _state(step: Looked) -> str:
    if step.unknown:
        return f"not known: {step.unknown}"
    found = len(step.findings)
    state = f"{found} finding{'s' if found != 1 else ''}" if found else "sound"
    return f"{state} ({step.seen})" if step.seen else state
