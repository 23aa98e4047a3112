#!/usr/bin/env bash
# All of `make test`: what only computes runs beside what probes this host, which must be alone with
# it (an agent sees the jobs of every other test). Prints the first part's report before the
# second's closing lines.
set -uo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
PY=.venv/bin/python
KINDS="not torch and not nccl and not deb and not faults and not helm"
# These look at this host, too.
HOST=(tests/unit/test_doctor.py tests/unit/test_doctor_deployment.py tests/unit/test_agent_main.py)
PURE=(tests/unit tests/contract tests/fuzz tests/plugin tests/security/test_web_config.py
  tests/security/test_collector_over_tls.py tests/security/test_refusals.py
  tests/security/test_mutual_tls.py tests/security/test_agent_page.py tests/e2e/test_detection_floors.py
  tests/e2e/test_dashboards.py tests/e2e/test_otlp.py tests/e2e/test_prometheus.py)
# More failures than these are no accident of a busy machine.
AGAIN=3

mkdir -p build

# A cache for each part, so that its second run knows what failed.
RUN=("$PY" -m pytest -m "$KINDS")

# again NAME ARGS...: the tests of build/test-NAME.log that failed, once more and alone. Real
# probes, agents, jobs and a browser on two cores may starve each other; a fault fails twice. What
# passes only now is said by name: it wants looking at.
again() {
  local name=$1 log=build/test-$1.log failed
  failed=$(grep -cE '^(FAILED|ERROR) ' "$log")
  [ "$failed" -ge 1 ] && [ "$failed" -le $AGAIN ] || return 1
  printf '\n--- again, alone ---\n'
  grep -E '^(FAILED|ERROR) ' "$log"
  "${RUN[@]}" -o "cache_dir=build/pytest-$name" --last-failed --last-failed-no-failures none "${@:2}"
}

# bash makes background jobs deaf to Ctrl-C, and some tests press it.
nice -n 5 env --default-signal=INT "${RUN[@]}" -o cache_dir=build/pytest-pure \
  "${HOST[@]/#/--ignore=}" "${PURE[@]}" >build/test-pure.log 2>&1 &
pure=$!
trap 'kill $pure 2>/dev/null' INT TERM
"${RUN[@]}" -o cache_dir=build/pytest-host "${PURE[@]/#/--ignore=}" tests 2>&1 | tee build/test-host.log
host=${PIPESTATUS[0]}
# The three that were ignored with their folder.
"${RUN[@]}" -o cache_dir=build/pytest-doctor "${HOST[@]}" >build/test-doctor.log 2>&1
doctor=$?
wait $pure
pure=$?
printf '\n--- beside it: what only computes ---\n'
cat build/test-pure.log build/test-doctor.log
[ $pure = 0 ] || { again pure "${HOST[@]/#/--ignore=}" "${PURE[@]}"; pure=$?; }
[ $doctor = 0 ] || { again doctor "${HOST[@]}"; doctor=$?; }
printf '\n--- what probes this host ---\n'
sed -n '/short test summary info/,$p' build/test-host.log | grep . || tail -n 1 build/test-host.log
[ $host = 0 ] || { again host "${PURE[@]/#/--ignore=}" tests; host=$?; }
exit $((pure || host || doctor))
