"""What the machine has: card, driver, C library, Python's modules, libraries and tools. What is missing is one line each."""

from __future__ import annotations

import glob
import importlib.metadata
import os
import pathlib
import re
import shutil
import sys
from typing import Any, Optional

from process import Processes

# Library, its file, and what does not run without it.
LIBRARIES = (
    ("cuBLASLt", "libcublasLt.so.13", "matrix products, and with them models"),
    ("NCCL", "libnccl.so.2", "groups of several GPUs"),
)
MODULES = (("torch", "weights and peers"),)
TOOLS = (("compute-sanitizer", "failed tests under sanitizers"), ("ncu", "hardware counters"))


def toolkits() -> list[str]:
    """Returns the folders of CUDA toolkits."""
    named = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    return named + sorted(glob.glob("/usr/local/cuda*"), reverse=True)


def package_folders() -> list[str]:
    """Returns the folders of libraries in NVIDIA's Python packages."""
    return [folder for entry in sys.path for folder in sorted(glob.glob(os.path.join(entry or ".", "nvidia/*/lib")))]


def loader_folders(processes: Processes) -> list[str]:
    """Returns the folders that the loader searches."""
    named = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    known = processes.run(["ldconfig", "-p"], 5).output
    return named + sorted({os.path.dirname(path) for path in re.findall(r"=> (/\S+)", known)})


def libraries(processes: Processes) -> dict[str, Optional[str]]:
    """Finds the libraries in Python's packages, in toolkits and where the loader searches, and has the loader find them too."""
    packages = package_folders()
    toolkit = [os.path.join(home, name) for home in toolkits() for name in ("lib64", "targets/x86_64-linux/lib")]
    loader = loader_folders(processes)
    found: dict[str, Optional[str]] = {}
    folders = list(packages)
    for name, file, _ in LIBRARIES:
        holder = next((folder for folder in packages + toolkit + loader if os.path.exists(os.path.join(folder, file))), None)
        found[name] = os.path.join(holder, file) if holder else None
        if holder and holder not in loader:
            folders.append(holder)
    folders.append(os.environ.get("LD_LIBRARY_PATH", ""))
    processes.environment["LD_LIBRARY_PATH"] = ":".join(dict.fromkeys(folder for folder in folders if folder))
    return found


def modules() -> dict[str, Optional[str]]:
    """Returns the versions of Python's modules, without importing them."""
    found: dict[str, Optional[str]] = {}
    for name, _ in MODULES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def tools(processes: Processes) -> dict[str, Optional[str]]:
    """Finds programs on PATH and in toolkits, and puts the toolkits on PATH."""
    folders = [processes.environment.get("PATH", "")] + [os.path.join(home, "bin") for home in toolkits()]
    folders += sorted(glob.glob("/opt/nvidia/nsight-compute/*"), reverse=True)
    processes.environment["PATH"] = ":".join(folder for folder in folders if folder)
    return {name: shutil.which(name, path=processes.environment["PATH"]) for name, _ in TOOLS}


def cards(processes: Processes) -> list[str]:
    """Returns name, driver and memory of each card, as nvidia-smi prints them."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader"]
    ended = processes.run(query, 10)
    return ended.output.strip().splitlines() if ended.code == 0 else []


def c_library() -> str:
    """Returns the version of the GNU C library, such as `2.34`; empty if there is another one."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")[2]
    except (ValueError, OSError):
        return ""


def older(found: str, needed: str) -> bool:
    """Returns whether a version is older than the needed one."""
    first, second = ([int(number) for number in re.findall(r"\d+", text)] for text in (found, needed))
    return first < second


def describe(processes: Processes) -> dict[str, Any]:
    """Returns what the machine has; prepares the environment of `processes`."""
    return {
        "cards": cards(processes),
        "glibc": c_library(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "modules": modules(),
        "libraries": libraries(processes),
        "tools": tools(processes),
        "cores": os.cpu_count(),
    }


def missing(found: dict[str, Any], device: str) -> list[tuple[str, str]]:
    """Returns what is missing for a device, each with what does not run without it."""
    lacks = [(f"{name} (Python module)", why) for name, why in MODULES if not found["modules"][name]]
    if device == "cuda":
        lacks += [(f"{name} ({file})", why) for name, file, why in LIBRARIES if not found["libraries"][name]]
        lacks += [(name, why) for name, why in TOOLS if not found["tools"][name]]
    return lacks


def needed_c_library(bundle: pathlib.Path) -> str:
    """Returns the version of the C library that the programs of the bundle need."""
    try:
        found = re.search(r"glibc (\d+\.\d+) or newer", (bundle / "bundle.txt").read_text())
    except OSError:
        return ""
    return found.group(1) if found else ""
