"""GPUs as /proc and /sys show them, on trees written by hand."""

from __future__ import annotations

import os
from pathlib import Path

from outboard.devices import ejection, presence, probe

ADDRESS = "0000:05:00.0"
UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"


def trees(
    root: Path, *, uuid: str = UUID, removable: str = "fixed", thunderbolt: bool = False, config: bytes = b"\xde\x10\x84\x24"
) -> tuple[Path, Path]:
    """(driver, pci): what the NVIDIA driver and the kernel show for one card."""
    driver, pci = root / "driver", root / "pci"
    (driver / ADDRESS).mkdir(parents=True)
    (driver / ADDRESS / "information").write_text(
        f"Model: \t\t NVIDIA GeForce RTX 3060\nIRQ:   \t\t 142\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\n"
    )
    controller = root / "devices" / "0000:00:1c.0"
    card = controller / ADDRESS
    card.mkdir(parents=True)
    if thunderbolt:
        (controller / "domain0").mkdir()
    (card / "removable").write_text(removable + "\n")
    (card / "config").write_bytes(config)
    pci.mkdir()
    os.symlink(card, pci / ADDRESS)
    return driver, pci


def test_a_card_is_known_by_its_uuid_and_address(tmp_path: Path) -> None:
    (gpu,) = probe.gpus(*trees(tmp_path))
    assert gpu == {"uuid": UUID, "name": "NVIDIA GeForce RTX 3060", "pci": ADDRESS, "external": False, "rule": ""}


def test_external_cards_are_told_by_removable_or_by_a_thunderbolt_domain(tmp_path: Path) -> None:
    (by_firmware,) = probe.gpus(*trees(tmp_path / "a", removable="removable"))
    (by_domain,) = probe.gpus(*trees(tmp_path / "b", thunderbolt=True))
    assert by_firmware["external"] and by_firmware["rule"] == "sysfs removable"
    assert by_domain["external"] and "Thunderbolt" in str(by_domain["rule"])


def test_a_card_that_the_driver_cannot_talk_to_is_left_out(tmp_path: Path) -> None:
    assert probe.gpus(*trees(tmp_path, uuid="GPU-????????-????-????-????-????????????")) == []


def test_no_driver_means_no_cards(tmp_path: Path) -> None:
    assert probe.gpus(tmp_path / "nothing", tmp_path) == []


def test_a_card_is_gone_when_its_entry_is_or_when_it_reads_as_ones(tmp_path: Path) -> None:
    _, pci = trees(tmp_path)
    assert presence.gone(ADDRESS, pci) == ""
    assert "no longer" in presence.gone("0000:09:00.0", pci)
    (pci / ADDRESS / "config").write_bytes(b"\xff" * 64)
    assert "does not answer" in presence.gone(ADDRESS, pci)


def test_who_holds_the_device_is_named(tmp_path: Path) -> None:
    for pid, links in (("41", ["/dev/null"]), ("42", ["/dev/nvidia0", "/dev/null"])):
        (tmp_path / pid / "fd").mkdir(parents=True)
        (tmp_path / pid / "comm").write_text("nvtop\n")
        for i, target in enumerate(links):
            os.symlink(target, tmp_path / pid / "fd" / str(i))
    assert ejection.holders(tmp_path) == [{"pid": 42, "command": "nvtop"}]


def test_an_ejected_device_is_safe_only_when_nothing_holds_it() -> None:
    assert ejection.report("sim", "", released=True)["safe"] is True
    stuck = ejection.report("gpu", UUID, released=False)
    assert stuck["safe"] is False and "stuck" in stuck["say"]
