"""Devices and their worker processes."""
