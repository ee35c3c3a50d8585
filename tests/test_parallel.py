"""Several processes write the same files as one, and stop together."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import golden_json
from processes import PATIENCE, start

import car_spec
from car_spec.adapters.harmon import HarmonAdapter
from car_spec.adapters.mar import MARAdapter
from car_spec.adapters.xar import XARAdapter
from car_spec.cli import main
from car_spec.models.harmon import pad_right
from car_spec.models.xar import XAR, XARConfig
from car_spec.parallel import RankError, Ranks, Shares, groups_of
from car_spec.trace import Trace

NETWORK = dict(atol=2e-5, rtol=1e-5)  # one float32 pass, calls of another size


def generate(model, out, *flags):
    return ["generate", "--model", str(model), "--out", str(out), "--num-iter", "4", "--num-inference-steps", "6", *map(str, flags)]


def images(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("0*.png")}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny file as we ship them, made once for all runs."""
    import conftest
    from safetensors.torch import save_file

    from car_spec.models.loading import METADATA_KEY
    from car_spec.models.mar import MAR

    folder = tmp_path_factory.mktemp("model")
    conftest.tiny_vae.__wrapped__().save_pretrained(folder / "vae")
    generator, network = torch.Generator().manual_seed(0), MAR(conftest.TINY)
    state = {name: torch.randn(value.shape, generator=generator) * 0.1 for name, value in network.state_dict().items()}
    metadata = {"num_heads": 4, "clip_sample_range": 3.0, "preset": {"name": "tiny", "num_heads": 4, "num_iter": 4}}
    save_file(state, folder / "tiny.safetensors", {METADATA_KEY: json.dumps(metadata)})
    return folder / "tiny.safetensors"


@pytest.fixture(scope="module")
def two(model, tmp_path_factory):
    """Runs of two processes: the folder they wrote into, with a log for each run and rank."""
    folder = tmp_path_factory.mktemp("two")
    make = lambda name, *flags: generate(model, folder / name, *flags)
    five = ["--num-images", 5, "--batch-size", 2]
    assert main([*make("resumed", "--num-images", 2, "--batch-size", 2)]) == 0
    runs = [
        ("images", make("images", *five)),
        ("resumed", make("resumed", *five)),
        ("verification", make("verification", *five, "--parallel", "verification", "--guidance-scale", 2, "--verbose")),
        ("both", make("both", "--num-images", 3, "--parallel", "both")),
        ("idle", make("idle", "--num-images", 1)),
        ("few rows", make("few rows", "--num-images", 1, "--num-iter", 1, "--parallel", "verification")),
        ("other seeds", [make("other seeds", "--seed", rank) for rank in range(2)]),
        ("bad flag", make("bad flag", "--num-images", 0)),
        ("refused folder", make("images", *five, "--seed", 1)),
        ("failing", make("failing", *five, "--parallel", "verification"), "raises"),
        ("failing images", make("failing images", *five), "raises"),
        ("killed", make("killed", *five, "--parallel", "verification"), "killed"),
    ]
    start(2, runs, folder)
    return folder


def log(folder: Path, name: str, rank: int) -> str:
    return (folder / f"{name}.{rank}").read_text()


@pytest.mark.parametrize("name", ["images", "resumed"])
def test_two_processes_write_the_files_of_one(model, two, tmp_path, name):
    assert main(generate(model, tmp_path / "one", "--num-images", 5, "--batch-size", 2)) == 0
    assert images(two / name) == images(tmp_path / "one") and len(images(two / name)) == 5
    manifest, alone = (json.loads((folder / "manifest.json").read_text()) for folder in (two / name, tmp_path / "one"))
    assert manifest["images"] == alone["images"] and manifest["settings"] == alone["settings"]
    assert manifest["runs"][-1]["images"] == (5 if name == "images" else 3)  # the report counts the images of both processes
    assert log(two, name, 1).strip() == "exit code 0"  # one speaks for all


def test_a_shared_verification_writes_the_files_of_one_process_with_as_many_shares(model, two, tmp_path):
    flags = ["--num-images", 5, "--batch-size", 2, "--guidance-scale", 2, "--shares", 2]
    assert main(generate(model, tmp_path / "one", *flags)) == 0
    assert images(two / "verification") == images(tmp_path / "one") and len(images(tmp_path / "one")) == 5
    assert json.loads((tmp_path / "one" / "manifest.json").read_text())["settings"]["shares"] == 2


def test_a_shared_verification_reports_what_was_exchanged(two):
    took = json.loads((two / "verification" / "manifest.json").read_text())["runs"][0]
    assert took["processes a verification"] == 2 and took["bytes received a rank and round"] > 0
    head, prefixes = took["head rows of each rank"], took["prefixes of each rank"]
    assert sum(head) == pytest.approx(took["head rows an image"] * 5) and min(head) > 0.3 * sum(head)
    assert 2 * sum(prefixes) == pytest.approx(took["backbone rows an image"] * 5)  # both guidance halves of a prefix stay together
    assert "head rows of each rank: " + ", ".join(map(str, head)) in log(two, "verification", 0)


def test_both_shares_the_verification_where_there_is_one_batch(two):
    manifest = json.loads((two / "both" / "manifest.json").read_text())
    assert manifest["settings"]["shares"] == 2 and len(images(two / "both")) == 3
    assert len(manifest["runs"]) == 1 and manifest["runs"][0]["processes a verification"] == 2


def test_a_process_without_work_waits_and_is_told(two):
    assert len(images(two / "idle")) == 1
    assert "1 batches of --batch-size 16 leave 1 of 2 processes without work" in log(two, "idle", 0)
    assert len(images(two / "few rows")) == 1  # one prefix, no speculative row


def test_processes_with_other_settings_are_refused(two):
    assert "rank 1 has seed 1, rank 0 has 0: they cannot hold the same state" in log(two, "other seeds", 0)
    for name, sentence in (("bad flag", "--num-images 0 is below 1"), ("refused folder", "was made with seed 0, this run has 1")):
        for rank in range(2):
            assert sentence in log(two, name, rank) and "exit code 2" in log(two, name, rank)


@pytest.mark.parametrize("name", ["failing", "failing images"])
def test_a_failure_of_one_process_stops_all_with_its_message(two, name):
    assert "car-spec: error: rank 1: no memory left on this device" in log(two, name, 1)
    assert "car-spec: error: rank 0: rank 1 failed: no memory left on this device" in log(two, name, 0)
    assert all("exit code 2" in log(two, name, rank) for rank in range(2))


def test_a_killed_process_is_noticed(two):
    assert "car-spec: error: rank 0: another process is gone" in log(two, "killed", 0)
    assert "exit code 2" in log(two, "killed", 0) and "exit code" not in log(two, "killed", 1)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_torchrun_writes_the_same_files_with_two_and_four_processes(model, tmp_path, processes):
    flags = ["--num-images", 6, "--batch-size", 2, "--shares", 4, "--parallel", "verification"]
    assert main(generate(model, tmp_path / "one", *flags[:-2])) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(car_spec.__file__).parents[1])}
    ran = subprocess.run(
        [*torchrun, "-m", "car_spec.cli", *generate(model, tmp_path / "many", *flags)],
        env=environment,
        timeout=PATIENCE,
        capture_output=True,
    )
    assert ran.returncode == 0, ran.stderr.decode()
    assert images(tmp_path / "many") == images(tmp_path / "one") and len(images(tmp_path / "one")) == 6


# --- the parts


@pytest.mark.parametrize(
    "mode, ranks, batches, groups",
    [
        ("images", 4, 1, 4),
        ("verification", 4, 9, 1),
        ("both", 4, 1, 1),
        ("both", 4, 2, 2),
        ("both", 4, 3, 2),
        ("both", 4, 9, 4),
        ("both", 6, 5, 3),
        ("both", 1, 5, 1),
    ],
)
def test_ranks_form_as_many_groups_as_have_a_batch(mode, ranks, batches, groups):
    assert groups_of(mode, ranks, batches) == groups


def test_a_mode_that_does_not_exist_and_uneven_shares_are_refused():
    with pytest.raises(ValueError, match="parallel 'rows' is none of images, verification, both"):
        groups_of("rows", 2, 1)
    with pytest.raises(ValueError, match="--shares 3 cannot be divided among the 2 processes"):
        Shares(Ranks(size=2), 3)


def test_processes_whose_tokens_differ_stop():
    class Differing(Ranks):
        def gather_objects(self, value):
            return [value, {name: "0" * 16 for name in value}]

    with pytest.raises(RankError, match=r"^rank 1 has tokens with the digest 0{16}, rank 0 has [0-9a-f]{16}: they cannot hold"):
        Shares(Differing(size=2)).require_agreement(torch.ones(2, 3))
    Shares(Ranks()).require_agreement(torch.ones(2, 3))


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_shares_of_a_token_chain_say_what_the_whole_says(golden_mar, rows):
    adapter, g = MARAdapter(golden_mar, num_inference_steps=8), torch.Generator().manual_seed(0)
    shared = Shares(Ranks(), 3).adapter(adapter, trace := Trace(rows))
    z, scale = torch.randn(rows, 2, 32, generator=g), torch.rand(rows, generator=g) + 1
    whole, parts = adapter.chain(z, scale), shared.chain(z, scale)
    owner = torch.arange(rows).repeat_interleave(4)
    y, k = torch.randn(4 * rows, 4, generator=g), torch.arange(4 * rows) % 7
    grid = torch.randn(7, rows, 4, generator=g)
    for arguments in ((y, k, owner), (grid, torch.arange(7)[:, None]), (grid[0], 3)):
        for ours, expected in zip(parts(*arguments), whole(*arguments)):
            torch.testing.assert_close(ours, expected, **NETWORK)
    assert trace.exchange is not None and trace.exchange.rows == [4 * rows + 7 * rows + rows] and trace.exchange.bytes == 0


@pytest.mark.parametrize("prefixes", [1, 2, 5])
def test_shares_of_prefixes_say_what_the_whole_says(golden_mar, golden_harmon, prefixes):
    g = torch.Generator().manual_seed(0)
    tokens, mask = torch.randn(prefixes, 16, 4, generator=g), (torch.rand(prefixes, 16, generator=g) < 0.5).float()
    prompts = golden_harmon.read_prompts(*pad_right(list(golden_json("harmon_tiny")["prompts"].values())))
    cases = [
        (MARAdapter(golden_mar), golden_mar.class_emb(torch.arange(2 * prefixes)).view(prefixes, 2, -1)),
        (HarmonAdapter(golden_harmon, prompts), torch.tensor([[[0], [2]]]).expand(prefixes, -1, -1)),
    ]
    for adapter, vectors in cases:
        shared = Shares(Ranks(), 2).adapter(adapter, Trace(prefixes))
        torch.testing.assert_close(shared.conditions(tokens, mask, vectors), adapter.conditions(tokens, mask, vectors), **NETWORK)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_shares_of_a_cell_say_what_the_whole_says(scale):
    config = XARConfig(num_tokens=16, token_dim=2, num_classes=5, width=16, encoder_depth=1, decoder_depth=1, num_heads=2, mlp_hidden=24)
    g, network = torch.Generator().manual_seed(0), XAR(config)
    for parameter in network.parameters():
        parameter.data = torch.randn(parameter.shape, generator=g) * 0.3
    network.eval().requires_grad_(False)
    adapter = XARAdapter(network, num_inference_steps=5)
    shared = Shares(Ranks(), 4).cells(adapter, Trace(2))
    labels = adapter.with_null_rows(torch.tensor([1, 3]), scale)
    cache = adapter.extend(torch.randn(2, 8, generator=g), labels, None)
    owner = torch.tensor([0, 0, 0, 1, 1])
    y, k = torch.randn(5, 8, generator=g), torch.tensor([4, 3, 2, 4, 3])
    whole, parts = (a.chain(labels, cache, 2, scale) for a in (adapter, shared))
    for arguments in ((y, k, owner), (y[:2], 3)):
        for ours, expected in zip(parts(*arguments), whole(*arguments)):
            torch.testing.assert_close(ours, expected, **NETWORK)


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--parallel", "images"], "--parallel images needs processes: torchrun --nproc-per-node N"),
        (["--shares", 2, "--sampler", "sequential"], "--shares 2 divides the lossless sampler's verification, but --sampler is sequential"),
        (["--shares", 2, "--lookahead", "auto"], "--shares 2 conflicts with --lookahead auto"),
        (["--shares", 0], "--shares 0 cannot be divided among the 1 processes"),
        (["--device", "cpu,cpu"], "--device cpu,cpu names several devices, but a process uses one: start one for each with torchrun"),
    ],
)
def test_flags_that_do_not_fit_are_refused(model, tmp_path, capsys, flags, sentence):
    assert main(generate(model, tmp_path / "out", *flags)) == 2
    assert sentence in capsys.readouterr().err


def test_a_resumed_run_keeps_its_shares(model, tmp_path, capsys):
    flags = generate(model, tmp_path / "out", "--num-images", 1)
    assert main([*flags, "--shares", "2"]) == 0
    assert main(flags) == 2
    assert "was made with shares 2, this run has null" in capsys.readouterr().err
