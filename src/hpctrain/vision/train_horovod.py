"""Train on MNIST, or on digits, by Horovod: the same model, data and order as train_ddp.

In the image, which has Horovod. One node with 4 ranks, by torchrun or by horovodrun:

    torchrun --nproc-per-node 4 -m hpctrain train_horovod
    MASTER_ADDR=localhost MASTER_PORT=29500 horovodrun -np 4 hpctrain train_horovod

Two nodes with 2 ranks each, by Slurm:

    sbatch launch/apptainer_ddp.sh train_horovod --fp16-allreduce

Horovod's ranks meet by Gloo, whatever the launcher, and need no MPI; HOROVOD_CONTROLLER=mpi before mpirun lets them meet by
MPI, and sum by it on CPUs, which --use-adasum needs. Tensors that are ready at the same time are summed in one go:
HOROVOD_FUSION_THRESHOLD=0 turns that off, and then the weights are equal bit for bit from run to run.
"""

import argparse
import os
import platform
import socket
import time
from functools import partial
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from hpctrain.run import Run, positive
from hpctrain.vision import data, recipe
from hpctrain.world import HpctrainError, UsageError, World, all_or_none, choose_device, gather, main_address, process_group


def main(world: World, arguments: list[str]) -> None:
    """Train as the flags at the foot of this file say."""
    args = parse(arguments, world)
    device = choose_device(world, args.device)
    # The process group serves the run folder and errors; on CPUs even so: two sets of NCCL would be in each other's way.
    with process_group(world, torch.device("cpu")):
        hvd = join(world)
        with all_or_none(world):
            train, test = data.load(args.data)
        sub_batches = args.batches_per_allreduce
        batch_size = args.batch_size * sub_batches
        steps = data.steps_per_epoch(len(train), batch_size, world)
        run = Run(world, "train_horovod", args, device)

        model = recipe.build(args, device)
        side = recipe.RECIPES[args.model].side
        optimizer = hvd.DistributedOptimizer(
            recipe.optimizer(args, model.parameters()),
            named_parameters=model.named_parameters(),
            compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
            backward_passes_per_step=sub_batches,
            op=hvd.Adasum if args.use_adasum else hvd.Average,
            gradient_predivide_factor=args.gradient_predivide_factor,
        )
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16")

        first_epoch = 1
        if state := run.resume(device, args.epochs):
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            first_epoch = state["epoch"] + 1
            # At a fresh start there is no state, and this would take a step to make one: Adam would count it.
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)

        log_every = -(-steps // 5)
        for epoch in range(first_epoch, args.epochs + 1):
            model.train()
            run.start_epoch(epoch, steps)
            loss_sum, since = torch.zeros((), device=device), time.perf_counter()
            for step, index in enumerate(data.batches(len(train), batch_size, args.seed, epoch, world), 1):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate((epoch - 1) * steps + step - 1, steps, world, args)
                optimizer.zero_grad()
                for part in index.chunk(sub_batches):
                    images, labels = train.batch(part, device, side)
                    with autocast:
                        loss = cross_entropy(model(images), labels) / sub_batches
                    loss.backward()  # the last one begins to average the gradients over the ranks
                    loss_sum += loss.detach()
                optimizer.step()  # waits for the averages
                run.step()

                if step % log_every == 0:
                    mean = total(hvd, loss_sum, "train").item() / (log_every * world.size)
                    now = time.perf_counter()
                    speed = log_every * batch_size / (now - since)
                    run.metrics(epoch=epoch, step=(epoch - 1) * steps + step, train_loss=mean, examples_per_s=speed)
                    loss_sum, since = torch.zeros((), device=device), now
            run.end_epoch()

            # batch normalisation's, of rank 0; so the metrics are of what is saved
            hvd.broadcast_parameters(dict(model.named_buffers()), root_rank=0)
            with autocast:
                test_loss, test_accuracy = recipe.evaluate(model, test, args, world, device, partial(total, hvd, name="test"))
            run.metrics(epoch=epoch, step=epoch * steps, test_loss=test_loss, test_accuracy=test_accuracy)
            run.save(epoch, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        run.finish(model, test_loss=test_loss, test_accuracy=test_accuracy)
        hvd.shutdown()
        gather(world, None)  # rank 0 keeps the server until all have said good-bye


def learning_rate(step: int, steps: int, world: World, args: argparse.Namespace) -> float:
    """The learning rate of a step, counted from 0 over the whole training of `steps` steps an epoch.

    It climbs evenly over the steps of the first --warmup-epochs, from --lr / size to --lr, and decays each epoch after that.
    """
    climb = args.warmup_epochs * steps
    if step < climb:
        first = args.lr / world.size
        return first + (args.lr - first) * step / climb
    return args.lr * args.lr_decay ** (step // steps - args.warmup_epochs)


def total(hvd: ModuleType, value: Tensor, name: str) -> Tensor:
    """The sum of a tensor over all ranks."""
    return hvd.allreduce(value, op=hvd.Sum, name=name)


def join(world: World) -> ModuleType:
    """Horovod, initialised with the ranks of `world`; a collective call. Raises HpctrainError
    where it is not installed, or sees another world than the launcher's.

    Horovod learns its ranks from horovodrun or from MPI. Under any other launcher they are given to it here, and rank 0
    runs the server by which the ranks find each other, as horovodrun would: then neither MPI nor PMI is needed.
    """
    launched = world.launcher == "horovodrun" or "HOROVOD_CONTROLLER" in os.environ
    with all_or_none(world):
        try:
            import horovod.torch as hvd
            from horovod.runner.common.util.hosts import SlotInfo
            from horovod.runner.gloo_run import create_slot_env_vars
            from horovod.runner.http.http_server import RendezvousServer
        except ImportError as error:
            raise HpctrainError(f"Horovod cannot be imported ({error}): it is in the image; run this in the container") from error
        address = ipv4(main_address()[0]) if world.size > 1 and not launched else None
    if launched:
        hvd.init()
        with all_or_none(world):
            if hvd.size() != world.size:
                raise HpctrainError(
                    f"{world.launcher} started {world.size} ranks, but to Horovod this is rank {hvd.rank()} of {hvd.size()}: the "
                    "launcher and the MPI library speak no common PMI; use launch/apptainer_mpi.sh, or unset HOROVOD_CONTROLLER"
                )
        return hvd

    places = gather(world, (platform.node(), world.local_rank, world.local_size))
    slots = []
    for rank, (host, local_rank, local_size) in enumerate(places):
        peers = [r for r, place in enumerate(places) if place[1] == local_rank]  # the ranks with this number on their nodes
        slots.append(SlotInfo(host, rank, local_rank, peers.index(rank), world.size, local_size, len(peers)))
    ours = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", **create_slot_env_vars(slots[world.rank])}
    if address:
        port = 0
        if world.rank == 0:
            server = RendezvousServer()
            port = server.start()
            server.init(slots)
        ours |= {"HOROVOD_GLOO_RENDEZVOUS_ADDR": address, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(gather(world, port)[0])}
    if "GLOO_SOCKET_IFNAME" in os.environ and "HOROVOD_GLOO_IFACE" not in os.environ:  # the network that PyTorch's Gloo takes
        ours["HOROVOD_GLOO_IFACE"] = os.environ["GLOO_SOCKET_IFNAME"]
    os.environ.update(ours)
    hvd.init()
    for name in ours:  # what this process starts is not to take itself for a rank of horovodrun
        del os.environ[name]
    return hvd


def ipv4(name: str) -> str:
    """The address of a host as Horovod's client wants it. Raises HpctrainError where it has none."""
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise HpctrainError(f"{name} has no IPv4 address ({error}), and Horovod knows no other: set MASTER_ADDR") from error


def parse(arguments: list[str], world: World) -> argparse.Namespace:
    """The flags of this trainer, and those of all vision trainers (recipe.py). Raises UsageError."""
    parser = recipe.vision_parser("train_horovod", "Train on MNIST or digits by Horovod, on any number of ranks.")
    add = parser.add_argument
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="(default: a GPU where there is one)")
    add("--fp16-allreduce", action="store_true", help="send the gradients as 16-bit floats")
    add(
        "--batches-per-allreduce", type=positive(int), default=1, metavar="N",
        help="an optimizer step takes N batches of --batch-size, one after the other, and one all-reduce (default: %(default)s)",
    )  # fmt: skip
    add("--use-adasum", action="store_true", help="add gradients by Adasum, in place of their average; needs MPI")
    add(
        "--gradient-predivide-factor", type=positive(float), default=1.0, metavar="F",
        help="divide gradients by F before they are summed, and by the number of ranks / F after (default: %(default)s)",
    )  # fmt: skip
    add("--warmup-epochs", type=int, default=0, metavar="N", help="climb to --lr from --lr / ranks (default: %(default)s)")
    args = recipe.parse(parser, arguments)
    if args.warmup_epochs < 0:
        raise UsageError(f"--warmup-epochs {args.warmup_epochs} is below zero")
    if args.use_adasum:
        if world.size > 1 and os.environ.get("HOROVOD_CONTROLLER") != "mpi":
            raise UsageError("--use-adasum needs MPI: start by mpirun (launch/apptainer_mpi.sh) with HOROVOD_CONTROLLER=mpi")
        if args.gradient_predivide_factor != 1:
            raise UsageError("--gradient-predivide-factor divides an average, and --use-adasum makes none: take one of the two")
        if world.size & (world.size - 1):
            raise UsageError(f"--use-adasum adds in pairs of pairs, but there are {world.size} ranks: take 2, 4, 8, 16, ...")
    return args
