"""Processes as torchrun starts them, for tests. What takes long to import is imported once and forked."""

import contextlib
import multiprocessing
import os
import socket
from pathlib import Path

import torch

from car_spec import accelerate
from car_spec.chain import DiffusionChain
from car_spec.cli import main
from car_spec.parallel import RankError, Shares, started_by_torchrun

PATIENCE = 120  # seconds until a run counts as hung


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def fail_in_a_call(how: str) -> None:
    """Rank 1's network fails in the middle of a sample."""
    predict, calls = DiffusionChain.predict, iter(range(5))

    def failing(self, *args):
        if next(calls, None) is None:
            if how == "killed":
                os._exit(9)
            raise ValueError("no memory left on this device")
        return predict(self, *args)

    DiffusionChain.predict = failing  # the process is ours alone


def share_images(pipeline: Path, seeds: tuple[int, ...] | None, out: Path) -> int:
    """Two images of a DDPMPipeline, each call cut into two shares, saved by every rank. seeds: of each rank; None: none is given."""
    from diffusers import DDPMPipeline

    try:
        with started_by_torchrun(torch.device("cpu")) as ranks:
            fast = accelerate(DDPMPipeline.from_pretrained(pipeline), window=6, shares=Shares(ranks, 2))
            generator = None if seeds is None else torch.Generator().manual_seed(seeds[ranks.rank])
            torch.save(fast(2, generator, 12, "pt").images, out.with_name(f"{out.name}.{ranks.rank}.pth"))
    except RankError as error:
        print(error)
        return 2
    return 0


def run_rank(rank: int, world: int, runs, folder: Path) -> None:
    """A process as torchrun starts it, for several runs in turn.

    `runs`: (name, flags of each rank or of all, or what to call instead, port, how rank 1 fails).
    """
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    predict = DiffusionChain.predict
    for name, flags, port, failure in runs:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        DiffusionChain.predict = predict
        if failure and rank == 1:
            fail_in_a_call(failure)
        with open(folder / f"{name}.{rank}", "w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            code = flags() if callable(flags) else main(flags[rank] if isinstance(flags[0], list) else flags)
            print(f"exit code {code}")


def start(world: int, runs, folder: Path) -> None:
    """Raises where a process is still running after PATIENCE seconds."""
    runs = [(name, flags, free_port(), *failure) if failure else (name, flags, free_port(), None) for name, flags, *failure in runs]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["processes", "timm.models.vision_transformer", "diffusers.models.autoencoders.autoencoder_kl"])
    processes = [context.Process(target=run_rank, args=(rank, world, runs, folder)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
    hung = [process for process in processes if process.is_alive()]
    for process in hung:
        process.kill()
    assert not hung, "".join(path.read_text() for path in folder.glob("*.[0-9]"))
