"""SmolLM2-135M through the public interface: speculation changes nothing but the time, in any format of weights."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

import paceline.kernels as kernels
from paceline import LLM, SamplingParams, load
from paceline.checkpoints import gguf_file
from paceline.checkpoints.load import Checkpoint
from paceline.decoding.stats import Stats
from paceline.models.decoder import Decoder
from paceline.models.interface import Chunk
from paceline.models.quant import Quantized
from paceline.proposers.draft_model import DraftModelProposer
from paceline.proposers.feature import FeatureProposer
from paceline.proposers.first import FirstOf
from paceline.proposers.ngram import NgramProposer
from paceline.sampling import rejection
from paceline.sampling.distribution import Distribution, on_host
from paceline.sampling.sampler import RULES, Rule
from tests.decoding.test_round import accept_everything, shared_noise_propose

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("real_threads")]

PROMPTS = [
    "def fibonacci(n):\n",
    "The capital of France is",
    "1, 2, 3, 4, 5,",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "{'name': 'Ada', 'age': 36}, {'name': 'Grace', 'age': 45}, {'name':",
    "Q: Why is the sky blue?\nA:",
    "La pluie tombe sur",
    "import numpy as np\nx = np.zeros((3, 3))\nx[0, 0] = 1\nx[1, 1] = 1\nx[",
]
LENGTHS = [14, 5, 11, 8, 14, 6, 9, 12]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load("smollm2-135m")


@pytest.fixture(scope="module")
def drafts(checkpoint: Checkpoint) -> dict[str, Any]:
    assert isinstance(checkpoint.model, Decoder)
    return {
        "layer cut": checkpoint.model.cut((0, 1, 28, 29)),
        "ngram": "ngram",
        "bad": checkpoint.model.cut((7,)),
        "shipped": "smollm2-135m-eagle3",
    }


def llm(checkpoint: Checkpoint, draft: Any, **options: Any) -> LLM:
    return LLM(checkpoint.model, draft, tokenizer=checkpoint.tokenizer, **options)


def texts(model: LLM, prompts: list[str], params: list[SamplingParams]) -> list[list[int]]:
    return [completion.token_ids for completion in model.generate(prompts, params)]


@pytest.fixture(scope="module")
def plain(checkpoint: Checkpoint) -> Callable[[str], list[list[int]]]:
    """Plain decoding, each prompt alone: what every other way has to equal."""
    found: dict[str, list[list[int]]] = {}

    def decode(verify: str) -> list[list[int]]:
        if verify not in found:
            model = llm(checkpoint, None, verify=verify, max_num_seqs=1)
            found[verify] = texts(model, PROMPTS, params(verify))
        return found[verify]

    return decode


def params(verify: str) -> list[SamplingParams]:
    sampled = {"temperature": 0.8, "top_p": 0.95} if verify == "coupled" else {"temperature": 0.0}
    return [SamplingParams(max_tokens=n, seed=i, **sampled) for i, n in enumerate(LENGTHS)]  # type: ignore[arg-type]


def test_the_shipped_draft_is_right_two_times_in_five(checkpoint: Checkpoint) -> None:
    prompts = [
        f"{prompt}\n" for prompt in ("def add(a, b):", "def is_even(n):", "# Sum of a list", "Q: What is 3 + 4?\nA:")
    ]
    completions = llm(checkpoint, "smollm2-135m-eagle3", draft_tokens=1).generate(
        prompts, SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    )
    whole = sum((completion.outputs[0].stats for completion in completions), Stats())
    assert whole.accepted / whole.drafted > 0.4, whole


def test_auto_is_prompt_lookup_and_behind_it_the_draft_that_comes_with_the_model(
    checkpoint: Checkpoint, plain: Callable[[str], list[list[int]]]
) -> None:
    auto = LLM("smollm2-135m", draft_tokens=3, max_num_seqs=1)
    proposer = auto.proposers(1, 64)
    assert isinstance(proposer, FirstOf)
    lookup, draft = proposer.proposers
    assert isinstance(lookup, NgramProposer)
    assert isinstance(draft, FeatureProposer)
    assert draft.p_min == auto.draft_p_min == 0.3
    assert texts(auto, PROMPTS, params("token")) == plain("token")
    # A chance of one's own holds, and other drafts have none.
    assert auto.with_draft("auto", p_min=0.0).draft_p_min == 0
    assert auto.with_draft("ngram+smollm2-135m-eagle3").draft_p_min == 0
    # A model without a name may be any of these sizes.
    assert isinstance(llm(checkpoint, "auto").proposers(1, 64), NgramProposer)


@pytest.mark.parametrize("k", [1, 2, 4, 7])
@pytest.mark.parametrize("name", ["layer cut", "ngram", "bad", "shipped"])
def test_greedy_tokens_are_the_same_for_every_k_draft_and_batch(
    checkpoint: Checkpoint, drafts: dict[str, Any], plain: Callable[[str], list[list[int]]], name: str, k: int
) -> None:
    # Eight at once; three at once, sequences entering as others leave; alone.
    for slots, count in ((8, 8), (3, 8), (1, 2)):
        model = llm(checkpoint, drafts[name], draft_tokens=k, max_num_seqs=slots)
        assert texts(model, PROMPTS[:count], params("token")[:count]) == plain("token")[:count], slots


def test_greedy_batches_without_a_draft_equal_single_decoding(
    checkpoint: Checkpoint, plain: Callable[[str], list[list[int]]]
) -> None:
    for slots in (3, 8):
        assert texts(llm(checkpoint, None, max_num_seqs=slots), PROMPTS, params("token")) == plain("token")


@pytest.mark.parametrize("name", ["layer cut", "ngram", "bad", "shipped"])
def test_coupled_sampling_gives_the_same_text_for_every_draft(
    checkpoint: Checkpoint, drafts: dict[str, Any], plain: Callable[[str], list[list[int]]], name: str
) -> None:
    for k, slots in ((4, 8), (1, 3)):
        model = llm(checkpoint, drafts[name], draft_tokens=k, max_num_seqs=slots, verify="coupled")
        assert texts(model, PROMPTS, params("coupled")) == plain("coupled")


def test_a_request_with_a_seed_gives_the_same_text_alone_and_among_seven_others(checkpoint: Checkpoint) -> None:
    for verify in ("token", "block"):
        asked = [SamplingParams(max_tokens=10, seed=100 + i, temperature=0.9, top_p=0.9) for i in range(8)]
        model = llm(checkpoint, "ngram", verify=verify)
        together = texts(model, PROMPTS, asked)
        for i in (0, 2, 4):
            assert texts(model, PROMPTS[i : i + 1], asked[i : i + 1])[0] == together[i]


# ---- greedy equality over long texts, in every format ----

MORE_PROMPTS = [
    *PROMPTS,
    "Write a haiku about the sea.",
    "The best way to learn programming is",
    "In 1969,",
    "SELECT name FROM users WHERE",
    "Dear Sir or Madam,",
    "Chapter 1\n\nIt was",
    "Ingredients:\n- 2 eggs\n-",
    "def quicksort(arr):",
    "To be, or not to be,",
    "The mitochondria is",
    "<html>\n<head>",
    "Yesterday I went to the market and",
]
BLOCKS = {"q8_0": GGMLQuantizationType.Q8_0, "q4_0": GGMLQuantizationType.Q4_0, "q4_1": GGMLQuantizationType.Q4_1}


def in_format(checkpoint: Checkpoint, format: str) -> Decoder:
    """The built-in model with every matrix in this format, rounded to it where that has to be."""
    file = gguf_file.read_gguf(checkpoint.source.path)
    config = gguf_file.read_config(file)

    def tensors() -> Iterator[tuple[str, torch.Tensor | Quantized]]:
        for name, tensor in gguf_file.read_tensors(file, config):
            plain = tensor.dequantize() if isinstance(tensor, Quantized) else tensor
            if plain.dim() < 2 or format not in BLOCKS:
                yield name, plain
                continue
            blocks = torch.from_numpy(quantize(plain.numpy(), BLOCKS[format]))
            yield name, Quantized(format=format, blocks=blocks.unflatten(1, (plain.shape[1] // 32, -1)))

    dtype = None if format in BLOCKS else getattr(torch, format)
    return Decoder.from_tensors(config, tensors(), dtype=dtype, packed=True)


@pytest.mark.skipif(not kernels.available(), reason="needs a C compiler")
@pytest.mark.parametrize(
    ("format", "prompts"),
    [
        ("float32", 3),
        ("bfloat16", 20),
        ("float16", 4),
        ("q8_0", 20),
        ("q4_0", 4),
        ("q4_1", 4),
        ("q8_0 int8", 4),
        ("q4_0 int8", 4),
        ("q4_1 int8", 20),
    ],
)
def test_greedy_texts_of_200_tokens_are_the_same_with_and_without_a_draft(
    checkpoint: Checkpoint, format: str, prompts: int
) -> None:
    """Bit for bit the same logits, whatever is scored beside them: so no near-tie can part two texts.

    All 20 prompts in all formats would take seven minutes.
    """
    format, _, int8 = format.partition(" ")
    model = in_format(checkpoint, format)
    if int8:
        assert model.set_int8_activations() == 211
    asked = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)

    def texts(draft: Any, count: int = prompts, **options: Any) -> list[list[int]]:
        engine = LLM(model, draft, tokenizer=checkpoint.tokenizer, **options)
        return [completion.token_ids for completion in engine.generate(MORE_PROMPTS[:count], asked)]

    plain = texts(None, max_num_seqs=10)
    assert texts("ngram", max_num_seqs=3, draft_tokens=7) == plain
    assert texts(None, count=1, max_num_seqs=1) == plain[:1]
    assert texts("ngram", count=2, max_num_seqs=1, draft_tokens=4) == plain[:2]
    assert texts(model.cut((0, 1, 28, 29)), count=1, max_num_seqs=1, draft_tokens=4) == plain[:1]


def test_int8_activations_are_another_target_close_to_the_first(checkpoint: Checkpoint) -> None:
    rounding = LLM("smollm2-135m", None, activations="int8")
    assert any("211 matrices" in note and "int8" in note for note in rounding.notes)
    ids = rounding.tokenizer.encode(MORE_PROMPTS[3])
    p_TV, whole_TV = (
        model([Chunk(0, ids, outputs=len(ids))], model.new_cache(1, 64)).logits[0].double().softmax(-1)
        for model in (rounding.target, LLM("smollm2-135m", None).target)
    )
    distance_T = (p_TV - whole_TV).abs().sum(-1) / 2
    assert 0.001 < distance_T.mean() < 0.1
    assert (p_TV.argmax(-1) == whole_TV.argmax(-1)).double().mean() > 0.85


def test_a_float16_cache_takes_half_the_memory_and_keeps_texts_equal(checkpoint: Checkpoint) -> None:
    half = LLM("smollm2-135m", None, kv_cache_dtype="float16")
    assert isinstance(half.target, Decoder)
    cache = half.target.new_cache(1, 64)
    assert cache.keys[0].dtype == cache.values[0].dtype == torch.float16
    assert any("float16" in note for note in half.notes)
    asked = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    plain = half.generate(MORE_PROMPTS[:3], asked)
    drafted = LLM(half.target, "ngram", tokenizer=half.tokenizer, max_num_seqs=2).generate(MORE_PROMPTS[:3], asked)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    whole = LLM("smollm2-135m", None).target
    ids = half.tokenizer.encode(MORE_PROMPTS[3])
    logits = [model([Chunk(0, ids)], model.new_cache(1, 64)).logits[0] for model in (half.target, whole)]
    assert 0 < (logits[0] - logits[1]).abs().max() < 0.05 * logits[1].abs().max()


# ---- the distribution, on the real model ----

TOP, RUNS = 3, 256
# Weissman et al. 2003 at 1e-6, for the nine outcomes of two tokens under top_k = 3
BOUND = float(np.sqrt(2 * (TOP**2 * np.log(2) + np.log(1e6)) / RUNS))
SEED_PROMPT = "The weather today is"


def distribution(model: Decoder, ids: list[int]) -> dict[tuple[int, int], float]:
    """Of the second and third generated tokens, summed over the first: the model's own logits, top 3, T = 1."""

    def top(tokens: list[int]) -> list[tuple[int, float]]:
        (logits,) = model([Chunk(0, tokens)], model.new_cache(1, 64)).logits
        values, found = logits[0].double().topk(TOP)
        return list(zip(found.tolist(), values.softmax(-1).tolist(), strict=True))

    total: defaultdict[tuple[int, int], float] = defaultdict(float)
    for first, p1 in top(ids):
        for second, p2 in top([*ids, first]):
            for third, p3 in top([*ids, first, second]):
                total[second, third] += p1 * p2 * p3
    return dict(total)


def gap(checkpoint: Checkpoint) -> float:
    """L1 distance of the second and third tokens of many completions from the model's own distribution."""
    target = checkpoint.model
    assert isinstance(target, Decoder)
    # The target itself with flatter logits: mostly the same three tokens, with other probabilities.
    draft = target.cut(range(target.config.num_layers))
    draft.norm = deepcopy(target.norm)
    draft.norm.weight.mul_(0.2)
    model = llm(checkpoint, draft, draft_tokens=2, max_num_seqs=64)
    asked = SamplingParams(max_tokens=4, top_k=TOP, seed=11, n=RUNS, ignore_eos=True)
    (completion,) = model.generate(SEED_PROMPT, asked)
    counts = Counter((output.token_ids[1], output.token_ids[2]) for output in completion.outputs)
    expected = distribution(target, completion.prompt_token_ids)
    return sum(abs(counts[pair] / RUNS - expected.get(pair, 0.0)) for pair in {*counts, *expected})


def test_sampled_tokens_follow_the_targets_distribution(checkpoint: Checkpoint) -> None:
    assert gap(checkpoint) < BOUND


def test_the_statistical_test_catches_accepting_everything(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RULES, "token", Rule(rejection.propose, accept_everything))
    assert gap(checkpoint) > BOUND


def test_the_statistical_test_catches_a_raw_q(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ratio taken against the draft's softmax before top_k, which its tokens were not drawn from."""
    grow = DraftModelProposer._grow

    def grow_raw(self: DraftModelProposer, g: Any, logits_1D: torch.Tensor) -> None:
        grow(self, g, logits_1D)
        raw_V = torch.from_numpy(self.vocabulary.to_target(on_host(logits_1D)[0])).softmax(-1)
        g.probs[-1] = Distribution(len(raw_V), raw_V.numpy())

    monkeypatch.setattr(DraftModelProposer, "_grow", grow_raw)
    assert gap(checkpoint) > BOUND


def test_the_statistical_test_catches_noise_shared_by_proposal_and_acceptance(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RULES, "token", Rule(shared_noise_propose, rejection.verify))
    assert gap(checkpoint) > BOUND
