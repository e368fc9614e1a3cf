"""Errors of the card in the kernel log."""

from __future__ import annotations

from collections.abc import Iterator

from outboard.doctor import kernel_log
from outboard.doctor.facts import Facts
from outboard.doctor.findings import Check, Finding

XID = Check(
    "xid",
    "warning",
    "The driver has logged an Xid error of the card (those of applications, such as 13, 31 and 43, are left out).",
    "An Xid is the driver's own report that something went wrong with the card, its power or its cable. 79 means that it has fallen off "
    "the bus: heat, power and cables are the usual causes. After a loss the driver may refuse every process until its module is loaded "
    "anew.",
    (
        "Look the number up: https://docs.nvidia.com/deploy/xid-errors/",
        "Check the enclosure's power supply and cable; try: sudo nvidia-smi -lgc 300,1500",
        "If CUDA fails although nvidia-smi works: stop what uses the GPU, then sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm",
    ),
)
FALLEN = Check(
    "fallen-off-the-bus",
    "warning",
    "The kernel log says that a card has fallen off the bus, without an Xid.",
    "A card may vanish without an Xid. Until it is back the CPU answers.",
    ("Check the enclosure's power and cable, then plug it in again.", "sudo sh -c 'echo 1 > /sys/bus/pci/rescan'"),
)
UNREADABLE = Check(
    "kernel-log-unreadable",
    "note",
    "The kernel log cannot be read.",
    "Xid errors of the card would be there, and are not looked at.",
    ("sudo outboard doctor", "sudo usermod --append --groups systemd-journal $USER, and log in again"),
)
CHECKS = (XID, FALLEN, UNREADABLE)

#: Errors that the program on the GPU has made, not the card: k8s-device-plugin `internal/rm/health.go`.
OF_APPLICATIONS = frozenset({13, 31, 43, 45, 68, 109})
#: dcgm-exporter `internal/pkg/collector/xid_errors.go`.
NAMES = {79: "GPU has fallen off the bus", 119: "GSP RPC timeout", 143: "initialisation failure", 154: "recovery action changed"}


def look(facts: Facts) -> Iterator[Finding]:
    if facts.log is None:
        if facts.cards:
            yield UNREADABLE.found("kernel log", "Neither journalctl nor dmesg shows it to this user.")
        return
    seen = kernel_log.xids(facts.log)
    for (address, number), lines in sorted(seen.items()):
        if number not in OF_APPLICATIONS:
            name = f" ({NAMES[number]})" if number in NAMES else ""
            times = "once" if len(lines) == 1 else f"{len(lines)} times"
            yield XID.found(address, f"Xid {number}{name} was logged {times} since this machine started, at last: {lines[-1]}")
    for address in kernel_log.fallen(facts.log):
        if not any(address.startswith(where) and number == 79 for where, number in seen):
            yield FALLEN.found(address, "The driver's start has found it not responding to commands.")
