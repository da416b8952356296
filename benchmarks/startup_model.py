"""A model of the time from sbatch to the first step on many nodes, from measured pieces and a site's figures.

    python benchmarks/startup_model.py
    python benchmarks/startup_model.py --image-mb 3057 --read-mb 700 --file-system 100 --link 25

benchmarks/scale.md has the table of the defaults, and says which of them are measured and which are
assumed.
"""

import argparse
import math

# Seconds of `ezpz yeet` (a tarball of an environment copied to all nodes) and until the first step after it,
# on Aurora: github.com/saforem2/ezpz, docs/cli/yeet.md, measured 2026-04-30 to 2026-05-01.
PUBLISHED = {8: (69.7, 29.3), 512: (174.5, 44.5), 4096: (750.6, 194.0)}


def levels(nodes: int, fanout: int) -> int:
    """The depth of Slurm's tree of messages, in which every node passes them on to `fanout` others."""
    depth, reached = 0, 0
    while reached < nodes:
        depth += 1
        reached += fanout**depth
    return depth


def read_seconds(nodes: int, args: argparse.Namespace) -> float:
    """Every node reads the parts of the image that it needs, once, because its ranks share a mount."""
    return max(args.read_mb / args.node, nodes * args.read_mb / args.file_system) / 1e3


def broadcast_seconds(nodes: int, args: argparse.Namespace) -> float:
    """sbcast sends the image in blocks, and the next block when all nodes have written the last one."""
    blocks = math.ceil(args.image_mb / args.block_mb)
    # On each level a node sends the block to all nodes below it over one link, and writes it.
    seconds = args.block_mb / 1e3 * (min(nodes, args.fanout) / args.link + 1 / args.disk)
    return args.image_mb / 1e3 / args.node + blocks * (
        levels(nodes, args.fanout) * (seconds + args.latency_ms / 1e3)
    )


def main() -> None:
    """Print a row of the table for each number of nodes."""
    parser = argparse.ArgumentParser(
        description="Model the time from sbatch to the first step on many nodes."
    )
    add = parser.add_argument
    add("--nodes", default="8,512,4096", help="numbers of nodes (default: %(default)s)")
    add("--ranks-per-node", type=int, default=4, help="(default: %(default)s)")
    add("--image-mb", type=float, default=570, help="size of the SIF (default: %(default)s, the cpu image)")
    add(
        "--read-mb",
        type=float,
        default=111,
        help="of it, what a node reads in a short run (default: %(default)s)",
    )
    add(
        "--file-system",
        type=float,
        default=20,
        help="GB/s at which all nodes together read one file (default: %(default)s)",
    )
    add("--node", type=float, default=2, help="GB/s at which one node reads it (default: %(default)s)")
    add("--link", type=float, default=1.25, help="GB/s of the network that Slurm uses (default: %(default)s)")
    add(
        "--disk",
        type=float,
        default=1,
        help="GB/s at which a node writes to its own disk (default: %(default)s)",
    )
    add("--fanout", type=int, default=16, help="Slurm's TreeWidth (default: %(default)s)")
    add("--block-mb", type=float, default=8, help="block of sbcast (default: %(default)s)")
    add(
        "--latency-ms",
        type=float,
        default=1,
        help="for a message from one level to the next (default: %(default)s)",
    )
    add(
        "--rank-ms",
        type=float,
        default=0.15,
        help="rank 0 needs for each rank at the rendezvous (default: %(default)s)",
    )
    add(
        "--fixed",
        type=float,
        default=4.5,
        help="seconds that do not depend on the number of nodes (default: %(default)s)",
    )
    args = parser.parse_args()
    print(
        "| nodes | ranks | read the image | broadcast it | rendezvous | first step "
        "| with --broadcast | ezpz |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for nodes in map(int, args.nodes.split(",")):
        ranks = nodes * args.ranks_per_node
        read, sent, joined = (
            read_seconds(nodes, args),
            broadcast_seconds(nodes, args),
            ranks * args.rank_ms / 1e3,
        )
        local = args.read_mb / 1e3 / args.disk
        published = "{:.0f} + {:.0f} s".format(*PUBLISHED[nodes]) if nodes in PUBLISHED else ""
        figures = (read, sent, joined, args.fixed + read + joined, args.fixed + sent + local + joined)
        print(
            f"| {nodes:,} | {ranks:,} | "
            + " | ".join(f"{seconds:.1f} s" for seconds in figures)
            + f" | {published} |"
        )


if __name__ == "__main__":
    main()
