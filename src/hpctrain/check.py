"""hpctrain check: does every rank run where it should, with the same software, and do they reach each other?

Run it by the same script as the long job that comes after it:

    sbatch launch/apptainer_ddp.sh check
"""

import argparse
import os
import platform
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.run import Parser, versions
from hpctrain.world import HpctrainError, World, all_or_none, choose_device, gather, process_group


def main(world: World, arguments: list[str]) -> None:
    """Print a line for each rank, verify one all-reduce; raises HpctrainError if anything is off."""
    args = parse(arguments)
    device = choose_device(world, args.device)
    with process_group(world, device):
        reports = gather(world, report(world, device))
        if world.rank == 0:
            for line in reports:
                print(
                    f"rank {line['rank']} of {line['size']}  node {line['node_rank']} of {line['nodes']}  "
                    f"local {line['local_rank']} of {line['local_size']}  {line['host']}  {line['device']}  "
                    + "  ".join(f"{name} {version}" for name, version in line["versions"].items())
                )
        with all_or_none(world):
            compare(reports)
            all_reduce(world, device)
        if world.rank == 0:
            nodes = len({line["host"] for line in reports})
            print(f"check passed: {world.size} ranks on {nodes} hosts ({world.launcher}), all-reduce right on {device.type}")


def report(world: World, device: torch.device) -> dict[str, Any]:
    """What this rank has to say of itself."""
    name = (
        f"cuda:{device.index} {torch.cuda.get_device_name(device)}"
        if device.type == "cuda"
        else f"cpu x{torch.get_num_threads()}"
    )
    return {**asdict(world), "host": platform.node(), "device": name, "pid": os.getpid(), "versions": versions()}


def compare(reports: list[dict[str, Any]]) -> None:
    """Raise HpctrainError where the reports of the ranks do not fit together."""
    first = reports[0]
    for line in reports[1:]:
        for name, version in line["versions"].items():
            if version != first["versions"].get(name):
                raise HpctrainError(
                    f"rank {line['rank']} on {line['host']} has {name} {version}, rank 0 on {first['host']} has "
                    f"{first['versions'].get(name)}: every node must run the same image or environment"
                )
    places = [(line["host"], line["local_rank"]) for line in reports]
    for rank, place in enumerate(places):
        if place in places[:rank]:
            raise HpctrainError(
                f"ranks {places.index(place)} and {rank} both have local rank {place[1]} on {place[0]}: "
                "they would share a GPU; start one task per GPU (--ntasks-per-node)"
            )


def all_reduce(world: World, device: torch.device) -> None:
    """Sum rank + 1 over a million floats on every rank; raises HpctrainError where the sum is wrong."""
    values = torch.full((1_000_000,), world.rank + 1.0, device=device)
    if world.size > 1:
        dist.all_reduce(values)
    expected = world.size * (world.size + 1) / 2
    if not bool((values == expected).all()):
        raise HpctrainError(f"the all-reduce gave {values[0].item()} where {expected} is right: do not train on these nodes")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags of this command."""
    parser = Parser(prog="hpctrain check", description="Check ranks, versions and one all-reduce.")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="(default: a GPU where there is one)")
    return parser.parse_args(arguments)
