"""transformers models behind our interface: families we have no decoder for, and one we have."""

from __future__ import annotations

import functools
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from paceline.models.adapter import TransformersModel
from paceline.models.interface import Chunk, LanguageModel

SMALL = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
LONG = SMALL | {"intermediate_size": 64, "max_position_embeddings": 64}
GROUPED = LONG | {"num_key_value_heads": 2, "pad_token_id": 0}

MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=101, n_embd=32, n_layer=3, n_head=4, n_positions=64)
    ),
    "gpt-neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**LONG)),
    "phi": lambda: transformers.PhiForCausalLM(transformers.PhiConfig(**LONG)),
    "phi3-window": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**GROUPED, sliding_window=9)),
    "mistral-window": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**GROUPED, sliding_window=9)),
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**GROUPED, num_local_experts=4)),
}
all_models = pytest.mark.parametrize("name", MODELS)


@functools.cache
def hf(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 101, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def expected(name: str, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    output = hf(name)(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    return output.logits[0], torch.stack(output.hidden_states, dim=2)[0]


@all_models
def test_a_ragged_batch_in_chunks_with_truncation_equals_the_model(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model: LanguageModel = TransformersModel(hf(name))
        assert (model.vocab_size, model.context, model.device) == (101, 64, torch.device("cpu"))
        lengths = (33, 12, 26)
        prompts = [tokens(length, seed) for seed, length in enumerate(lengths)]
        cache = model.new_cache(slots=3, capacity=50)
        model([Chunk(slot, ids[:-4], 0) for slot, ids in enumerate(prompts)], cache)
        model([Chunk(slot, tokens(slot + 1, seed=9)) for slot in range(3)], cache)
        for slot, length in enumerate(lengths):
            cache.truncate(slot, length - 4 - slot)
        chunks = [Chunk(slot, prompts[slot][cache.length(slot) : -1], 2) for slot in (2, 0, 1)]
        scores = model(chunks, cache, features=(3, 0, 1))
        last = model([Chunk(slot, prompts[slot][-1:]) for slot in (2, 0, 1)], cache)
    for row, slot in enumerate((2, 0, 1)):
        logits_TV, features_TFH = expected(name, prompts[slot])
        assert (scores.logits[row] - logits_TV[-3:-1]).abs().max() < 1e-4
        assert (last.logits[row][0] - logits_TV[-1]).abs().max() < 1e-4
        held = len(chunks[row].tokens)
        assert (scores.features[row] - features_TFH[-1 - held : -1, [3, 0, 1]]).abs().max() < 1e-4
        assert cache.length(slot) == lengths[slot]
    assert not scores.logits[0].requires_grad


@all_models
def test_replay_after_truncation_gives_the_same_bits(name: str) -> None:
    model = TransformersModel(hf(name))
    cache = model.new_cache(1, 40)
    model([Chunk(0, tokens(14), 0)], cache)
    first = model([Chunk(0, [7, 8, 9], 3)], cache).logits[0]
    cache.truncate(0, 14)
    assert torch.equal(model([Chunk(0, [7, 8, 9], 3)], cache).logits[0], first)
    cache.truncate(0, 0)
    assert (model([Chunk(0, [*tokens(14), 7, 8, 9], 3)], cache).logits[0] - first).abs().max() < 1e-4


def test_outputs_are_float32_rows_of_the_end() -> None:
    gpt2 = MODELS["gpt2"]().eval().to(torch.bfloat16)
    model = TransformersModel(gpt2)
    cache = model.new_cache(2, 9)
    rows: list[int] = []
    hook = gpt2.lm_head.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    scores = model([Chunk(0, [1, 2, 3], 0), Chunk(1, [4, 5, 6], 2)], cache)
    hook.remove()
    assert rows == [1, 2], "one is the fewest transformers can be asked for"
    assert [tuple(logits.shape) for logits in scores.logits] == [(0, 101), (2, 101)]
    assert scores.logits[1].dtype == torch.float32
    assert scores.features == []


def test_an_interrupted_pass_leaves_every_layer_as_it_was() -> None:
    model = TransformersModel(hf("phi"))
    cache = model.new_cache(2, 40)
    ids = tokens(10)
    model([Chunk(0, ids, 0)], cache)
    before = model([Chunk(0, [5, 6], 2)], cache).logits[0]
    cache.truncate(0, 10)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = hf("phi").model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model([Chunk(1, [3]), Chunk(0, [9, 9, 9])], cache)
    hook.remove()
    assert (cache.length(0), cache.length(1)) == (10, 0)
    assert torch.equal(model([Chunk(0, [5, 6], 2)], cache).logits[0], before)
    assert (model([Chunk(1, ids, 1)], cache).logits[0][0] - expected("phi", ids)[0][-1]).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: transformers.MambaForCausalLM(transformers.MambaConfig(**SMALL)), "cannot be taken back"),
        (lambda: transformers.RwkvForCausalLM(transformers.RwkvConfig(**SMALL)), "cannot be taken back"),
        (
            lambda: transformers.Lfm2ForCausalLM(
                transformers.Lfm2Config(**SMALL, intermediate_size=64, num_key_value_heads=2, full_attn_idxs=[1])
            ),
            "cannot be taken back",
        ),
        (
            lambda: transformers.OpenAIGPTLMHeadModel(
                transformers.OpenAIGPTConfig(vocab_size=101, n_embd=32, n_layer=2, n_head=4)
            ),
            "cannot be taken back",
        ),
        (
            lambda: transformers.T5ForConditionalGeneration(
                transformers.T5Config(vocab_size=101, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
            ),
            "not a decoder with a language model head",
        ),
        (lambda: transformers.GPT2Model(transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4)), "not a decoder with"),
        (
            lambda: transformers.Gemma3ForCausalLM(
                transformers.Gemma3TextConfig(**GROUPED, head_dim=8, use_bidirectional_attention=True)
            ),
            "lets tokens see later ones",
        ),
        (
            lambda: transformers.BloomForCausalLM(
                transformers.BloomConfig(vocab_size=101, hidden_size=32, n_layer=2, n_head=4)
            ),
            "names no longest sequence: pass context=",
        ),
    ],
)
def test_models_that_cannot_be_rewound_or_placed_are_refused(model: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformersModel(model())


def test_a_model_that_leaves_its_cache_empty_is_refused_when_it_shows() -> None:
    gpt2 = MODELS["gpt2"]().eval()
    forward = gpt2.forward

    def forgetful(input_ids: torch.Tensor, cache: Any = None, **options: Any) -> Any:
        return forward(input_ids, **(options | {"use_cache": False}))

    gpt2.forward = forgetful
    model = TransformersModel(gpt2)
    cache = model.new_cache(1, 8)
    with pytest.raises(ValueError, match="cannot be taken back"):
        model([Chunk(0, [1, 2])], cache)
    assert cache.length(0) == 0


def test_limits() -> None:
    model = TransformersModel(hf("gpt2"))
    with pytest.raises(ValueError, match="cache of 65 tokens exceeds the model's context: ask for at most 64"):
        model.new_cache(1, 65)
    cache = model.new_cache(1, 8)
    with pytest.raises(ValueError, match="its capacity is 8"):
        model([Chunk(0, [1] * 9)], cache)
    with pytest.raises(ValueError, match="token id 101 is not one of the model's 101"):
        model([Chunk(0, [101])], cache)
    with pytest.raises(ValueError, match=r"features \[4\] do not exist: this model has 0 to 3"):
        model([Chunk(0, [1])], cache, features=[4])
    with pytest.raises(ValueError, match="cannot be cut to 1"):
        cache.truncate(0, 1)
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=101, hidden_size=32, n_layer=2, n_head=4))
    assert TransformersModel(bloom, context=40).context == 40


def test_training_mode_is_refused() -> None:
    model = TransformersModel(MODELS["gpt2"]().train())
    with pytest.raises(ValueError, match=r"training mode.*call model.eval"):
        model([Chunk(0, [1])], model.new_cache(1, 4))


def test_longrope_stays_within_the_original_context() -> None:
    """Beyond it the frequencies depend on how many tokens a pass scores."""
    rope = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = transformers.Phi3Config(**GROUPED, original_max_position_embeddings=32, rope_scaling=rope)
    assert TransformersModel(transformers.Phi3ForCausalLM(config)).context == 32


def test_importing_it_does_not_import_transformers() -> None:
    code = "import sys, paceline.models.adapter; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
