"""The worker process: the only one that imports a runtime and touches a device. One device each; `python -m outboard.worker --fd N`."""
