"""Compiled and captured networks: opt-in, refused where they cannot be, and equal up to rounding."""

import pytest
import torch

from car_spec.adapters.mar import MARAdapter
from car_spec.chain import HoistedHead
from car_spec.cli import main
from car_spec.execution import MAX_CAPTURED, CapturedHead, Execution, run_head
from car_spec.schedule import cosine_schedule


def test_nothing_is_compiled_or_captured_unless_asked(tiny_pipeline):
    assert tiny_pipeline.execution.run_head is run_head
    assert MARAdapter(tiny_pipeline.model).head.run is run_head


def test_the_flag_compiles_the_head_and_the_blocks(tiny_pipeline, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled.append((function, options)) or function)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: compiled.append((self, options)))
    tiny_pipeline.set_execution(Execution(compile=True))
    blocks = [*tiny_pipeline.model.encoder_blocks, *tiny_pipeline.model.decoder_blocks]
    assert [function for function, _ in compiled] == [run_head, *blocks]
    assert all(options == {"dynamic": True} for _, options in compiled)
    assert tiny_pipeline._adapter(tiny_pipeline.settings(), None).head.run is tiny_pipeline.execution.run_head


@pytest.mark.slow
@pytest.mark.parametrize("guidance_scale", [1.0, 2.0])
def test_compiled_networks_say_the_same(tiny_pipeline, guidance_scale):
    sample = lambda: (
        tiny_pipeline(
            [1, 2], guidance_scale=guidance_scale, sampler="sequential", generator=torch.Generator().manual_seed(0), output_type="latent"
        ).images
    )
    eager = sample()
    tiny_pipeline.set_execution(Execution(compile=True))
    torch.testing.assert_close(sample(), eager, atol=1e-3, rtol=1e-3)


def test_what_the_machine_cannot_do_is_refused_before_the_model_is_read(tmp_path, capsys, monkeypatch):
    flags = ["generate", "--model", str(tmp_path / "absent.pth"), "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert main([*flags, "--cuda-graphs"]) == 2
    assert "--cuda-graphs needs a CUDA device, but --device is cpu" in capsys.readouterr().err
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert main([*flags, "--compile"]) == 2
    assert "--compile needs a C++ compiler, but none of g++" in capsys.readouterr().err


class _Recorded:
    """In the place of a capture: the graph's replay evaluates the function on the static inputs again."""

    def __init__(self, head):
        self.head, self.captures = head, []

    def __call__(self, net, x, modulations, size):
        from car_spec.execution import _Capture

        static = (x.new_zeros(size, x.shape[1]), modulations.new_zeros(size, modulations.shape[1]))
        out = self.head.run(net, *static)
        graph = type("Graph", (), {"replay": lambda _: out.copy_(self.head.run(net, *static))})()
        self.captures.append(size)
        return _Capture(graph, *static, out)


def test_small_calls_are_padded_to_a_captured_size_and_large_ones_run_plainly(golden_mar):
    """All but the capture itself, which needs a GPU."""
    captured, g = CapturedHead(run_head), torch.Generator().manual_seed(0)
    captured._capture = record = _Recorded(captured)
    plain, head = (HoistedHead(golden_mar.diffloss.net, cosine_schedule(8), run=run) for run in (run_head, captured))
    previous = None
    for rows in (1, 2, 3, 4, 7, 3, MAX_CAPTURED + 1):
        x, modulations = torch.randn(rows, 32, generator=g), torch.randn(rows, 8 * 32, generator=g)
        out = head(x, modulations)
        torch.testing.assert_close(out, plain(x, modulations), atol=2e-5, rtol=1e-4)
        assert previous is None or torch.equal(*previous)  # a later replay does not overwrite what was handed out
        previous = (out, out.clone())
    assert record.captures == [1, 2, 4, 8]
    grid = torch.randn(2, 3, 32, generator=g), torch.randn(2, 3, 8 * 32, generator=g)
    assert torch.equal(head(*grid), plain(*grid)) and record.captures == [1, 2, 4, 8]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_replayed_graphs_say_what_plain_calls_say(golden_mar):
    import copy

    net, captured = copy.deepcopy(golden_mar.diffloss.net).cuda(), CapturedHead(run_head)
    for rows in (1, 3, 8, 3):
        x, modulations = torch.randn(rows, 32, device="cuda"), torch.randn(rows, 8 * 32, device="cuda")
        torch.testing.assert_close(captured(net, x, modulations), run_head(net, x, modulations), atol=2e-5, rtol=1e-4)
