"""Ranks and the processes they run in: launchers, the process group, devices, and how a rank ends."""
