"""Sources, and what photographs say of where they were taken. Videos are in tests/integration/test_station_sources.py."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image
from PIL.TiffImagePlugin import IFDRational

from outboard_client.station.metadata import photo_meta
from outboard_client.station.sources import FolderSource, Reading, SourceFigures, VideoSource, open_source, redacted

PICTURE = Image.fromarray(np.zeros((8, 8, 3), np.uint8))
DJI = b"""<?xpacket begin="" id="W5M0"?><x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF><rdf:Description
 xmlns:drone-dji="http://www.dji.com/drone-dji/1.0/" drone-dji:AbsoluteAltitude="+519.30" drone-dji:RelativeAltitude="+80.10"
 drone-dji:GimbalPitchDegree="-89.90" drone-dji:GpsLongtitude="11.575" drone-dji:Model='"M3E"'>
 <drone-dji:GpsLatitude>48.137</drone-dji:GpsLatitude></rdf:Description></rdf:RDF></x:xmpmeta>"""


def photo(xmp: bytes = b"", **gps) -> bytes:
    exif = Image.Exif()
    if gps:
        exif[ExifTags.Base.DateTime] = "2026:06:01 10:20:30"
        exif.get_ifd(ExifTags.IFD.Exif).update(
            {
                ExifTags.Base.DateTimeOriginal: "2026:05:04 03:02:01",
                ExifTags.Base.SubsecTimeOriginal: "250",
                ExifTags.Base.OffsetTimeOriginal: "+02:00",
            }
        )
        exif.get_ifd(ExifTags.IFD.GPSInfo).update({getattr(ExifTags.GPS, name): value for name, value in gps.items()})
    buffer = io.BytesIO()
    PICTURE.save(buffer, "JPEG", exif=exif, **({"xmp": xmp} if xmp else {}))
    return buffer.getvalue()


def test_place_and_time_come_from_exif() -> None:
    meta = photo_meta(
        photo(
            GPSLatitude=(33, 51, 35.9),
            GPSLatitudeRef="S",
            GPSLongitude=(151, 12, 40),
            GPSLongitudeRef="E",
            GPSAltitude=12.5,
            GPSAltitudeRef=b"\x01",
        )
    )
    assert meta == {
        "taken_at": "2026-05-04T03:02:01.250+02:00",
        "latitude": pytest.approx(-33.8599722),
        "longitude": pytest.approx(151.2111111),
        "altitude_m": -12.5,
    }


def test_what_a_drone_writes_comes_from_xmp() -> None:
    drone = photo_meta(photo(DJI))["drone"]
    assert drone == {"altitude_m": 519.3, "height_m": 80.1, "gimbal_pitch": -89.9, "longitude": 11.575, "latitude": 48.137}


def test_a_camera_without_a_fix_says_nothing() -> None:
    meta = photo_meta(photo(GPSLatitude=(IFDRational(0, 0),) * 3, GPSLatitudeRef="N", GPSAltitude=IFDRational(0, 0)))
    assert set(meta) == {"taken_at"}
    assert photo_meta(photo()) == {} and photo_meta(b"no image") == {} and photo_meta(photo(b"<x" * 10_000)) == {}


def test_a_source_is_known_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(photo())
    (tmp_path / "a.mp4").write_bytes(b"x")
    reading = Reading()
    assert isinstance(open_source(str(tmp_path), reading), FolderSource)
    assert isinstance(open_source(str(tmp_path / "a.jpg"), reading), FolderSource)
    for text, live in ((str(tmp_path / "a.mp4"), False), ("rtsp://h/x", True), ("camera:0", True), ("lavfi:testsrc", False)):
        source = open_source(text, reading)
        assert isinstance(source, VideoSource) and source.live is live
    with pytest.raises(ValueError, match="no such folder or file"):
        open_source(str(tmp_path / "nothing"), reading)
    assert open_source("rtsp://h/x", reading)._task.options == {"rtsp_transport": "tcp"}


def test_passwords_are_not_shown() -> None:
    assert redacted("rtsp://me:secret@host:554/x?y=1") == "rtsp://me:***@host:554/x?y=1"
    assert redacted("rtsp://host/x") == "rtsp://host/x"
    source = open_source("rtsp://me:secret@host/x", Reading())
    assert "secret" not in source.name


async def test_a_folder_gives_its_images_by_name_and_none_twice(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.jpg", "a.JPG", "sub/c.png", "notes.txt", "d.jpg"):
        (tmp_path / name).write_bytes(photo())
    (tmp_path / "gone.jpg").symlink_to(tmp_path / "nowhere")
    source = FolderSource(tmp_path, Reading())
    found = [one async for one in source.frames({"d.jpg"})]
    assert [one.key for one in found] == ["a.JPG", "b.jpg", "sub/c.png"]
    assert found[0].image == photo() and found[0].meta["file"] == "a.JPG"
    assert source.figures.frames == 3 and source.figures.unreadable == 1 and "gone.jpg" in source.figures.why


async def test_a_watched_folder_leaves_files_that_are_still_being_written(tmp_path: Path) -> None:
    for name, age in (("old.jpg", 5), ("new.jpg", 0)):
        (tmp_path / name).write_bytes(photo())
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    frames = FolderSource(tmp_path, Reading(watch=True)).frames(set())
    assert (await anext(frames)).key == "old.jpg"
    began = time.time()
    assert (await anext(frames)).key == "new.jpg"
    assert time.time() - began > 0.3
    await frames.aclose()


def test_a_silent_source_is_offline_and_one_that_nobody_asks_is_not() -> None:
    figures = SourceFigures()
    assert figures.state == "opening"
    figures.last = time.monotonic() - 60
    assert figures.state == "online", "nobody asked it since"
    figures.asked_at = time.monotonic() - 2
    assert figures.state == "online"
    figures.asked_at = time.monotonic() - 3.1
    assert figures.state == "offline"
