"""Outboard's client: images to answers from Python, over HTTP and over streams that survive a failing link.

It runs wherever Python 3.11 does (Linux, macOS, Windows, a Raspberry Pi) and needs nothing of the server.
"""

from outboard_client.answers import Answer, ClassScore, Detection, Device, Mask, Model, Picture, Readiness, Tensor, Text
from outboard_client.backoff import Backoff
from outboard_client.client import AsyncClient, Client, Done
from outboard_client.errors import OutboardError, Problem, SourceFailed, StreamLost, Unreachable
from outboard_client.frames import Bundle, BundleResult, Drop, Frame, Outcome, Part, Result
from outboard_client.images import JPEG, PNG, Encoding, ImageLike
from outboard_client.stream import Figures, FrameStream
from outboard_client.uplink import Uplink

__all__ = [
    "JPEG",
    "PNG",
    "Answer",
    "AsyncClient",
    "Backoff",
    "Bundle",
    "BundleResult",
    "ClassScore",
    "Client",
    "Detection",
    "Device",
    "Done",
    "Drop",
    "Encoding",
    "Figures",
    "Frame",
    "FrameStream",
    "ImageLike",
    "Mask",
    "Model",
    "Outcome",
    "OutboardError",
    "Part",
    "Picture",
    "Problem",
    "Readiness",
    "Result",
    "SourceFailed",
    "StreamLost",
    "Tensor",
    "Text",
    "Unreachable",
    "Uplink",
]
