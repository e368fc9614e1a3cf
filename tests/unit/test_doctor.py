"""`outboard doctor` finds what was planted on a machine, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import doctor_trees
from doctor_trees import LIMITS, RTX_5070_TI, VERSION, Tree
from outboard.doctor.areas import CHECKS, examine
from outboard.doctor.findings import Finding
from outboard.doctor.report import as_json, as_text, well

FOUR = "driver-takes-it-for-internal"  #: what is true of every enclosure of Thunderbolt 4 and later
XID = "[ 1843.308145] NVRM: Xid (PCI:0000:22:00): {}, pid='<unknown>', name=<unknown>, {}\n"


def found(tree: Tree) -> list[Finding]:
    return examine(tree.machine())[1]


def names(tree: Tree) -> set[str]:
    return {finding.check for finding in found(tree)}


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (doctor_trees.thunderbolt3, set()),
        (doctor_trees.thunderbolt4, {FOUR}),
        (doctor_trees.thunderbolt5, {FOUR}),
        (doctor_trees.usb4, {FOUR}),
        (doctor_trees.oculink, {"oculink-not-hot-pluggable"}),
        (doctor_trees.internal, set()),
        (doctor_trees.unplugged, {"thunderbolt-unauthorised"}),
        (doctor_trees.bare, {"no-card"}),
    ],
)
def test_on_a_machine_on_which_all_is_well_only_what_is_true_of_its_kind_is_said(tmp_path, machine, expected):
    tree = machine(tmp_path)
    assert names(tree) == expected
    assert well(found(tree)) is (machine is not doctor_trees.unplugged)


def narrow(tree: Tree) -> None:
    (tree.folder("0000:01:00.0") / "current_link_width").write_text("8\n")


def lost(tree: Tree) -> None:
    (tree.folder("0000:22:00.0") / "config").write_bytes(b"\xff" * 64)
    tree.log += XID.format(31, "Ch 0000000e") + XID.format(79, "GPU has fallen off the bus.")
    tree.nvml = '__import__("time").sleep(60)'


def before_bolt(tree: Tree) -> None:
    tree.write("/etc/systemd/system/outboard.service", "[Unit]\nAfter=network.target\n[Service]\nExecStart=/opt/bin/outboard serve")


def container(tree: Tree) -> None:
    tree.write("/.dockerenv", "")
    for file in (tree.root / "dev").iterdir():
        file.unlink()


def slow_cable(tree: Tree) -> None:
    for way in ("rx", "tx"):
        (tree.root / "sys/bus/thunderbolt/devices/0-1" / f"{way}_speed").write_text("10.0 Gb/s\n")


def errors_on_the_way(tree: Tree) -> None:
    text = "RxErr 4012\nBadTLP 3\nBadDLLP 0\nTOTAL_ERR_COR 4015"
    (tree.folder("0000:00:06.0") / "aer_dev_correctable").write_text(text + "\n")


def sleepy(tree: Tree) -> None:
    (tree.folder("0000:22:00.0") / "power/control").write_text("auto\n")


def sleepy_controller(tree: Tree) -> None:
    for address in ("0000:00:0d.2", "0000:00:07.0"):
        (tree.folder(address) / "power/control").write_text("auto\n")


def old_driver(tree: Tree) -> None:
    tree.write("/proc/driver/nvidia/version", VERSION.format("550.163.01"))


def other_cuda(tree: Tree) -> None:
    tree.no_library("onnxruntime-gpu")
    tree.library("onnxruntime-gpu", "1.24.0", "nvidia-cuda-nvrtc-cu12~=12.0; extra == 'cuda'")


def drowned(tree: Tree) -> None:
    (tree.folder("0000:01:00.0") / "driver").unlink()
    drivers = tree.root / "sys/bus/pci/drivers/nouveau"
    drivers.mkdir(parents=True)
    (tree.folder("0000:01:00.0") / "driver").symlink_to(os.path.relpath(drivers, tree.folder("0000:01:00.0")))


def desktop(tree: Tree) -> None:
    browser = {"pid": 4711, "command": "firefox", "bytes": 5 << 30, "ours": False}
    worker = {"pid": 4712, "command": "python", "bytes": 6 << 30, "ours": True}
    tree.health(used_bytes=11 << 30, processes=[browser, worker])


PLANTED: list[tuple[Callable[[Path], Tree], Callable[[Tree], object], set[str]]] = [
    (doctor_trees.thunderbolt3, slow_cable, {"thunderbolt-slow-cable"}),
    (doctor_trees.thunderbolt4, sleepy, {"card-may-sleep", FOUR}),
    (doctor_trees.thunderbolt4, sleepy_controller, {"controller-may-sleep", FOUR}),
    (doctor_trees.thunderbolt4, lost, {"card-lost", "xid", "driver-hangs"}),
    (lambda root: doctor_trees.thunderbolt5(root, RTX_5070_TI), lambda tree: None, {"blackwell-over-cable", FOUR}),
    (doctor_trees.thunderbolt5, lambda tree: tree.measured(2.6), {"bandwidth-low", FOUR}),
    (doctor_trees.usb4, lambda tree: tree.measured(0.8), {"bandwidth-low", FOUR}),
    (doctor_trees.usb4, lambda tree: tree.measured(2.5), {FOUR}),
    (doctor_trees.oculink, errors_on_the_way, {"pcie-errors", "oculink-not-hot-pluggable"}),
    (doctor_trees.oculink, lambda tree: tree.measured(6.6), {"oculink-not-hot-pluggable"}),
    (doctor_trees.internal, narrow, {"link-narrow"}),
    (doctor_trees.internal, lambda tree: tree.measured(12.0), {"bandwidth-low"}),
    (doctor_trees.internal, lambda tree: tree.health(utilisation=90, pcie_generation=1, pcie_generation_possible=4), {"link-slow"}),
    (doctor_trees.internal, drowned, {"no-driver"}),
    (doctor_trees.internal, container, {"container-without-card"}),
    (doctor_trees.internal, old_driver, {"driver-too-old"}),
    (doctor_trees.internal, other_cuda, {"cuda-versions-differ"}),
    (doctor_trees.internal, lambda tree: tree.library("onnxruntime", "1.31.1"), {"two-onnxruntimes"}),
    (doctor_trees.internal, lambda tree: tree.health(reasons=["hw_slowdown", "hw_thermal"], temperature_c=91), {"throttled-by-heat"}),
    (doctor_trees.internal, lambda tree: tree.health(reasons=["hw_power_brake"]), {"power-brake"}),
    (doctor_trees.internal, lambda tree: tree.health(limit_w=50.0), {"power-limit-low"}),
    (doctor_trees.internal, desktop, {"memory-taken"}),
    (doctor_trees.internal, lambda tree: tree.health(persistence=True), set()),
    (doctor_trees.thunderbolt3, lambda tree: tree.health(persistence=True), {"persistence-on-external"}),
    (doctor_trees.internal, lambda tree: setattr(tree, "log_readable", False), {"kernel-log-unreadable"}),
    (doctor_trees.internal, lambda tree: tree.write("/proc/self/limits", LIMITS.format(files=1024, locked=65536)),
     {"few-open-files", "little-locked-memory"}),
    (doctor_trees.internal, lambda tree: tree.write("/cache", "a file"), {"cache-not-writable"}),
    (doctor_trees.internal, lambda tree: setattr(tree, "free", 1 << 30), {"disk-nearly-full"}),
    (doctor_trees.internal, lambda tree: setattr(tree, "nvml", {"error": "Driver/library version mismatch", "gpus": []}),
     {"driver-refuses"}),
    (doctor_trees.unplugged, before_bolt, {"thunderbolt-unauthorised", "starts-before-bolt"}),
    (doctor_trees.unplugged, lambda tree: (tree.root / "sys/bus/thunderbolt/devices/domain0/security").write_text("dponly\n"),
     {"thunderbolt-without-pcie"}),
    (lambda root: doctor_trees.unplugged(root, "1"), lambda tree: None, {"no-card"}),
]  # fmt: skip


@pytest.mark.parametrize(("machine", "plant", "expected"), PLANTED)
def test_what_was_planted_is_found_and_nothing_else_and_the_report_fits_80_columns(tmp_path, machine, plant, expected):
    tree = machine(tmp_path)
    plant(tree)
    facts, findings = examine(tree.machine())
    assert {finding.check for finding in findings} == expected
    lines = as_text(facts, findings).splitlines()
    # What follows "> " is there to be copied, and a path has no place to break.
    assert [line for line in lines if len(line) > 80 and not line.startswith("  > ") and " " in line.strip()] == []
    assert not any("{" in line for line in lines)
    assert json.loads(json.dumps(as_json(facts, findings)))["well"] is well(findings)


def test_every_check_is_planted_somewhere(tmp_path):
    planted = set().union(*(expected for _, _, expected in PLANTED)) | {"fallen-off-the-bus", "no-device-files"}
    planted |= {"onnxruntime-for-the-cpu", "torch-for-the-cpu"}
    assert planted == {check.name for checks in CHECKS.values() for check in checks}


def test_a_card_that_vanished_without_an_xid_is_found_in_the_log(tmp_path):
    tree = doctor_trees.unplugged(tmp_path, "1")
    tree.log += (
        "[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0\n"
        "               NVRM: (PCI ID: 10de:26b5) installed in this system has\n"
        "               NVRM: fallen off the bus and is not responding to commands.\n"
    )
    assert names(tree) == {"no-card", "fallen-off-the-bus"}


def test_a_card_that_only_the_driver_still_knows_is_lost(tmp_path):
    tree = doctor_trees.internal(tmp_path)
    (tree.root / "sys/bus/pci/devices/0000:01:00.0").unlink()
    (finding,) = found(tree)
    assert finding.check == "card-lost" and "no longer on the PCI bus" in finding.what


def test_libraries_for_the_cpu_leave_a_card_unused(tmp_path):
    tree = doctor_trees.internal(tmp_path)
    for name in ("torch", "onnxruntime-gpu"):
        tree.no_library(name)
    tree.library("torch", "2.14.1+cpu")
    tree.library("onnxruntime", "1.31.1")
    assert names(tree) == {"torch-for-the-cpu", "onnxruntime-for-the-cpu"}


def test_missing_device_files_outside_a_container_are_made_by_nvidia_modprobe(tmp_path):
    tree = doctor_trees.internal(tmp_path)
    (tree.root / "dev/nvidia0").unlink()
    (finding,) = found(tree)
    assert finding.check == "no-device-files" and "nvidia-modprobe" in finding.mend[0]


@pytest.mark.parametrize("parameters", ["quiet pcie_port_pm=off pcie_aspm.policy=performance"])
def test_a_blackwell_card_is_left_alone_once_the_kernel_was_told(tmp_path, parameters):
    tree = doctor_trees.thunderbolt5(tmp_path, RTX_5070_TI)
    tree.write("/proc/cmdline", parameters)
    assert names(tree) == {FOUR}


def test_a_tunnels_own_speed_is_not_believed(tmp_path):
    """The root port of an AMD tunnel says 2.5 GT/s x1; the card's link to the enclosure's switch is what counts."""
    facts, _ = examine(doctor_trees.usb4(tmp_path).machine())
    (card,) = facts.cards
    assert str(card.possible) == "8 GT/s x4"
    assert card.external_by == "behind a Thunderbolt or USB4 controller"


def test_a_unit_that_waits_for_bolt_is_well(tmp_path):
    tree = doctor_trees.unplugged(tmp_path, "1")
    before_bolt(tree)
    assert names(tree) == {"no-card", "starts-before-bolt"}
    tree.write("/etc/systemd/system/outboard.service.d/bolt.conf", "[Unit]\nWants=bolt.service\nAfter=bolt.service")
    assert names(tree) == {"no-card"}


def test_each_finding_says_what_why_and_the_command_with_this_machines_names(tmp_path):
    tree = doctor_trees.unplugged(tmp_path)
    (finding,) = found(tree)
    assert finding.subject == "Acme eGPU Box 4 (0-1)"
    assert finding.mend[0].startswith("boltctl enroll c0030000-")
    assert "/sys/bus/thunderbolt/devices/0-1/authorized" in finding.mend[1]
    assert finding.what and finding.why


def test_the_report_shows_each_card_with_its_cable_and_what_was_measured(tmp_path):
    tree = doctor_trees.thunderbolt4(tmp_path)
    tree.measured(2.41)
    text = as_text(*examine(tree.machine()))
    assert "NVIDIA GeForce RTX (0000:22:00.0)" in text
    assert "external (sysfs removable): Acme eGPU Box 4, Thunderbolt 4 or USB4, 40 Gb/s" in text
    assert "PCIe 2.5 GT/s x4 now, 8 GT/s x4 possible" in text
    assert "2.41 GB/s to it" in text and "31 of 170 W" in text and "driver 595.45.04" in text


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "outboard", "doctor", *arguments], capture_output=True, text=True, cwd=cwd, timeout=100)


def test_the_command_says_by_its_exit_code_whether_something_is_wrong(tmp_path):
    """On whatever machine this is."""
    done = run("--json", cwd=tmp_path)
    answer = json.loads(done.stdout)
    assert done.returncode == (0 if answer["well"] else 1), done.stderr
    shown = run(cwd=tmp_path)
    assert shown.returncode == done.returncode
    assert all(finding["check"] in shown.stdout for finding in answer["findings"])


def test_wrong_usage_is_2(tmp_path):
    assert run("--nonsense", cwd=tmp_path).returncode == 2
    (tmp_path / "outboard.toml").write_text("nonsense = 1\n")
    assert run(cwd=tmp_path).returncode == 2


def test_nothing_of_the_gpus_libraries_is_imported(tmp_path):
    code = (
        "import sys; from pathlib import Path; from outboard.doctor.areas import examine; from outboard.doctor.machine import Machine;"
        "examine(Machine(cache=Path('.'))); print(sorted({'torch', 'onnxruntime', 'onnx', 'pynvml'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert done.stdout.strip() == "[]", done.stderr
