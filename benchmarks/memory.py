"""The resident set of this process. Linux only."""

from pathlib import Path


def resident(what: str) -> int:
    """Resident set now (VmRSS) or at its peak (VmHWM), in KiB."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(what)))


def forget_peak() -> None:
    """The peak is counted from now on. (A new process starts with its parent's.)"""
    Path("/proc/self/clear_refs").write_text("5")
