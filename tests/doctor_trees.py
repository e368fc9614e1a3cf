"""Machines that exist only as files: /sys, /proc, /dev and /etc as the kernel's documentation describes them.

Sources: Linux, Documentation/ABI/testing/sysfs-bus-pci, sysfs-bus-thunderbolt and sysfs-bus-pci-devices-aer_stats; for
/proc/driver/nvidia the README of NVIDIA's driver; lspci of such machines in public reports.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from outboard.core.costs import BatchCost
from outboard.core.link import Link
from outboard.doctor.machine import Machine
from outboard.profiles import Key, Profile, Store

UUID = "GPU-6b8e0a44-1111-2222-3333-0123456789ab"
RTX_3060, RTX_4070, RTX_5070_TI = 0x2504, 0x2786, 0x2C05
GEN1, GEN3, GEN4 = "2.5 GT/s PCIe", "8.0 GT/s PCIe", "16.0 GT/s PCIe"

#: What NVML says of a card that is well.
WELL: dict[str, Any] = {
    "uuid": UUID,
    "temperature_c": 52,
    "power_w": 31.0,
    "limit_w": 170.0,
    "default_limit_w": 170.0,
    "reasons": ["gpu_idle"],
    "persistence": False,
    "memory_bytes": 12 << 30,
    "used_bytes": 300 << 20,
    "processes": [],
    "utilisation": 0,
    "pcie_generation": 1,
    "pcie_generation_possible": 3,
}


class Tree:
    """One machine. Everything is well on it until something is planted."""

    def __init__(self, root: Path):
        self.root = root
        self.nvml: dict[str, Any] | str = {"error": "", "gpus": []}  #: or a Python program that stands for the process that asks NVML
        self.log = "Dec  1 09:00:00 kernel: Linux version 6.17.0\n"
        self.log_readable = True
        self.free = 500 << 30
        self.spool: Path | None = None
        self.write("/proc/self/limits", LIMITS.format(files=65536, locked=8388608))
        self.write("/proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/nvme0n1p2 quiet")
        (root / "sys/bus/pci/devices").mkdir(parents=True)
        self.library("torch", "2.14.1", "cuda-toolkit[cublas,cudart]==13.0.3; platform_system == 'Linux'", "nvidia-cudnn-cu13==9.24.0.43")
        self.library("onnxruntime-gpu", "1.31.1", "nvidia-cuda-runtime~=13.0; extra == 'cuda'", "nvidia-cudnn-cu13~=9.0; extra == 'cudnn'")

    def machine(self) -> Machine:
        program = self.nvml if isinstance(self.nvml, str) else f"print({json.dumps(self.nvml)!r})"
        log = self.write("/kernel.log", self.log)
        return Machine(
            root=self.root,
            cache=self.root / "cache",
            spool=self.spool,
            logs=(("cat", str(log)) if self.log_readable else ("false",),),
            nvml=(sys.executable, "-c", program),
            nvml_limit=2.0 if isinstance(self.nvml, str) else 60.0,
            libraries=(str(self.root / "site-packages"),),
            free=lambda _: self.free,
        )

    def write(self, name: str, text: str | bytes) -> Path:
        path = self.root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else f"{text}\n".encode())
        return path

    def folder(self, address: str) -> Path:
        return (self.root / "sys/bus/pci/devices" / address).resolve()

    def pci(self, above: str, address: str, vendor: int, device: int, kind: int, now: str = GEN3, most: str = "", **files: str) -> Path:
        """A PCI device below `above` (another's address, or ""). `now` and `most` are "8.0 GT/s PCIe x4"."""
        parent = self.folder(above) if above else self.root / "sys/devices" / f"pci{address[:7]}"
        folder = parent / address
        name = "/" + str(folder.relative_to(self.root))
        identity = vendor.to_bytes(2, "little") + device.to_bytes(2, "little")
        self.write(f"{name}/config", identity.ljust(64, b"\0"))
        links = {"current": now, "max": most or now}
        texts = {"vendor": f"0x{vendor:04x}", "device": f"0x{device:04x}", "class": f"0x{kind:06x}"}
        texts |= {"removable": "fixed", "power/control": "on"}
        for which, link in links.items():
            speed, _, lanes = link.rpartition(" x")
            texts |= {f"{which}_link_speed": speed or link, f"{which}_link_width": lanes or "4"}
        for file, text in (texts | files).items():
            self.write(f"{name}/{file}", text)
        self._alias("pci", address, folder)
        return folder

    def gpu(self, above: str, address: str, device: int, now: str, most: str, driver: str = "nvidia", **files: str) -> Path:
        """An NVIDIA card with its driver, device files and what NVML says of it."""
        folder = self.pci(above, address, 0x10DE, device, 0x030000, now, most, **files)
        if driver:
            drivers = self.root / "sys/bus/pci/drivers" / driver
            drivers.mkdir(parents=True, exist_ok=True)
            (folder / "driver").symlink_to(os.path.relpath(drivers, folder))
        if driver == "nvidia":
            self.write("/proc/driver/nvidia/version", VERSION.format("595.45.04"))
            self.write(f"/proc/driver/nvidia/gpus/{address}/information", f"Model: \t\t NVIDIA GeForce RTX\nGPU UUID: \t {UUID}\n")
            for file in ("nvidiactl", "nvidia0", "nvidia-uvm"):
                self.write(f"/dev/{file}", "")
            assert isinstance(self.nvml, dict)
            self.nvml["gpus"].append({**WELL, "pci": address})
        return folder

    def health(self, **values: Any) -> None:
        """NVML says this of the (only) card."""
        assert isinstance(self.nvml, dict)
        self.nvml["gpus"][0] |= values

    def domain(self, controller: str, number: int = 0, security: str = "user") -> Path:
        folder = self.folder(controller) / f"domain{number}"
        name = "/" + str(folder.relative_to(self.root))
        self.write(f"{name}/security", security)
        self._router(folder, f"{number}-0", "Intel", "Laptop", 4, 0.0, 0, authorised="1")
        self._alias("thunderbolt", folder.name, folder)
        return folder

    def enclosure(self, domain: Path, name: str, generation: int, lane: float, lanes: int = 2, authorised: str = "1") -> Path:
        number = domain.name.removeprefix("domain")
        host = domain / f"{number}-0"
        return self._router(host, f"{number}-1", "Acme", name, generation, lane, lanes, authorised)

    def _router(self, above: Path, id: str, vendor: str, name: str, generation: int, lane: float, lanes: int, authorised: str) -> Path:
        folder = above / id
        texts = {"authorized": authorised, "vendor_name": vendor, "device_name": name, "generation": str(generation)}
        texts["unique_id"] = f"c0030000-00a2-8508-2219-f4d4d2c1a9{generation:02d}"
        if lanes:
            texts |= {f"{way}_{what}": value for way in ("rx", "tx") for what, value in (("speed", f"{lane} Gb/s"), ("lanes", str(lanes)))}
        for file, text in texts.items():
            self.write(f"/{folder.relative_to(self.root)}/{file}", text)
        self._alias("thunderbolt", id, folder)
        return folder

    def supplied_by(self, port: str, controller: str) -> None:
        """The firmware says that a PCIe port is a controller's tunnel."""
        (self.folder(port) / f"supplier:pci:{controller}").symlink_to(os.path.relpath(self.folder(controller), self.folder(port)))

    def library(self, name: str, version: str, *requires: str) -> None:
        lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {line}" for line in requires)]
        self.write(f"/site-packages/{name.replace('-', '_')}-{version}.dist-info/METADATA", "\n".join(lines))

    def no_library(self, name: str) -> None:
        (folder,) = (self.root / "site-packages").glob(f"{name.replace('-', '_')}-[0-9]*.dist-info")
        shutil.rmtree(folder)

    def measured(self, gb_per_s: float) -> None:
        """A profile of the card that says how fast its link is."""
        rate = gb_per_s * 1e9
        key = Key(
            uuid=UUID,
            model="net",
            version="sha256:0123456789ab",
            provider="CUDAExecutionProvider",
            libraries="onnxruntime-gpu 1.31.1",
            concurrency=2,
            threads=1,
        )
        link = Link(rate, rate, 1e-5, 1e-5, rate, rate)
        given = {"key": key, "device": "NVIDIA GeForce RTX", "measured_at": 1.0, "costs": [COST]}
        Store(self.root / "cache").put(Profile(**given, fixed_rows=1, memory_bytes=1 << 28, link=link))

    def _alias(self, bus: str, name: str, folder: Path) -> None:
        devices = self.root / "sys/bus" / bus / "devices"
        devices.mkdir(parents=True, exist_ok=True)
        (devices / name).symlink_to(os.path.relpath(folder, devices))


COST = BatchCost(1, 0.01)
VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U22)  Tue Mar  3 08:00:00 UTC 2026"
LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max open files            {files}                1048576              files
Max locked memory         {locked}              {locked}              bytes"""


# ---- machines on which all is well


def thunderbolt3(root: Path) -> Tree:
    """A laptop with a Thunderbolt 3 controller of its own chip (Alpine Ridge); the enclosure's switch has the card below it."""
    tree = Tree(root)
    tree.pci("", "0000:00:1c.0", 0x8086, 0x9D10, 0x060400, f"{GEN3} x4")
    tree.pci("0000:00:1c.0", "0000:02:00.0", 0x8086, 0x1576, 0x060400, f"{GEN3} x4")
    tree.pci("0000:02:00.0", "0000:03:00.0", 0x8086, 0x1576, 0x060400, f"{GEN1} x4")
    tree.pci("0000:03:00.0", "0000:04:00.0", 0x8086, 0x1575, 0x088000, f"{GEN1} x4")
    tree.pci("0000:02:00.0", "0000:03:01.0", 0x8086, 0x1576, 0x060400, f"{GEN1} x4")
    tree.pci("0000:03:01.0", "0000:05:00.0", 0x8086, 0x1578, 0x060400, f"{GEN1} x4", f"{GEN3} x4")
    tree.pci("0000:05:00.0", "0000:06:01.0", 0x8086, 0x1578, 0x060400, f"{GEN3} x4")
    tree.gpu("0000:06:01.0", "0000:07:00.0", RTX_3060, f"{GEN1} x4", f"{GEN4} x16")
    tree.enclosure(tree.domain("0000:04:00.0"), "eGPU Box", 3, 20.0)
    return tree


def thunderbolt4(root: Path) -> Tree:
    """A laptop with the controller in the processor: its PCIe ports lie beside it, and are marked as external-facing."""
    tree = _integrated(root)
    _boxed(tree, "0000:00:07.0")
    tree.enclosure(tree.domain("0000:00:0d.2"), "eGPU Box 4", 4, 20.0)
    return tree


def thunderbolt5(root: Path, gpu: int = RTX_4070) -> Tree:
    """A desktop with a Thunderbolt 5 controller on a card (Barlow Ridge): 80 Gb/s in two lanes."""
    tree = Tree(root)
    tree.pci("", "0000:00:1d.0", 0x8086, 0x7A30, 0x060400, f"{GEN4} x4")
    tree.pci("0000:00:1d.0", "0000:50:00.0", 0x8086, 0x5780, 0x060400, f"{GEN4} x4")
    tree.pci("0000:50:00.0", "0000:51:00.0", 0x8086, 0x5780, 0x060400, f"{GEN1} x4")
    tree.pci("0000:51:00.0", "0000:52:00.0", 0x8086, 0x5781, 0x0C0340, f"{GEN1} x4")
    tree.pci("0000:50:00.0", "0000:51:01.0", 0x8086, 0x5780, 0x060400, f"{GEN1} x4")
    tree.pci("0000:51:01.0", "0000:60:00.0", 0x8086, 0x5786, 0x060400, f"{GEN4} x4")
    tree.pci("0000:60:00.0", "0000:61:01.0", 0x8086, 0x5786, 0x060400, f"{GEN4} x4")
    tree.gpu("0000:61:01.0", "0000:62:00.0", gpu, f"{GEN1} x4", f"{GEN4} x16", removable="removable")
    tree.enclosure(tree.domain("0000:52:00.0"), "eGPU Box 5", 4, 40.0)
    return tree


def usb4(root: Path) -> Tree:
    """An AMD laptop: the tunnel's root port claims 2.5 GT/s x1 whatever passes through it."""
    tree = Tree(root)
    tree.pci("", "0000:00:08.3", 0x1022, 0x14EB, 0x060400, f"{GEN4} x16")
    tree.pci("0000:00:08.3", "0000:c4:00.5", 0x1022, 0x1668, 0x0C0340, f"{GEN4} x16")
    tree.pci("", "0000:00:03.1", 0x1022, 0x14EF, 0x060400, f"{GEN1} x1")
    _boxed(tree, "0000:00:03.1", removable="fixed")
    tree.supplied_by("0000:00:03.1", "0000:c4:00.5")
    tree.enclosure(tree.domain("0000:c4:00.5", security="none"), "USB4 Box", 4, 20.0)
    return tree


def oculink(root: Path) -> Tree:
    """A mini PC with a card on four lanes; nothing but the lanes says that there is a cable."""
    tree = Tree(root)
    tree.pci("", "0000:00:06.0", 0x8086, 0x464D, 0x060400, f"{GEN4} x4")
    tree.gpu("0000:00:06.0", "0000:01:00.0", RTX_4070, f"{GEN1} x4", f"{GEN4} x16")
    return tree


def internal(root: Path) -> Tree:
    """A desktop with a card in its slot, idle: at 2.5 GT/s."""
    tree = Tree(root)
    tree.pci("", "0000:00:01.0", 0x8086, 0x460D, 0x060400, f"{GEN4} x16")
    tree.gpu("0000:00:01.0", "0000:01:00.0", RTX_3060, f"{GEN1} x16", f"{GEN4} x16")
    return tree


def unplugged(root: Path, authorised: str = "0") -> Tree:
    """A laptop with an enclosure on its cable that is not, or not yet, authorised."""
    tree = _integrated(root)
    tree.enclosure(tree.domain("0000:00:0d.2"), "eGPU Box 4", 4, 20.0, authorised=authorised)
    return tree


def bare(root: Path) -> Tree:
    """A server without any GPU."""
    tree = Tree(root)
    tree.pci("", "0000:00:02.0", 0x1A03, 0x2000, 0x030000)
    return tree


def _integrated(root: Path) -> Tree:
    tree = Tree(root)
    tree.pci("", "0000:00:0d.2", 0x8086, 0x9A1B, 0x0C0340)
    tree.pci("", "0000:00:07.0", 0x8086, 0x9A23, 0x060400, f"{GEN1} x4")
    tree.supplied_by("0000:00:07.0", "0000:00:0d.2")
    return tree


def _boxed(tree: Tree, port: str, removable: str = "removable") -> None:
    """An enclosure's PCIe switch and the card in it, below a port of the computer."""
    tree.pci(port, "0000:20:00.0", 0x8086, 0x15EF, 0x060400, f"{GEN1} x4", f"{GEN3} x4", removable=removable)
    tree.pci("0000:20:00.0", "0000:21:01.0", 0x8086, 0x15EF, 0x060400, f"{GEN3} x4", removable=removable)
    tree.gpu("0000:21:01.0", "0000:22:00.0", RTX_3060, f"{GEN1} x4", f"{GEN4} x16", removable=removable)
