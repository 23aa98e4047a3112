# Every target sets itself up: `make setup` creates .venv once and again when pyproject.toml changes.
SHELL := /bin/bash
PY := .venv/bin/python
PROTO_OUT := proto/telemetry_pb2.py proto/telemetry_pb2.pyi proto/telemetry_pb2_grpc.py

.PHONY: setup proto
setup:
	@bash tests/setup.sh

proto: setup
	@$(PY) tests/generate_proto.py
