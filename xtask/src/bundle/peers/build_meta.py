"""Stands in for the build backend of the packages that `cargo xtask gpu-peers` downloads, as module `setuptools.build_meta`.

pip asks the backend of a source package for its name and version. The real ones import PyTorch to answer.
"""

import email
import pathlib


def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = email.message_from_string(pathlib.Path("PKG-INFO").read_text())
    # FlashInfer's package has another name than it is published under.
    name = {"flashinfer": "flashinfer-python"}.get(info["Name"], info["Name"])
    made = pathlib.Path(folder, f"{name.replace('-', '_')}-{info['Version']}.dist-info")
    made.mkdir()
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {info['Version']}\n")
    return made.name
