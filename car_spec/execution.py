"""How the networks are run: as they are, compiled, or captured as CUDA graphs. Opt-in, and the values are the same up to rounding.

Weights have the dtype they were given (`--dtype`); what is decided from their output is computed in float32 by those who ask.
"""

import os
import platform
import shutil
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

COMPILERS = ("g++", "clang++", "c++", "cl")
MAX_CAPTURED = 4096  # rows; a larger call is no longer dominated by its launches


def machine(device: torch.device) -> dict[str, Any]:
    """What has to be equal for equal calls to give equal bits."""
    if device.type == "cuda":
        return {"device": torch.cuda.get_device_name(device)}
    return {"device": f"{device.type} ({platform.machine()})", "threads": torch.get_num_threads()}


def run_head(net: Any, x: torch.Tensor, modulations: torch.Tensor) -> torch.Tensor:
    """The blocks of a `DenoisingMLP`: x (..., W) after `input_proj`, and shifts, scales and gates of all its layers with LayerNorm's own
    weights folded in, modulations (..., (3 depth + 2) W) -> (..., 2 D).
    """
    shape = x.shape[-1:]
    *layers, shift, scale = modulations.split(shape[0], -1)
    for i, block in enumerate(net.res_blocks):
        block_shift, block_scale, gate = layers[3 * i : 3 * i + 3]
        h = torch.addcmul(block_shift, F.layer_norm(x, shape, eps=block.in_ln.eps), block_scale)
        x = torch.addcmul(x, gate, block.mlp(h))
    final = net.final_layer
    h = torch.addcmul(shift, F.layer_norm(x, shape, eps=final.norm_final.eps), scale)
    return final.linear(h)


class Execution:
    """compile: torch.compile of the head and of the backbone's blocks. cuda_graphs: calls of the head at one step a row replay a graph."""

    def __init__(self, compile: bool = False, cuda_graphs: bool = False):
        self.compile, self.cuda_graphs = compile, cuda_graphs
        run = torch.compile(run_head, dynamic=True) if compile else run_head
        self.run_head = CapturedHead(run) if cuda_graphs else run

    def check(self, device: torch.device) -> None:
        """Raise ValueError where the device cannot do what is asked, before anything is loaded."""
        if self.cuda_graphs and device.type != "cuda":
            raise ValueError(f"--cuda-graphs needs a CUDA device, but --device is {device}")
        if self.compile and not any(shutil.which(name) for name in (os.environ.get("CXX"), *COMPILERS) if name):
            raise ValueError(f"--compile needs a C++ compiler, but none of {', '.join(COMPILERS)} is on the PATH")

    def prepare(self, model: Any) -> None:
        """Compile the blocks of a backbone, in place. Padded prefixes of MAR go round the encoder's: they run its blocks by their parts."""
        if self.compile:
            backbone = getattr(model, "mar", model)  # Harmon's is a MAR
            for block in (*backbone.encoder_blocks, *backbone.decoder_blocks):
                block.compile(dynamic=True)


class _Capture(NamedTuple):
    graph: Any
    x: torch.Tensor  # (R, W) static inputs
    modulations: torch.Tensor  # (R, F)
    out: torch.Tensor  # (R, 2 D)


class CapturedHead:
    """`run_head` for few rows, replayed as a CUDA graph: a small call costs its launches, and a graph has one.

    A graph has fixed shapes and addresses, so rows are padded to a power of two and copied. One graph a size and set of weights.
    """

    def __init__(self, run: Any):
        self.run = run
        self.captures: dict[tuple, _Capture] = {}

    def __call__(self, net: Any, x: torch.Tensor, modulations: torch.Tensor) -> torch.Tensor:
        if x.dim() != 2 or not 0 < len(x) <= MAX_CAPTURED:
            return self.run(net, x, modulations)
        size = 1 << (len(x) - 1).bit_length()
        key = (net.final_layer.linear.weight.data_ptr(), size, x.dtype)
        if key not in self.captures:
            self.captures[key] = self._capture(net, x, modulations, size)
        capture = self.captures[key]
        capture.x[: len(x)].copy_(x)
        capture.modulations[: len(x)].copy_(modulations)
        capture.graph.replay()
        return capture.out[: len(x)].clone()

    def _capture(self, net: Any, x: torch.Tensor, modulations: torch.Tensor, size: int) -> _Capture:
        static = (x.new_zeros(size, x.shape[1]), modulations.new_zeros(size, modulations.shape[1]))
        stream = torch.cuda.Stream(x.device)
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):  # what libraries set up in a first call must not be captured
            for _ in range(3):
                self.run(net, *static)
        torch.cuda.current_stream(x.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.run(net, *static)
        return _Capture(graph, *static, out)
