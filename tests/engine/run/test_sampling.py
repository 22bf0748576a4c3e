"""Sampling: equal to a slow reference, correctly distributed, and independent of other rows."""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import pstdev
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.native.cpu_class import NAMES
from engine.run.samplers import NativeSampler, TorchSampler, sampler_for
from engine.run.sampling import Draw, gumbel_noise
from engine.schedule.request import LogitRules, Sampling
from quire.v1 import decoding_pb2
from tests.engine import native_kernels
from tests.engine.run.chi_square import chi_square_is_likely
from tests.engine_in_process import ModelEngine

CPU = torch.device("cpu")
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
# Below this difference float32 may choose another token than the reference.
MARGIN = 1e-4

Sample = Callable[[torch.Tensor, list[Draw]], list[int]]

DRAWN: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 0.1, 0.7, 1.0, 1.3, 5.0]),
    "top_k": st.sampled_from([0, 0, 1, 2, 7, 1000]),
    "top_p": st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01]),
    "min_p": st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "top_n_sigma": st.sampled_from([0.0, 0.0, 0.4, 1.0, 2.5, 1e30]),
}
# Fields of a request's Sampling that no sampler receives, with the reason.
OTHERS = {"sample_count": "each sample is a row of its own"}
samplings = st.builds(Sampling, **DRAWN)


@pytest.fixture(scope="module", params=["torch", *NAMES])
def sample(request: pytest.FixtureRequest) -> Sample:
    """Samples with torch's operators, or with the kernels of a class of CPUs."""
    name = request.param
    sampler = TorchSampler() if name == "torch" else NativeSampler(native_kernels.kernels(name), 2)
    return lambda logits, draws: [int(token) for token in sampler.sample(logits, draws)]


def torch_sample(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    return [int(token) for token in TorchSampler().sample(logits, draws)]


class Unclear(Exception):
    """Two choices are too close for the reference to decide."""


class Twin:
    """The reference: one row at a time, in Python floats."""

    @staticmethod
    def mix(value: int) -> int:
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
        return value ^ (value >> 31)

    @classmethod
    def noise(cls, draw: Draw, token: int) -> float:
        state = 0
        for part in (draw.sampling.seed, draw.sample_index, draw.position):
            state = cls.mix((state + (part + 1) * GOLDEN) & MASK)
        uniform = ((cls.mix((state + token * GOLDEN) & MASK) >> 11) + 0.5) / 2**53
        return -math.log(-math.log1p(-uniform))

    @classmethod
    def allowed(cls, logits: list[float], sampling: Sampling) -> list[int]:
        order = sorted(range(len(logits)), key=lambda token: -logits[token])
        weights = [math.exp((logits[token] - logits[order[0]]) / sampling.temperature) for token in order]
        least = max(sampling.min_p, cls.least_chance(logits, sampling))
        for weight in weights:
            cls.clear(weight, least)
        weights = [weight for weight in weights if weight >= least][: sampling.top_k or None]
        kept, reached = [], 0.0
        for token, weight in zip(order, weights, strict=False):
            cls.clear(reached, sampling.top_p)
            if reached < sampling.top_p or not kept:
                kept.append(token)
            reached += weight / sum(weights)
        return kept

    @staticmethod
    def least_chance(logits: list[float], sampling: Sampling) -> float:
        if not sampling.top_n_sigma:
            return 0.0
        return math.exp(-min(700.0, sampling.top_n_sigma * pstdev(logits) / sampling.temperature))

    @classmethod
    def choose(cls, logits: list[float], draw: Draw) -> int:
        if draw.sampling.temperature == 0:
            return max(range(len(logits)), key=lambda token: logits[token])
        kept = cls.allowed(logits, draw.sampling)
        scores = {token: logits[token] / draw.sampling.temperature + cls.noise(draw, token) for token in kept}
        best, *others = sorted(scores, key=lambda token: -scores[token])
        if others:
            cls.clear(scores[best], scores[others[0]])
        return best

    @staticmethod
    def clear(one: float, other: float) -> None:
        if one != other and abs(one - other) < MARGIN * max(1.0, abs(one)) and other not in (0.0, 1.0):
            raise Unclear


def test_every_parameter_of_a_request_is_drawn() -> None:
    """A field that is declared and applied by no sampler would have no effect."""
    assert {field.name for field in decoding_pb2.Sampling.DESCRIPTOR.fields} == {*DRAWN, *OTHERS}


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.tuples(samplings, st.integers(0, 3), st.integers(0, 2**40)), min_size=1, max_size=12),
    numbers=st.integers(0, 2**32 - 1),
    vocabulary=st.integers(1, 40),
    ties=st.booleans(),
)
def test_the_result_equals_a_slow_reference(
    sample: Sample, rows: list[tuple[Sampling, int, int]], numbers: int, vocabulary: int, ties: bool
) -> None:
    logits = np.random.default_rng(numbers).normal(scale=3, size=(len(rows), vocabulary)).astype(np.float32)
    if ties:
        logits = logits.round()
    draws = [Draw(*row) for row in rows]
    chosen = sample(torch.from_numpy(logits), draws)
    unclear = 0
    for row, (draw, token) in enumerate(zip(draws, chosen, strict=True)):
        try:
            assert token == Twin.choose(logits[row].tolist(), draw)
        except Unclear:
            unclear += 1
    assume(unclear < len(rows))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(-(2**80), 2**80),
    sample_index=st.integers(0, 100),
    position=st.integers(0, 2**31),
    vocabulary=st.integers(1, 50),
)
def test_the_noise_equals_a_slow_reference(seed: int, sample_index: int, position: int, vocabulary: int) -> None:
    draw = Draw(Sampling(seed=seed), sample_index, position)
    [noise] = gumbel_noise([draw], vocabulary, CPU).tolist()
    assert noise == pytest.approx([Twin.noise(draw, token) for token in range(vocabulary)], rel=1e-5, abs=1e-5)


class TestNoise:
    def test_is_a_function_of_seed_sample_position_and_token_alone(self) -> None:
        draws = [
            Draw(Sampling(seed=seed), index, position) for seed in (0, 1) for index in (0, 1) for position in (0, 1)
        ]
        together = gumbel_noise(draws, 64, CPU)
        for row, draw in enumerate(draws):
            assert torch.equal(gumbel_noise([draw], 64, CPU)[0], together[row])
            assert torch.equal(gumbel_noise([draw], 10, CPU)[0], together[row, :10]), "the vocabulary does not matter"
        for one in range(len(draws)):
            for other in range(one):
                assert not (together[one] == together[other]).any()

    def test_has_a_gumbel_distribution(self) -> None:
        draws = [Draw(Sampling(seed=11), 0, position) for position in range(400)]
        noise = gumbel_noise(draws, 500, CPU).double()
        count = noise.numel()
        assert noise.mean() == pytest.approx(0.5772156649, abs=4 * (math.pi / 6**0.5) / count**0.5)
        assert noise.var() == pytest.approx(math.pi**2 / 6, rel=0.02)
        ordered = torch.exp(-torch.exp(-noise.flatten().sort().values))
        off = (ordered - (torch.arange(count) + 0.5) / count).abs().max()
        assert off < 1.95 / count**0.5, "Kolmogorov-Smirnov test, 0.1 %"

    @pytest.mark.parametrize(
        ("one", "other"), [((0, 1), (0, 2)), ((5, 0), (6, 0)), ((1, 0), (0, 1)), ((-1, 0), (1, 0))]
    )
    def test_neighbours_are_independent(self, one: tuple[int, int], other: tuple[int, int]) -> None:
        draws = [Draw(Sampling(seed=seed), 0, position) for seed, position in (one, other)]
        noise = gumbel_noise(draws, 100_000, CPU).double()
        for shift in (0, 1, -1):
            rolled = torch.stack((noise[0], noise[1].roll(shift)))
            assert abs(torch.corrcoef(rolled)[0, 1]) < 4 / 100_000**0.5
            assert not torch.equal(*rolled)

    def test_is_finite_for_the_smallest_and_the_largest_random_number(self) -> None:
        # Seeds from inverting the hash: they give the largest and the smallest uniform number.
        for bits, noise in ((MASK, -2.811), (0, 37.43)):
            [row] = gumbel_noise([Draw(Sampling(seed=_seed_of(bits, token=3)), 0, 0)], 5, CPU)
            assert row.isfinite().all()
            assert row[3] == pytest.approx(noise, abs=0.01)

    def test_the_only_remaining_token_is_chosen_with_any_noise(self, sample: Sample) -> None:
        draw = Draw(Sampling(temperature=1.0, top_k=1, seed=_seed_of(MASK, token=3)), 0, 0)
        assert sample(torch.tensor([[0.0, 0, 0, 5, 0]]), [draw]) == [3]


def _seed_of(bits: int, token: int) -> int:
    """Return the seed for which the noise of `token` at position 0 of sample 0 has these 64 bits."""
    state = (_unmix(bits) - token * GOLDEN) & MASK
    for _ in range(2):  # position 0 and sample 0
        state = (_unmix(state) - GOLDEN) & MASK
    return ((_unmix(state) - GOLDEN) * pow(GOLDEN, -1, 1 << 64)) & MASK


def _unmix(value: int) -> int:
    value = _unshift(value, 31)
    value = _unshift((value * pow(0x94D049BB133111EB, -1, 1 << 64)) & MASK, 27)
    return _unshift((value * pow(0xBF58476D1CE4E5B9, -1, 1 << 64)) & MASK, 30)


def _unshift(value: int, bits: int) -> int:
    result = value
    for _ in range(64 // bits + 1):
        result = value ^ (result >> bits)
    return result


class TestDistribution:
    LOGITS = (2.0, 1.5, 1.5, 0.3, 0.0, -0.4, -1.0, -1.0, -2.0, -2.5, -3.0, 0.9)
    DRAWS = 20_000

    @pytest.mark.parametrize(
        "sampling",
        [
            Sampling(seed=3),
            Sampling(temperature=0.8, seed=4),
            Sampling(temperature=2.0, seed=5),
            Sampling(temperature=0.8, top_k=5, seed=6),
            Sampling(temperature=0.8, top_p=0.7, seed=7),
            Sampling(temperature=1.2, min_p=0.2, seed=8),
            Sampling(temperature=1.5, top_k=8, top_p=0.9, min_p=0.1, seed=-9),
        ],
    )
    def test_token_frequencies_follow_the_filtered_softmax(self, sample: Sample, sampling: Sampling) -> None:
        draws = [Draw(sampling, 0, position) for position in range(self.DRAWS)]
        counts = Counter(sample(torch.tensor(self.LOGITS).expand(self.DRAWS, -1), draws))
        kept = Twin.allowed(list(self.LOGITS), sampling)
        weights = {token: math.exp(self.LOGITS[token] / sampling.temperature) for token in kept}
        assert counts.keys() == weights.keys()
        chances = [weights.get(token, 0.0) / sum(weights.values()) for token in range(len(self.LOGITS))]
        assert chi_square_is_likely(counts, chances)


class TestLargeVocabularies:
    """The kernels bisect for the bound of a filter and compute the noise of few tokens; torch sorts everything."""

    VOCABULARY = 5003

    @pytest.mark.parametrize("allowed", [VOCABULARY, 1500, 12, 0])
    @pytest.mark.parametrize(
        "sampling",
        [
            Sampling(),
            Sampling(top_k=40),
            Sampling(top_p=0.9),
            Sampling(min_p=0.01),
            Sampling(top_k=2000, top_p=0.9),
            Sampling(temperature=50.0, top_p=0.9999),
            Sampling(temperature=50.0, top_k=4000, min_p=0.5),
            Sampling(top_k=1),
        ],
    )
    def test_the_tokens_are_those_of_torch(self, sample: Sample, sampling: Sampling, allowed: int) -> None:
        random = np.random.default_rng(allowed)
        logits = (random.normal(size=(40, self.VOCABULARY)) * 4).round(1).astype(np.float32)  # with many ties
        logits[:, random.permutation(self.VOCABULARY)[allowed:]] = -np.inf
        draws = [Draw(sampling, 0, position) for position in range(40)]
        assert sample(torch.from_numpy(logits), draws) == torch_sample(torch.from_numpy(logits), draws)

    @pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=5), Sampling(top_p=0.5), Sampling(min_p=0.5)])
    def test_rows_with_numbers_that_are_none_give_some_token(self, sample: Sample, sampling: Sampling) -> None:
        logits = torch.zeros(4, self.VOCABULARY)
        logits[0] = math.nan
        logits[1, 7], logits[2, 7], logits[3, 7:] = math.nan, math.inf, -math.inf
        tokens = sample(logits, [Draw(sampling, 0, row) for row in range(4)])
        assert all(0 <= token < self.VOCABULARY for token in tokens)
        assert tokens[3] < 7


class TestBatches:
    def test_a_filter_of_one_row_does_not_remove_an_unlikely_token_of_another(self, sample: Sample) -> None:
        """Float32 sums of chances reach 1 before the end, so a top_p of 1 must be no filter at all."""
        vocabulary = 2**20
        for position in range(50):
            draw = Draw(Sampling(seed=21), 0, position)
            [noise] = gumbel_noise([draw], vocabulary, CPU)
            spread = float(noise.max() - noise.min())
            if spread > 17.45:
                break
        logits = torch.full((2, vocabulary), -1e4)
        logits[:, noise.argmin()] = 0.0
        logits[:, noise.argmax()] = 0.01 - spread  # wins by 0.01, with a chance of 3e-8
        alone = sample(logits[:1], [draw])
        assert alone == [int(noise.argmax())]
        assert sample(logits, [draw, Draw(Sampling(top_k=3), 0, 0)])[:1] == alone

    def test_a_request_samples_the_same_tokens_alone_and_in_a_batch(self, tiny_model: Callable[[str], Path]) -> None:
        def answer(companions: int, token_budget: int) -> list[int]:
            engine = ModelEngine(tiny_model("llama"), token_budget=token_budget)
            for number in range(companions):
                rules = LogitRules(1.0 + number / 10, number / 7, logit_bias=((number, 1.0),))
                sampling = Sampling(seed=number, top_k=number)
                engine.submit([number + 1] * (5 * number + 1), 20, sampling=sampling, logit_rules=rules)
            sampling, rules = Sampling(temperature=0.9, top_p=0.95, seed=77), LogitRules(1.3, 0.2, 0.1, ((5, 1.0),))
            name = engine.submit([9, 8, 7, 6] * 5, 20, sampling=sampling, logit_rules=rules)
            engine.run()
            return engine.tokens[name]

        alone = answer(0, 512)
        assert len(set(alone)) > 10
        assert answer(1, 512) == answer(12, 64) == alone

    def test_no_rows_give_no_tokens(self, sample: Sample) -> None:
        assert sample(torch.zeros((0, 5)), []) == []


class TestEdges:
    LOGITS = (0.1, 3.0, 1.0, 3.0, 2.0, 3.0)

    @pytest.fixture(autouse=True)
    def _sampler(self, sample: Sample) -> None:
        self.sample = sample

    def support(self, sampling: Sampling, logits: tuple[float, ...] = LOGITS) -> set[int]:
        draws = [Draw(sampling, 0, position) for position in range(400)]
        return set(self.sample(torch.tensor(logits).expand(400, -1), draws))

    def test_greedy_chooses_the_first_of_equal_tokens(self) -> None:
        assert self.support(Sampling(temperature=0.0)) == {1}

    def test_a_top_k_of_1_is_greedy(self) -> None:
        assert self.support(Sampling(temperature=3.0, top_k=1)) == {1}

    def test_of_equal_tokens_the_first_are_kept(self) -> None:
        assert self.support(Sampling(top_k=2)) == {1, 3}
        assert self.support(Sampling(temperature=0.1, top_p=0.34)) == {1, 3}

    def test_a_top_k_of_the_vocabulary_or_more_is_no_filter(self) -> None:
        for top_k in (0, 6, 7, 2**31 - 1):
            assert self.support(Sampling(temperature=3.0, top_k=top_k)) == set(range(6))

    @pytest.mark.parametrize("top_p", [0.1, 1e-9, 1e-50, 5e-324])
    def test_a_tiny_top_p_keeps_exactly_one(self, top_p: float) -> None:
        assert self.support(Sampling(temperature=5.0, top_p=top_p)) == {1}

    def test_the_token_that_reaches_top_p_is_kept(self) -> None:
        logits = tuple(math.log(chance) for chance in (0.5, 0.3, 0.15, 0.05))
        for top_p, kept in ((0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.94, 3), (0.96, 4)):
            assert self.support(Sampling(top_p=top_p), logits) == set(range(kept))

    def test_min_p_is_a_share_of_the_largest_chance(self) -> None:
        assert self.support(Sampling(min_p=1.0)) == {1, 3, 5}
        logits = tuple(math.log(chance) for chance in (0.5, 0.3, 0.15, 0.05))
        for min_p, kept in ((0.7, 1), (0.5, 2), (0.29, 3), (0.05, 4)):
            assert self.support(Sampling(min_p=min_p), logits) == set(range(kept))

    def test_top_k_comes_before_top_p(self) -> None:
        # Of the first two, 0.5 and 0.3, the first has 0.625, above 0.6; of all it would have 0.5.
        logits = tuple(math.log(chance) for chance in (0.5, 0.3, 0.15, 0.05))
        assert self.support(Sampling(top_k=2, top_p=0.6), logits) == {0}
        assert self.support(Sampling(top_p=0.6), logits) == {0, 1}

    def test_top_n_sigma_keeps_logits_near_the_largest_at_any_temperature(self) -> None:
        # Mean 2.75 and deviation 2.95 of the finite ones.
        logits = [7.0, 4.0, -math.inf, 0.0, 0.0]
        for temperature in (0.2, 1.0, 5.0):
            for sigmas, kept in (
                (0.5, {0}),
                (1.0, {0}),
                (1.1, {0, 1}),
                (2.3, {0, 1}),
                (2.5, {0, 1, 3, 4}),
                (0.0, {0, 1, 3, 4}),
            ):
                drawn = self.support(Sampling(temperature, top_n_sigma=sigmas), logits)
                assert drawn <= kept
                assert temperature < 5 or drawn == kept

    def test_min_p_comes_before_top_p(self) -> None:
        # Of the first two, which min_p keeps, the first has 0.625, above 0.6; of all it would have 0.5.
        logits = tuple(math.log(chance) for chance in (0.5, 0.3, 0.15, 0.05))
        assert self.support(Sampling(top_p=0.6, min_p=0.5), logits) == {0}

    @pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-40, 1e-300, 5e-324])
    def test_a_tiny_temperature_is_greedy(self, temperature: float) -> None:
        assert self.support(Sampling(temperature=temperature), (1.0, 90.0, 89.0, -90.0)) == {1}

    def test_a_huge_temperature_makes_all_tokens_equally_likely(self) -> None:
        assert self.support(Sampling(temperature=1e30), (1.0, 90.0, 89.0, -90.0)) == {0, 1, 2, 3}

    @pytest.mark.parametrize("temperature", [3e38, 3.5e38, 1e39, 1.7e308])
    def test_a_temperature_beyond_float32_samples_no_forbidden_token(self, temperature: float) -> None:
        assert self.support(Sampling(temperature=temperature), (0.0, -math.inf, 1.0, 90.0)) == {0, 2, 3}

    def test_a_forbidden_token_is_never_sampled(self) -> None:
        assert self.support(Sampling(temperature=5.0), (0.0, -math.inf, 1.0)) == {0, 2}

    def test_logits_in_half_precision_are_sampled_in_single(self) -> None:
        logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
        draws = [Draw(Sampling(seed=5), 0, 0)]
        assert self.sample(logits, draws) == self.sample(logits.float(), draws)

    @pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1, 2**64 - 1, 2**100])
    def test_any_integer_is_a_seed(self, seed: int) -> None:
        draws = [Draw(Sampling(seed=seed), 0, position) for position in range(200)]
        tokens = self.sample(torch.zeros((200, 10)), draws)
        assert tokens == self.sample(torch.zeros((200, 10)), draws)
        assert set(tokens) == set(range(10))
        other = [Draw(Sampling(seed=seed + 1), 0, position) for position in range(200)]
        assert tokens != self.sample(torch.zeros((200, 10)), other)

    def test_seeds_that_differ_by_two_to_the_64_are_the_same(self) -> None:
        one, other = (gumbel_noise([Draw(Sampling(seed=seed), 0, 0)], 9, CPU) for seed in (-1, 2**64 - 1))
        assert torch.equal(one, other)


def test_a_cpu_with_kernels_samples_with_them() -> None:
    kernels = native_kernels.kernels()
    assert isinstance(sampler_for(CPU, 4, 50, torch.bfloat16, kernels), NativeSampler)
    assert isinstance(sampler_for(CPU, 4, 50, torch.bfloat16), TorchSampler)
