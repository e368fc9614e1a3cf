"""Outboard: an inference server for the GPU outside the box."""

__version__ = "0.1.0"
