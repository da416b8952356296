#!/usr/bin/env python3
"""record.py: what an image consists of, where it is from, and whether a file is that image."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def docker_manifest(layout: Path, name: str) -> None:
    """Add to the OCI layout in the folder `layout`, which holds one image, the manifest.json by which docker load finds it."""
    blobs = layout / "blobs"
    index = json.loads((layout / "index.json").read_text())
    manifest = json.loads((blobs / index["manifests"][0]["digest"].replace(":", "/")).read_text())
    paths = [f"blobs/{part['digest'].replace(':', '/')}" for part in (manifest["config"], *manifest["layers"])]
    (layout / "manifest.json").write_text(json.dumps([{"Config": paths[0], "RepoTags": [name], "Layers": paths[1:]}]))


if __name__ == "__main__":
    docker_manifest(Path(sys.argv[2]), sys.argv[3])
