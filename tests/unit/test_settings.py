"""Settings: what cannot be meant is refused, with what was."""

from __future__ import annotations

from pathlib import Path

import pytest

from outboard import settings
from outboard.devices import discovery
from outboard.http.origin import own_names


def test_a_misspelt_variable_is_refused_with_the_right_one() -> None:
    with pytest.raises(settings.SettingsError, match="OUTBOARD_PROT .*did you mean OUTBOARD_PORT"):
        settings.load({}, {"OUTBOARD_PROT": "9"})
    with pytest.raises(settings.SettingsError, match="did you mean OUTBOARD_LIMITS_BODY_SECONDS"):
        settings.load({}, {"OUTBOARD_LIMIT_BODY_SECONDS": "9"})


def test_variables_of_the_commands_and_of_others_are_left_alone() -> None:
    given = {"OUTBOARD_URL": "http://x", "OUTBOARD_KEY": "k", "PATH": "/bin", "OUTBOARD_PORT": "9"}
    assert settings.load({}, given).port == 9


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot = 9", "prot is no setting .*did you mean port"),
        ("[limits]\nbodi = 9", r"\[limits\] bodi is no setting .*did you mean body"),
        ("[limit]\nbody = 9", "limit is no setting .*did you mean limits"),
        ("port = 'x'", "port"),
        ("limits = 5", "limits"),
    ],
)
def test_a_misspelt_key_of_the_file_is_refused_with_the_right_one(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "outboard.toml"
    file.write_text(text)
    with pytest.raises(settings.SettingsError, match=says) as refused:
        settings.load({}, {}, file)
    assert str(file) in str(refused.value)


def test_lists_in_variables_are_separated_by_semicolons() -> None:
    read = settings.load({}, {"OUTBOARD_DEVICE": "cpu;sim:usb4", "OUTBOARD_HTTP_HOSTS": "a;b"})
    assert read.device == ("cpu", "sim:usb4") and read.http.hosts == ("a", "b")


def test_sizes_have_units(tmp_path: Path) -> None:
    assert settings.load({}, {"OUTBOARD_LIMITS_HEAD": "8KiB"}).limits.head == 8192


@pytest.mark.parametrize("variable", ["LIMITS_DEADLINE", "LIMITS_BODY_SECONDS", "LIMITS_HEAD_SECONDS"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0"])
def test_limits_are_numbers_above_0(variable: str, value: str) -> None:
    with pytest.raises(settings.SettingsError, match="more than 0"):
        settings.load({}, {f"OUTBOARD_{variable}": value})


@pytest.mark.parametrize(
    "wanted",
    ["auto", "cpu", "cuda:0", "cuda:12", "GPU-8a2c1f4e-0b1d-4c3e-9f5a-123456789abc", "sim:thunderbolt4", "sim:usb4,vram=8GiB,compute=4+2"],
)
def test_devices_that_there_may_be(wanted: str) -> None:
    discovery.check(wanted)


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("foo", "expected auto, cpu, cuda:0"),
        ("", "expected auto, cpu, cuda:0"),
        ("cuda", "expected auto, cpu, cuda:0"),
        ("GPU-1", "expected auto, cpu, cuda:0"),
        ("sim:bogus", "expected one of thunderbolt3"),
        ("sim:thunderbolt4,vram=x", "such as vram=8GiB"),
        ("sim:thunderbolt4,vram=0", "such as vram=8GiB"),
        ("sim:thunderbolt4,compute=nan+1", "such as compute=4"),
        ("sim:thunderbolt4,color=red", "unknown"),
    ],
)
def test_devices_that_there_cannot_be(wanted: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        discovery.check(wanted)


def test_a_server_on_loopback_does_not_go_by_the_machine_s_name_and_one_on_the_network_does() -> None:
    assert own_names("127.0.0.1") == {"localhost", "127.0.0.1"}
    assert own_names("::1") == {"localhost", "::1"}
    assert len(own_names("0.0.0.0")) > 2
