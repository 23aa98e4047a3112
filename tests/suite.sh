#!/usr/bin/env bash
# All of `make test`, in two lanes side by side: agents, collectors and jobs together in one, which
# mostly wait; in the other what only computes, then the kernel tests, which see none but the files
# of their own. Prints the second lane's reports before the first one's closing lines.
set -uo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
PY=.venv/bin/python
KINDS="not torch and not nccl and not deb and not faults and not helm"
PURE=(tests/unit tests/contract tests/fuzz tests/plugin tests/rig tests/security/test_web_config.py
  tests/security/test_collector_over_tls.py tests/security/test_refusals.py
  tests/security/test_mutual_tls.py tests/security/test_agent_page.py
  tests/security/test_slow_clients.py tests/security/test_failed_handshakes.py
  tests/e2e/test_detection_floors.py tests/e2e/test_dashboards.py tests/e2e/test_otlp.py
  tests/e2e/test_prometheus.py)
KERNEL=(tests/kernel tests/gpu)
# These look at all processes of this host: alone, at the end.
ALONE=(tests/unit/test_doctor.py tests/unit/test_doctor_deployment.py tests/unit/test_agent_main.py)
# More failures than these are no accident of a busy machine.
AGAIN=3

pure=("${ALONE[@]/#/--ignore=}" "${PURE[@]}")
together=("${PURE[@]/#/--ignore=}" "${KERNEL[@]/#/--ignore=}" tests)
mkdir -p build

# A cache for each part, so that its second run knows what failed. bash makes background jobs deaf to
# Ctrl-C, and some tests press it.
RUN=(env --default-signal=INT "$PY" -m pytest -m "$KINDS")

# again PART ARGS...: the tests of build/test-PART.log that failed, once more and alone. Real
# probes, agents, jobs and a browser on two cores may starve each other; a fault fails twice. What
# passes only now is said by name: it wants looking at.
again() {
  local log=build/test-$1.log failed
  failed=$(grep -cE '^(FAILED|ERROR) ' "$log")
  [ "$failed" -ge 1 ] && [ "$failed" -le $AGAIN ] || return 1
  printf '\n--- again, alone ---\n'
  grep -E '^(FAILED|ERROR) ' "$log"
  "${RUN[@]}" -o "cache_dir=build/pytest-$1" --last-failed --last-failed-no-failures none "${@:2}"
}

# -> 1: what computes failed, 2: the kernel tests, 3: both.
beside() {
  local failed=0
  nice -n 5 "${RUN[@]}" -o cache_dir=build/pytest-pure "${pure[@]}" >build/test-pure.log 2>&1 || failed=1
  "${RUN[@]}" -o cache_dir=build/pytest-kernel "${KERNEL[@]}" >build/test-kernel.log 2>&1 || ((failed |= 2))
  return $failed
}

beside &
lane=$!
trap 'pkill -P $lane 2>/dev/null; kill $lane 2>/dev/null' INT TERM
"${RUN[@]}" -o cache_dir=build/pytest-host "${together[@]}" 2>&1 | tee build/test-host.log
host=${PIPESTATUS[0]}
wait $lane
lane=$?
"${RUN[@]}" -o cache_dir=build/pytest-alone "${ALONE[@]}" >build/test-alone.log 2>&1
alone=$?
printf '\n--- beside it: what only computes, then the kernel; then what looks at all of this host ---\n'
cat build/test-pure.log build/test-kernel.log build/test-alone.log
computed=$((lane & 1)) kernel=$((lane & 2))
[ $computed = 0 ] || { again pure "${pure[@]}"; computed=$?; }
[ $kernel = 0 ] || { again kernel "${KERNEL[@]}"; kernel=$?; }
[ $alone = 0 ] || { again alone "${ALONE[@]}"; alone=$?; }
printf '\n--- agents, collectors and jobs together ---\n'
sed -n '/short test summary info/,$p' build/test-host.log | grep . || tail -n 1 build/test-host.log
[ $host = 0 ] || { again host "${together[@]}"; host=$?; }
exit $((computed || kernel || alone || host))
