#!/bin/sh
# Makes server/outboard/oip/open_inference_pb2.py and _pb2_grpc.py from open_inference.proto (grpcio-tools, of the extra "test").
set -e
cd "$(dirname "$0")/.."
.venv/bin/python -m grpc_tools.protoc -Iserver --python_out=server --grpc_python_out=server server/outboard/oip/open_inference.proto
