"""A training loop of your own that goes on after its time limit: plain PyTorch, and 19 lines marked with
"requeue".

sbatch launch/apptainer_ddp.sh examples/requeue/train.py 3000
"""

import gc
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

steps = int(sys.argv[1])
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
inputs = torch.randn(64, 8)
targets = inputs.sum(1, keepdim=True)

control = Path(os.environ.get("HPCTRAIN_CONTROL", "none"))  # requeue: a folder of the first node
# requeue: the number of the job stays the same
checkpoint = Path(f"runs/example-{os.environ['HPCTRAIN_JOB']}.pt")
first = 0
if checkpoint.exists():  # requeue
    state = torch.load(checkpoint)  # requeue
    model.load_state_dict(state["model"])  # requeue
    optimizer.load_state_dict(state["optimizer"])  # requeue
    first = state["step"]  # requeue
    print(f"rank {rank} continues at step {first}", flush=True)

for step in range(first, steps):
    loss = nn.functional.mse_loss(model(inputs[rank::size]), targets[rank::size])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step} loss {loss.item():.6f}", flush=True)
        stop = torch.tensor(int((control / "stop").exists()))  # requeue
        dist.all_reduce(stop)  # requeue: all ranks stop at the same step
        if stop:  # requeue
            if rank == 0:  # requeue
                # requeue
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                checkpoint.parent.mkdir(exist_ok=True)  # requeue
                torch.save(state, checkpoint)  # requeue
            dist.barrier()  # requeue
            if control.is_dir():  # requeue: rank 0 may be on another node
                (control / "saved").touch()  # requeue: a checkpoint of this attempt is complete
                (control / "stopped").touch()  # requeue: this program has work left
            break  # requeue
else:
    print(f"rank {rank} of {size} finished with loss {loss.item():.6f}", flush=True)

del model  # see docs/guides/scripts.md
gc.collect()
dist.destroy_process_group()
