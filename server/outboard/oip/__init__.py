"""The Open Inference Protocol (KServe v2, as Triton speaks it): REST with the binary tensor extension, and gRPC.

The way of a request: `rest` or `grpc_server` (its form) -> `request` (what it asks, whatever its form) -> `infer` (checked against the
model's `signature`, into frame memory, through the runtime) -> back in the form that was asked for.
"""
