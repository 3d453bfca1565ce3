"""What a device has left, so that what does not fit is refused before it is asked for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .._core.lazy import torch


def free(device: Any) -> int:
    """Bytes that `device` has left. What torch keeps for later counts as such, and what the CPU caches files in."""
    if device.type == "cuda":
        left, _ = torch.cuda.mem_get_info(device)
        return int(left + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    (kilobytes,) = re.findall(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return 1024 * int(kilobytes)
