"""Files and folders: complete or not there, verified, and without secrets."""
