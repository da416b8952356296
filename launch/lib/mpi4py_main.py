"""python -m mpi4py, for launch/lib/launchers/mpi.sh and mpirun.sh: a rank that raises ends the job.

`python -m` would look for mpi4py in the current folder first, in which others may write.
This runs in any image, so it imports nothing of hpctrain.
"""

import sys

from mpi4py.run import main

if __name__ == "__main__":
    if sys.argv[1] == "-m":
        sys.path[0] = ""  # as python -m MODULE; for a script main() takes its folder
    main()
