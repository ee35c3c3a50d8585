"""Our networks and samplers against numbers from the authors' implementations. Tolerances are float32 rounding,
which the first step of a schedule multiplies by up to 2e4 before the clean sample is weighted."""

import math

import pytest
import torch
from conftest import TINY, golden, golden_keys, golden_state

from car_spec.adapters.mar import MARAdapter, patchify, remaining_after_each_step, unpatchify
from car_spec.chain import SPREAD, DiffusionChain, HoistedHead
from car_spec.models.diffloss import timestep_embedding
from car_spec.models.loading import Checkpoint, infer_mar_config
from car_spec.models.mar import MAR
from car_spec.models.vae import build_kl16, diffusers_to_kl16, kl16_config, kl16_to_diffusers
from car_spec.schedule import cosine_schedule, respaced_timesteps
from car_spec.sequential import sample_sequential

NETWORK = dict(atol=2e-5, rtol=0)  # one float32 pass, another order of operations


# --- schedule


@pytest.mark.parametrize("steps", [1000, 100, 50, 25, 8, 4])
def test_schedule_tables_equal_the_released_code(steps):
    schedule, found = cosine_schedule(steps), 0
    for name, expected in golden("schedule").items():
        if name.startswith(f"{steps}/"):
            found += 1
            torch.testing.assert_close(getattr(schedule, name.split("/")[1]), expected, rtol=1e-12, atol=1e-15)
    assert found == 11


def test_timestep_maps_equal_the_released_code_including_the_tie_at_999():
    maps = {name.split("/")[1]: value for name, value in golden("schedule").items() if name.startswith("maps/")}
    numbers = [name for name in maps if name.isdigit()]
    assert "999" in numbers
    for name in numbers:
        assert torch.equal(respaced_timesteps(int(name)), maps[name]), name


# --- MAR network


@pytest.mark.parametrize("case", ["all_masked", "part_masked", "one_masked", "none_masked", "uncond", "cfg_pair"])
def test_backbone_reproduces_the_release(golden_mar, mar_golden, case):
    tokens, mask, vectors, encoded, z = (
        mar_golden[f"backbone/{case}/{name}"] for name in ("tokens", "mask", "class_embedding", "enc", "z")
    )
    ours = golden_mar.forward_mae_encoder(tokens, mask, vectors)
    torch.testing.assert_close(ours, encoded, **NETWORK)
    torch.testing.assert_close(golden_mar.forward_mae_decoder(ours, mask), z, **NETWORK)


def test_class_vectors_are_rows_of_the_table_or_the_fake_latent(golden_mar, mar_golden):
    labels = mar_golden["backbone/cfg_pair/labels"]
    vectors = torch.cat([golden_mar.class_vectors(labels, 2), golden_mar.class_vectors(None, 2)])
    assert torch.equal(vectors, mar_golden["backbone/cfg_pair/class_embedding"])


def test_head_reproduces_the_release(golden_mar, mar_golden):
    x, t, c = (mar_golden[f"head/{name}"] for name in "xtc")
    torch.testing.assert_close(timestep_embedding(t), mar_golden["head/freq"], **NETWORK)
    torch.testing.assert_close(golden_mar.diffloss.net(x, t, c), mar_golden["head/out"], **NETWORK)


# --- chain


@pytest.mark.parametrize("case, guidance", [("posterior", False), ("posterior_cfg", True)])
def test_chain_reproduces_every_step_of_the_posterior(golden_mar, mar_golden, case, guidance):
    x, c = mar_golden[f"{case}/x"][:6], mar_golden[f"{case}/c"]
    make = lambda spread: DiffusionChain(
        HoistedHead(golden_mar.diffloss.net, cosine_schedule(8), spread), c[:6], c[6:] if guidance else None, 2.5 if guidance else 1.0, 0.9
    )
    chain, clean = make(SPREAD), make(0.0)  # without spread the centre is the clean sample
    for k in range(8):
        expected = {name: mar_golden[f"{case}/{name}"][k][:6] for name in ("mean", "pred_xstart", "log_variance", "noise", "sample")}
        law = chain(x, k)
        coarse = dict(atol=5e-2 if k == 7 else 1e-4, rtol=0)  # step 7 multiplies a rounding of eps by 2e4
        torch.testing.assert_close(clean.predict(x, k).centre, expected["pred_xstart"], **coarse)
        torch.testing.assert_close(law.mean, expected["mean"], **coarse)
        torch.testing.assert_close(law.sample(expected["noise"]), expected["sample"], **coarse)
        if k > 0:
            log_variance = 2 * (law.log_std - math.log(0.9))
            torch.testing.assert_close(log_variance, expected["log_variance"], atol=1e-4, rtol=0)
        else:
            assert torch.equal(law.sample(expected["noise"]), law.mean)


def test_first_respaced_states_of_a_run_are_reproduced_one_by_one(golden_mar, mar_golden):
    run, positions = "sample/linear_iter5", mar_golden["sample/linear_iter5/predicted"][0].nonzero()  # (row, position)
    rows, places = positions.T
    z = mar_golden[f"{run}/z"][0]  # (2 B, N, W)
    head = HoistedHead(golden_mar.diffloss.net, cosine_schedule(8))
    scale = mar_golden[f"{run}/cfg_iter"][0].item()
    chain = DiffusionChain(head, z[:3][rows, places], z[3:][rows, places], scale, temperature=0.9)
    y = mar_golden["sample/init_noise"][rows, places]
    for i, k in enumerate(reversed(range(8))):
        y = chain(y, k).sample(mar_golden["sample/step_noise"][rows, places, k])
        torch.testing.assert_close(y, mar_golden[f"{run}/diffusion_step0"][i + 1], atol=5e-2, rtol=0)


# --- sampler

RUNS = ["cfg1_iter5", "cfg1_iter16", "linear_iter5", "linear_iter16", "constant_iter5", "constant_iter16", "nolabel_iter5"]
RUNS_100 = ["sample100/cfg1_iter5", "sample100/linear_iter5", "sample100/constant_iter5", "sample100/linear_iter16"]


class RecordedRun:
    """One recorded run: its settings, and its noise, looked up by row, position and step."""

    def __init__(self, numbers, runs, name):
        self.settings, self.numbers, self.hundred = runs[name], numbers, name in RUNS_100
        self.prefix, self.num_steps = (name, 100) if self.hundred else (f"sample/{name}", 8)
        self.tolerance = 1e-3 if self.hundred else 2e-2

    def noise(self, positions):
        rows = torch.arange(3)[:, None]
        step_noise = self.numbers["sample100/step_noise" if self.hundred else "sample/step_noise"]
        return self.numbers["sample/init_noise"][rows, positions], step_noise[rows, positions]

    def sample(self, model, adapter_class=MARAdapter):
        """-> AR steps, tokens after each of them (K, B, N, D)."""
        run = self.settings
        adapter = adapter_class(model, num_inference_steps=self.num_steps, temperature=run["temperature"])
        steps = adapter.ar_steps(self.numbers["sample/orders"], run["num_iter"], run["cfg"], run["cfg_schedule"])
        labels = None if run["labels"] is None else torch.tensor(run["labels"])
        vectors, nulls = model.class_vectors(labels, 3), model.class_vectors(None, 3)
        seen: list[torch.Tensor] = []
        final = sample_sequential(adapter, steps, vectors, nulls, self.noise, lambda i, tokens: seen.append(tokens))
        assert torch.equal(final, seen[-1])
        return steps, torch.stack(seen)


@pytest.mark.parametrize("name", [*RUNS, *RUNS_100])
def test_sequential_sampler_reproduces_the_recorded_runs(golden_mar, mar_golden, mar_runs, name):
    run = RecordedRun(mar_golden, mar_runs, name)
    steps, tokens = run.sample(golden_mar)
    torch.testing.assert_close(tokens, mar_golden[f"{run.prefix}/tokens"], atol=run.tolerance, rtol=0)
    torch.testing.assert_close(unpatchify(tokens[-1], 1), mar_golden[f"{run.prefix}/latent"], atol=run.tolerance, rtol=0)
    if not run.hundred:
        predicted = torch.zeros(len(steps), 3, 16, dtype=torch.uint8)
        for i, step in enumerate(steps):
            predicted[i].scatter_(1, step.positions, 1)
        assert torch.equal(predicted, mar_golden[f"{run.prefix}/predicted"])
        assert remaining_after_each_step(16, len(steps)) == mar_golden[f"{run.prefix}/mask_len"].tolist()
        scales = torch.tensor([step.guidance_scale for step in steps])
        torch.testing.assert_close(scales, mar_golden[f"{run.prefix}/cfg_iter"])


def clamped_variance(chain):
    predict = chain.predict
    chain.predict = lambda *args: (p := predict(*args))._replace(fraction=p.fraction.clamp(0, 1))


def guided_variance(chain):
    predict, scale, n = chain.predict, chain.scale, chain.num_rows

    def wrong(y, k, rows=None):
        prediction = predict(y, k)
        out = chain.head(chain.head.net.input_proj(torch.cat([y, y])), chain.hoisted[k])
        fraction = 0.5 * (out[:, y.shape[-1] :] + 1)
        return prediction._replace(fraction=fraction[n:] + scale * (fraction[:n] - fraction[n:]))

    chain.predict = wrong


def noise_in_the_last_step(chain):
    transition = chain.transition

    def wrong(prediction, y, k):
        law = transition(prediction, y, k)
        return law if k else law._replace(log_std=chain.head.coefficients(0)[-2] + chain.log_temperature + 0 * law.mean)

    chain.transition = wrong


@pytest.mark.parametrize("mistake", [clamped_variance, guided_variance, noise_in_the_last_step])
def test_recorded_run_notices_a_wrong_chain(golden_mar, mar_golden, mar_runs, mistake):
    class WrongAdapter(MARAdapter):
        def chain(self, *args):
            chain = super().chain(*args)
            mistake(chain)
            return chain

    run = RecordedRun(mar_golden, mar_runs, "sample100/linear_iter5")
    _, tokens = run.sample(golden_mar, WrongAdapter)
    assert (tokens - mar_golden[f"{run.prefix}/tokens"]).abs().max() > run.tolerance


def test_patches_have_the_order_of_the_release(mar_golden):
    latents, tokens = mar_golden["patch2/latent"], mar_golden["patch2/tokens"]
    assert torch.equal(patchify(latents, 2), tokens)
    assert torch.equal(unpatchify(tokens, 2), latents)


# --- names and shapes of the full-size checkpoints


@pytest.mark.parametrize("name", ["mar_base", "mar_large", "mar_huge"])
def test_full_size_mar_has_the_names_and_shapes_of_the_release(name, tmp_path):
    keys = golden_keys(name)
    state = {key: torch.empty(shape, device="meta") for key, shape in keys.items()}
    with torch.device("meta"):
        model = MAR(infer_mar_config(Checkpoint(tmp_path, "model_ema", state)))
    assert {key: tuple(value.shape) for key, value in model.state_dict().items()} == keys


def test_full_size_vae_has_the_names_and_shapes_of_the_release():
    from diffusers import AutoencoderKL

    keys = golden_keys("kl16")
    state = {key: torch.empty(shape, device="meta") for key, shape in keys.items()}
    with torch.device("meta"):
        vae = AutoencoderKL(**kl16_config(state))
    assert {key: tuple(value.shape) for key, value in diffusers_to_kl16(vae.state_dict()).items()} == keys
    assert set(kl16_to_diffusers(state)) == set(vae.state_dict())


def test_golden_weights_have_the_architecture_that_is_inferred(tmp_path):
    assert infer_mar_config(Checkpoint(tmp_path, "flat", golden_state("mar_tiny")), num_heads=4) == TINY


# --- autoencoder


@pytest.fixture(scope="module")
def golden_vae(tmp_path_factory):
    return build_kl16(golden_state("kl16_tiny"), tmp_path_factory.mktemp("kl16"))


@pytest.mark.parametrize("size", ["square", "oblong"])
def test_autoencoder_reproduces_the_release(golden_vae, size):
    numbers = golden("kl16_tiny")
    tolerance = dict(atol=5e-5, rtol=0)
    posterior = golden_vae.encode(numbers[f"encode/{size}/x"]).latent_dist
    torch.testing.assert_close(posterior.parameters, numbers[f"encode/{size}/moments"], **tolerance)
    sample = posterior.mean + posterior.std * numbers[f"encode/{size}/noise"]
    torch.testing.assert_close(sample, numbers[f"encode/{size}/sample"], **tolerance)
    torch.testing.assert_close(golden_vae.decode(numbers[f"decode/{size}/z"]).sample, numbers[f"decode/{size}/image"], **tolerance)


def test_conversion_of_autoencoder_keys_round_trips(golden_vae):
    state = golden_state("kl16_tiny")
    back = diffusers_to_kl16(golden_vae.state_dict())
    assert set(back) == set(state)
    assert all(torch.equal(back[key], state[key]) for key in state)


def test_log_variance_is_clamped_as_in_the_release():
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    numbers = golden("kl16_tiny")
    posterior = DiagonalGaussianDistribution(numbers["clamp/parameters"])
    torch.testing.assert_close(posterior.logvar, numbers["clamp/logvar"])
    torch.testing.assert_close(posterior.std, numbers["clamp/std"])
    torch.testing.assert_close(posterior.mode(), numbers["clamp/mode"])
