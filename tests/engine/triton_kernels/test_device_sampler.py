"""The device's sampler chooses the CPU's tokens, and keeps the token counts of penalized sequences."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.run.sampling import Draw, gumbel_noise, sample
from engine.schedule.request import LogitRules, Sampling
from engine.schedule.step_plan import RowRules
from tests.engine.triton_case import DEVICE

pytest.importorskip("triton")
from engine.run.device_sampler import DeviceSampler
from engine.triton_kernels.sampling import launch

GREEDY = Sampling(temperature=0.0)
PENALTIES = LogitRules(1.3, 0.5, 0.7)
MARGIN = 1e-5


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let rows have several tiles, and lists of candidates several chunks; NumPy warns of infinite numbers."""
    monkeypatch.setattr(launch, "_TILE", 32)
    monkeypatch.setattr(launch, "_CHUNK", 64)
    with np.errstate(all="ignore"):
        yield


def sampled(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    sampler = DeviceSampler(len(draws), logits.shape[-1], DEVICE)
    tokens: list[int] = sampler.sample(logits.to(DEVICE), draws).tolist()
    return tokens


def is_near_tie(logits: torch.Tensor, draw: Draw) -> bool:
    """Return whether the CPU chooses differently if a parameter is changed by a few roundings."""
    sampling = draw.sampling
    nudged = [
        replace(sampling, **{name: getattr(sampling, name) * (1 + sign * MARGIN)})
        for name in ("temperature", "top_p", "min_p", "top_n_sigma")
        for sign in (-1, 1)
    ]
    return len(set(sample(logits.expand(8, -1), [draw._replace(sampling=one) for one in nudged]))) > 1


def check(logits: torch.Tensor, draws: list[Draw]) -> int:
    """Compare the tokens with the CPU's; return the number of near ties with different ones."""
    expected, found = sample(logits, draws), sampled(logits, draws)
    different = [row for row in range(len(draws)) if expected[row] != found[row]]
    for row in different:
        assert is_near_tie(logits[row], draws[row]), (draws[row], logits[row].tolist(), expected[row], found[row])
    return len(different)


def random_sampling(source: random.Random) -> Sampling:
    return Sampling(
        temperature=source.choice([0.0, 0.1, 0.7, 1.0, 5.0]),
        top_k=source.choice([0, 0, 1, 2, 7, 1000]),
        top_p=source.choice([1.0, 1.0, 0.95, 0.5, 0.01]),
        min_p=source.choice([0.0, 0.0, 0.02, 0.3, 1.0]),
        seed=source.randrange(-(2**63), 2**63),
        top_n_sigma=source.choice([0.0, 0.0, 0.5, 1.5, 1e30]),
    )


def random_draw(source: random.Random, vocabulary: int, sequence: int) -> Draw:
    sampling = random_sampling(source)
    if source.random() < 0.6:
        return Draw(sampling, source.randrange(3), source.randrange(2**40), None, sequence)
    prompt, output = ([source.randrange(vocabulary) for _ in range(source.randrange(1, 9))] for _ in range(2))
    bias = ((source.randrange(vocabulary), 1.5),) if source.random() < 0.3 else ()
    rules = RowRules(LogitRules(source.choice([1.0, 1.3, 0.5]), 0.5, source.choice([0.0, 0.7]), bias))
    rules = rules._replace(prompt=tuple(prompt), output=tuple(output))
    return Draw(sampling, 0, len(prompt) + len(output), rules, source.choice([sequence, None]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_the_cpus_except_for_few_near_ties(dtype: torch.dtype) -> None:
    source, near_ties, rows = random.Random(3), 0, 8
    for vocabulary, scale in ((1, 1.0), (90, 4.0)):
        numbers = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * scale
        numbers[::3] = numbers[::3].round()  # many equal logits
        numbers[1] = 0.5
        draws = [random_draw(source, vocabulary, row) for row in range(rows)]
        near_ties += check(numbers.to(dtype), draws)
    assert near_ties <= 1


@pytest.mark.parametrize(
    "sampling",
    [
        *(Sampling(one, seed=4) for one in (5e-324, 1e-40, 1e-6, 1e30, 1.7e308)),
        *(Sampling(top_k=one, seed=5) for one in (1, 2, 69, 70, 2**31 - 1)),
        *(Sampling(top_p=one, seed=6) for one in (5e-324, 1e-9, 0.999999, 1.0)),
        *(Sampling(min_p=one, seed=7) for one in (1e-50, 0.9, 1.0)),
        *(Sampling(top_n_sigma=one, seed=8) for one in (5e-324, 0.7, 1e30)),
        Sampling(1.5, 8, 0.9, 0.1, seed=-9),
    ],
)
def test_extreme_parameters_choose_the_cpus_tokens(sampling: Sampling) -> None:
    generator = torch.Generator().manual_seed(1)
    few = torch.randint(-2, 3, (1, 70), generator=generator).float()
    logits = torch.cat((torch.randn(1, 70, generator=generator) * 6, few, torch.zeros(1, 70)))
    logits[0, 3::2] = -math.inf
    check(logits, [Draw(sampling, 0, position) for position in range(len(logits))])


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=1), Sampling(top_p=0.9, seed=2), Sampling(top_k=3, seed=3)])
def test_a_row_with_infinite_logits_or_nan_gives_the_cpus_token_and_changes_no_other(sampling: Sampling) -> None:
    logits = torch.randn(6, 70)
    draws = [Draw(sampling, 0, row) for row in range(6)]
    usual = sampled(logits, draws)
    logits[1, 40] = math.nan
    logits[2, 66] = logits[2, 41] = math.inf
    logits[3] = -math.inf
    logits[4, 5:] = -math.inf
    found = sampled(logits, draws)
    assert found == sample(logits, draws)
    assert [found[0], found[5]] == [usual[0], usual[5]]


def test_of_equal_logits_at_a_filters_threshold_the_first_are_kept() -> None:
    logits = torch.full((6, 70), -1.0)
    logits[:, [5, 33, 34, 68]] = 1.0
    for sampling in (Sampling(top_k=2), Sampling(0.1, top_p=0.49), Sampling(top_k=3, top_p=0.6)):
        draws = [Draw(sampling, 0, position) for position in range(6)]
        assert set(sampled(logits, draws)) == {5, 33}


def test_noise_is_the_cpus() -> None:
    """Of two tokens, the second wins if its logit is ahead by just more than the difference of the CPU's noise."""
    draws = [Draw(Sampling(seed=seed), 1, 2) for seed in (-(2**80), -1, 2**63)]
    noise = gumbel_noise(draws, 70, torch.device("cpu"))
    for first, second in ((0, 1), (31, 32), (33, 69)):
        for ahead, winner in ((1e-4, second), (-1e-4, first)):
            logits = torch.full((len(draws), 70), -math.inf)
            logits[:, first] = 0.0
            logits[:, second] = noise[:, first] - noise[:, second] + ahead
            assert sampled(logits, draws) == [winner] * len(draws)


class TestCounts:
    PROMPT = (3, 7, 7, 11)

    def draw(self, output: tuple[int, ...], rules: LogitRules = PENALTIES, *, known: bool = True) -> Draw:
        row = RowRules(rules, self.PROMPT if known else (), output if known else ())
        return Draw(GREEDY, 0, len(self.PROMPT) + len(output), row, 9)

    def test_sampled_tokens_are_counted_so_later_draws_need_no_tokens(self) -> None:
        sampler, output = DeviceSampler(2, 40, DEVICE), ()
        logits = torch.linspace(5, -9, 40)[None]
        for step in range(9):
            expected = sample(logits, [self.draw(output)])
            [token] = sampler.sample(logits.to(DEVICE), [self.draw(output, known=step == 0)]).tolist()
            assert [token] == expected
            output += (token,)
            assert sampler.holds(9, len(self.PROMPT) + len(output))
        assert 3 < len(set(output)) < 8, "some are chosen again"

    def test_a_draw_at_another_position_counts_anew(self) -> None:
        sampler, logits = DeviceSampler(1, 40, DEVICE), torch.linspace(2, 0.5, 40)[None]
        sampler.sample(logits.to(DEVICE), [self.draw(())])
        draw = self.draw(())  # the token was discarded
        assert sampler.sample(logits.to(DEVICE), [draw]).tolist() == sample(logits, [draw])
        later = self.draw((0, 0, 1, 2, 3))
        assert sampler.sample(logits.to(DEVICE), [later]).tolist() == sample(logits, [later])

    def test_unknown_tokens_are_refused_and_change_nothing(self) -> None:
        sampler, logits = DeviceSampler(1, 40, DEVICE), torch.zeros(1, 40).to(DEVICE)
        sampler.add(9, self.PROMPT, ())
        with pytest.raises(ValueError, match="sequence 9 has 0 tokens in its rules, not the 5"):
            sampler.sample(logits, [self.draw((1,), known=False)])
        with pytest.raises(IndexError, match="token 40 is not in the vocabulary of 40 tokens"):
            sampler.add(9, (40,), ())
        assert sampler.holds(9, 4)

    def test_samples_of_one_sequence_share_its_counts_unchanged(self) -> None:
        sampler, logits = DeviceSampler(1, 40, DEVICE), torch.randn(2, 40)
        draws = [self.draw(())._replace(sampling=Sampling(seed=2), sample_index=index) for index in range(2)]
        assert sampler.sample(logits.to(DEVICE), draws).tolist() == sample(logits, draws)
        assert sampler.holds(9, len(self.PROMPT))

    def test_the_least_recently_used_slot_is_reused_but_none_of_the_same_step(self) -> None:
        sampler, logits = DeviceSampler(2, 40, DEVICE), torch.zeros(2, 40).to(DEVICE)
        for sequence in (1, 2, 1, 3):
            sampler.sample(logits[:1], [self.draw(())._replace(sequence=sequence)])
        assert [sampler.holds(sequence, 5) for sequence in (1, 2, 3)] == [True, False, True]
        sampler.sample(logits, [self.draw(())._replace(sequence=sequence) for sequence in (2, 1)])
        assert [sampler.holds(sequence, 5) for sequence in (1, 2, 3)] == [True, True, False]
        sampler.release(1)
        assert not sampler.holds(1, 5)

    def test_counts_end_at_their_most_without_changing_other_bits(self) -> None:
        sampler, logits = DeviceSampler(1, 4, DEVICE), torch.tensor([[0.0, 9e9, 0.0, 0.0]]).to(DEVICE)
        sampler.add(9, (1,), (1,) * 40000)
        rules = RowRules(LogitRules(frequency_penalty=1.0))
        sampler.sample(logits, [Draw(GREEDY, 0, 40001, rules, 9)])
        assert sampler._counts.table.tolist() == [[0, -1, 0, 0]]  # all bits: in the prompt, and 32,767 times after it


def test_kernels_with_and_without_filters_are_compiled_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    variants: list[bool] = []

    class Noted:
        def __getitem__(self, _grid: object) -> Callable[..., None]:
            return lambda *_, **constants: variants.append(constants["FILTERS"])

    monkeypatch.setattr(launch, "choose", Noted())
    DeviceSampler(2, 50, DEVICE).compile(torch.bfloat16)
    assert variants == [False, True]
