"""JupyterLab's copy of each file as it was when it was opened or saved, for hpctrain jupyter."""

import hashlib
import os
from pathlib import Path

from jupyter_server.services.contents.filecheckpoints import AsyncFileCheckpoints


class PrivateCheckpoints(AsyncFileCheckpoints):
    """Keeps them in the private folder of the server, because Jupyter follows links when it copies a file."""

    def checkpoint_path(self, checkpoint_id: str, path: str) -> str:
        """The name of a copy. `path` of a file is below the folder of the server."""
        folder = Path(os.environ["JUPYTER_RUNTIME_DIR"]) / "checkpoints"
        folder.mkdir(exist_ok=True)
        return str(folder / hashlib.sha256(f"{path.strip('/')} {checkpoint_id}".encode()).hexdigest())
