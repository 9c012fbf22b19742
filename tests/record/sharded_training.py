"""Training in two processes, with and without a watch: what each way of sharding leaves behind. Run by test_sharded."""

import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 3
STEPS = 4
MEASURES = ("loss", "shares", "kernel", "richness")


def network() -> nn.Module:
    """Batch norm has buffers, dropout draws; one weight is used twice."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8),
        nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip
    model[6].weight = model[4].weight
    return model


def fully_sharded() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = network(), init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))


def tensor_parallel() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(small(), init_device_mesh("cpu", (2,)), plan)


def local(tensor):
    return tensor.to_local().clone() if hasattr(tensor, "to_local") else tensor.detach().clone()


def train(make, out, attached=False, optimizer=torch.optim.AdamW, **options):
    """What a rank has after training: its parameters, buffers, gradients, momenta and random stream."""
    import gramscope as gs

    model = make()
    optimizer = optimizer(model.parameters(), lr=0.05)
    scope = None
    if out is not None:
        options = {"every": 2, "overhead": None, "on_error": "raise", "measures": MEASURES} | options
        scope = gs.watch(model, (X, Y), out, **options)
        scope = scope.attach(optimizer) if attached else scope
    torch.manual_seed(5)
    for step in range(STEPS):
        optimizer.zero_grad()
        some = slice(4 * step, 4 * step + 4)
        loss = F.cross_entropy(model(X[some]), Y[some])
        loss.backward()
        optimizer.step()
        if scope is not None and not attached:
            scope.step(loss=loss)
    if scope is not None:
        scope.close()
    state = {
        "parameters": [local(p) for p in model.parameters()],
        "gradients": [local(p.grad) for p in model.parameters()],
        "buffers": [b.clone() for b in model.buffers()],
        "momenta": [local(v) for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)],
        "stream": [torch.get_rng_state()],
    }
    return state, scope


def same(one, two) -> bool:
    return one.keys() == two.keys() and all(
        len(one[key]) == len(two[key]) and all(map(torch.equal, one[key], two[key])) for key in one
    )


def accelerated(out):
    """The same under accelerate, which wraps model and optimiser for two processes."""
    from accelerate import Accelerator

    import gramscope as gs

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(network())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.05))
    scope = None
    if out is not None:
        scope = gs.watch(model, (X, Y), out, every=2, overhead=None, on_error="raise", measures=MEASURES).attach(
            optimizer
        )
    torch.manual_seed(5 + accelerator.process_index)
    for step in range(STEPS):
        optimizer.zero_grad()
        start = 4 * step + 2 * accelerator.process_index
        accelerator.backward(F.cross_entropy(model(X[start : start + 2]), Y[start : start + 2]))
        optimizer.step()
    if scope is not None:
        scope.close()
    parameters = [p.detach().clone() for p in model.parameters()]
    return {
        "parameters": parameters,
        "buffers": [b.clone() for b in model.buffers()],
        "stream": [torch.get_rng_state()],
    }


def refused(error_of) -> str:
    """The message of the error that this rank raises, or ""."""
    try:
        error_of()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals(folder, rank):
    from torch.distributed.fsdp import FullyShardedDataParallel

    import gramscope as gs
    from gramscope.record import sharded

    flat = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    model = fully_sharded()
    (folder / "taken").write_text("a file, which is no folder for a run: rank 0 alone can tell")
    found = {
        "flat": refused(lambda: gs.watch(flat, (X, Y))),
        "rank 0's": refused(lambda: gs.watch(model, (X, Y), folder / "taken")),
        "probe": refused(lambda: gs.watch(model, (X[:, :5], Y))),
    }
    sharded.PATIENCE = 1.0
    if rank == 0:
        found["alone"] = refused(lambda: gs.watch(model, (X, Y)))
    else:
        next(sharded._numbers)
    dist.barrier()
    sharded.PATIENCE = 60.0
    scope = gs.watch(model, (X, Y), every=1, overhead=None)
    sharded.PATIENCE = 1.0
    if rank == 0:  # steps that the other rank does not take part in
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            scope.step()
            scope.step()
            scope.close()
        found["left alone"] = " | ".join(str(w.message) for w in said)
        found["records"] = [record["step"] for record in scope.records]
    dist.barrier()
    return found


CASES = {
    "FSDP2": lambda folder, rank: pair(fully_sharded, folder),
    "FSDP2, attached": lambda folder, rank: pair(fully_sharded, folder, attached=True, optimizer=torch.optim.SGD),
    "FSDP2, closed": lambda folder, rank: pair(fully_sharded, folder, every=3),
    "tensor parallel": lambda folder, rank: pair(tensor_parallel, folder),
    "accelerate": lambda folder, rank: {"same": same(accelerated(None), accelerated(folder / "run"))},
    "refusals": refusals,
}


def pair(make, folder, **options):
    """Trained without and with a watch; and the records."""
    without, _ = train(make, None, **options)
    watched, scope = train(make, folder / "run", **options)
    return {"same": same(without, watched), "records": scope.records, "count": scope.count}


def run(rank, cases, folder, port):
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for name in cases:
        (Path(folder) / name).mkdir(exist_ok=True)
        dist.barrier()
        torch.save(CASES[name](Path(folder) / name, rank), Path(folder) / f"{name} {rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
