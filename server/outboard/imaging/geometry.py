"""Where a picture lies in a network's input, and the way back to the submitted image's pixels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Geometry:
    """`network = image * scale + pad`, per axis, with the integer sizes and pads that were really used.

    `width` and `height` are the upright submitted image's, in pixels; `scale_x` = (columns of the network's input that the
    picture covers) / (columns of the image that they show), so a scaled decode in between leaves no trace. `pad_x` and
    `pad_y` are in network pixels and negative where a centre crop cut the picture.
    """

    width: int
    height: int
    scale_x: float
    scale_y: float
    pad_x: int
    pad_y: int

    def to_image(self, points: np.ndarray) -> np.ndarray:
        """float [..., 2k] of x, y, x, y … in network pixels -> the same in image pixels, clipped to the image."""
        points = np.asarray(points, np.float32)
        flat = points.reshape(*points.shape[:-1], points.shape[-1] // 2, 2)  # not -1: there may be no points
        out = (flat - np.array([self.pad_x, self.pad_y], np.float32)) / np.array([self.scale_x, self.scale_y], np.float32)
        np.clip(out, 0, np.array([self.width, self.height], np.float32), out=out)
        return out.reshape(points.shape)
