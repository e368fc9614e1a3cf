"""Where and when a photograph was taken, from its EXIF, and what a drone wrote into its XMP."""

from __future__ import annotations

import io
import math
import re
from typing import Any

from PIL import ExifTags, Image

#: DJI's attributes (namespace drone-dji, www.dji.com/drone-dji/1.0/) -> names here. Degrees and metres. Some firmware misspells longitude.
_DRONE = {
    "GpsLatitude": "latitude",
    "GpsLongitude": "longitude",
    "GpsLongtitude": "longitude",
    "AbsoluteAltitude": "altitude_m",
    "RelativeAltitude": "height_m",
    "GimbalYawDegree": "gimbal_yaw",
    "GimbalPitchDegree": "gimbal_pitch",
    "GimbalRollDegree": "gimbal_roll",
    "FlightYawDegree": "flight_yaw",
}
#: As attribute or as element. No XML parser: the packet comes from outside, and nothing in it needs one.
_XMP = re.compile(rb"""drone-dji:(\w{1,40})\s*(?:=\s*["']|>)\s*([+-]?\d{1,12}(?:\.\d{1,15})?)\s*["'<]""")


def photo_meta(data: bytes) -> dict[str, Any]:
    """`taken_at` (ISO 8601), `latitude`, `longitude` (degrees), `altitude_m`, and `drone` {…}: what is there; {} where nothing is."""
    try:
        with Image.open(io.BytesIO(data)) as picture:
            exif = picture.getexif()
            xmp = picture.info.get("xmp")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return {}  # the server will say what is wrong with it
    meta = _taken(exif) | _place(exif)
    if isinstance(xmp, bytes) and (drone := _drone(xmp)):
        meta["drone"] = drone
    return meta


def _taken(exif: Image.Exif) -> dict[str, Any]:
    inner = exif.get_ifd(ExifTags.IFD.Exif)
    text = inner.get(ExifTags.Base.DateTimeOriginal) or exif.get(ExifTags.Base.DateTime)
    match = re.match(r"(\d{4}):(\d\d):(\d\d) (\d\d:\d\d:\d\d)", str(text or ""))
    if not match:
        return {}
    year, month, day, clock = match.groups()
    fraction = str(inner.get(ExifTags.Base.SubsecTimeOriginal) or "").strip()
    offset = str(inner.get(ExifTags.Base.OffsetTimeOriginal) or "").strip()
    taken = f"{year}-{month}-{day}T{clock}" + (f".{fraction}" if fraction.isdigit() else "")
    return {"taken_at": taken + (offset if re.fullmatch(r"[+-]\d\d:\d\d", offset) else "")}


def _place(exif: Image.Exif) -> dict[str, Any]:
    gps = exif.get_ifd(ExifTags.IFD.GPSInfo)
    place: dict[str, Any] = {}
    for name, degrees, side, negative in (
        ("latitude", ExifTags.GPS.GPSLatitude, ExifTags.GPS.GPSLatitudeRef, "S"),
        ("longitude", ExifTags.GPS.GPSLongitude, ExifTags.GPS.GPSLongitudeRef, "W"),
    ):
        if (value := _degrees(gps.get(degrees))) is not None:
            place[name] = -value if str(gps.get(side, "")).strip("\0 ").upper() == negative else value
    if (altitude := _number(gps.get(ExifTags.GPS.GPSAltitude))) is not None:
        below = gps.get(ExifTags.GPS.GPSAltitudeRef) in (1, b"\x01")
        place["altitude_m"] = -altitude if below else altitude
    return place


def _degrees(parts: Any) -> float | None:
    """Degrees, minutes, seconds as one number."""
    if not isinstance(parts, (tuple, list)) or len(parts) != 3:
        return None
    numbers = [_number(p) for p in parts]
    if None in numbers:
        return None
    degrees, minutes, seconds = numbers
    return round(degrees + minutes / 60 + seconds / 3600, 7)  # type: ignore[operator]


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, ZeroDivisionError):  # a camera without a fix writes 0/0
        return None
    return number if math.isfinite(number) else None


def _drone(xmp: bytes) -> dict[str, float]:
    found = ((_DRONE.get(name.decode("ascii", "replace")), value) for name, value in _XMP.findall(xmp[: 1 << 20]))
    return {name: float(value) for name, value in found if name is not None}
