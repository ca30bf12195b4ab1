"""A driver library without a driver: NVML as nvidia-ml-py calls it, with the GPUs that the environment names."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
/* Each letter of FAKE_GPUS is one: g is whole, l lost, p not permitted.
   Whole ones, too: u is used by the process FAKE_USER, t has memory taken by nobody, s is sick in all ways that can be
   repaired, f has failed, b has nearly no memory left. GPU i has the PCI address 0:(i + 1):0 and 8 GiB, of which 2 are
   taken for u and t. FAKE_GPUS may name a file that has the letters. FAKE_UUID begins the UUIDs. */
static const char *gpus(void) {
    static char text[64];
    FILE *file = fopen(getenv("FAKE_GPUS"), "r");
    if (!file) return getenv("FAKE_GPUS");
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    return text;
}
static char kind(long device) { return gpus()[device - 1]; }
int nvmlInitWithFlags(unsigned flags) { return getenv("FAKE_INIT") ? atoi(getenv("FAKE_INIT")) : 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : "Driver/library version mismatch"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = strlen(gpus()); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, long *device) {
    *device = 1 + index;
    return kind(*device) == 'l' ? 15 : kind(*device) == 'p' ? 4 : 0;
}
int nvmlDeviceGetName(long device, char *text, unsigned size) { return snprintf(text, size, "Fake") < 0; }
int nvmlDeviceGetUUID(long device, char *text, unsigned size) {
    return snprintf(text, size, "GPU-%s%ld", getenv("FAKE_UUID") ? getenv("FAKE_UUID") : "", device) < 0;
}
struct pci { char legacy[16]; unsigned domain, bus, device; };
int nvmlDeviceGetPciInfo_v3(long device, struct pci *info) {
    info->domain = 0, info->bus = device, info->device = 0;
    return 0;
}
int nvmlDeviceGetMemoryInfo(long device, unsigned long long *memory) {
    unsigned long long taken = strchr("ut", kind(device)) ? 2ull << 30 : kind(device) == 'b' ? 8100ull << 20 : 0;
    memory[0] = 8ull << 30, memory[1] = memory[0] - taken, memory[2] = taken;
    return 0;
}
int nvmlDeviceGetRemappedRows(long device, unsigned *right, unsigned *wrong, unsigned *pending, unsigned *failed) {
    *right = *wrong = 0, *pending = kind(device) == 's', *failed = kind(device) == 'f';
    return kind(device) == 'g' ? 3 : 0;
}
int nvmlDeviceGetRetiredPagesPendingStatus(long device, int *pending) { return 3; }
int nvmlDeviceGetTotalEccErrors(long device, int type, int counter, unsigned long long *count) {
    *count = type == 1 && counter == 0 && kind(device) == 's' ? 2 : 0;
    return kind(device) == 'g' ? 3 : 0;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(long device, unsigned long long *reasons) {
    *reasons = kind(device) == 's' ? 0x40 | 0x80 | 0x8 | 0x4 : 0x1;
    return 0;
}
int nvmlDeviceGetTemperature(long device, int sensor, unsigned *celsius) { *celsius = 91; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(long device, unsigned *count, unsigned *processes) {
    unsigned used = kind(device) == 'u', room = *count;
    *count = used;
    if (used && room) processes[0] = atoi(getenv("FAKE_USER"));
    return room < used ? 7 : 0;
}
"""


def make_driver(folder: Path, *, lacks: str = "") -> Path:
    """Compile the library; returns the directory for LD_LIBRARY_PATH. Skips the test without a C compiler.

    lacks: a function that it does not have, as if it were older.
    """
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler here")
    folder.mkdir(exist_ok=True)
    (folder / "nvml.c").write_text(SOURCE.replace(f" {lacks}(", " unused(") if lacks else SOURCE)
    command = ["cc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", folder / "nvml.c"]
    subprocess.run(command, check=True, timeout=60)
    return folder
