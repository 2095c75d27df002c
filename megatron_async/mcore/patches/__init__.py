# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Everything of torch and Megatron that this package replaces: one table. Importing it replaces nothing.

`install` applies the permanent patches of a device. Temporary ones (`patches.temporary`) are context managers of the
functions that need them.
"""

from megatron_async.mcore.patches import cpu, cuda, megatron
from megatron_async.mcore.patches.patch import Patch

# In this order: torch must be patched before Megatron is imported, which locating the later targets does.
PERMANENT: tuple[Patch, ...] = (*cpu.PATCHES, *megatron.PATCHES, *cuda.PATCHES)

_installed: set[str] = set()


def install(device: str) -> bool:
    """Apply the permanent patches of "cpu" or "cuda" to this process, each once; return whether one was missing."""
    missing = [patch for patch in PERMANENT if device in patch.devices and patch.target not in _installed]
    for patch in missing:
        patch.apply()
        _installed.add(patch.target)
    return bool(missing)
