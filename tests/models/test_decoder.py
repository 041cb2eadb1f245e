"""Our decoder against transformers, on tiny random models of every architecture, read through `checkpoints.folder`."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from paceline.checkpoints.folder import read_config, read_tensors
from paceline.models.config import Layer, ModelConfig, Rope
from paceline.models.decoder import FEW_ROWS, Decoder, Norm
from paceline.models.interface import Chunk, LanguageModel

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
WINDOW = 9


def scaled(**rope: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10_000.0, **rope}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biases-tied-wide-heads": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 20},
    ),
    "llama-linear": ("Llama", scaled(rope_type="linear", factor=3.0)),
    "llama-dynamic": ("Llama", scaled(rope_type="dynamic", factor=2.0)),
    "llama-llama3": (
        "Llama",
        scaled(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama-yarn": ("Llama", scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama-yarn-mscale": (
        "Llama",
        scaled(
            rope_type="yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            mscale=0.7,
            mscale_all_dim=1.3,
            beta_fast=8.0,
            beta_slow=0.5,
            truncate=False,
        ),
    ),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "mistral-multi-query": ("Mistral", {"sliding_window": None, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen3": ("Qwen3", {"head_dim": 20}),
    "smollm3": (
        "SmolLM3",
        {"num_hidden_layers": 5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True},
    ),
    "gemma2": ("Gemma2", {"head_dim": 20, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 7,
            "head_dim": 20,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 20.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
    ),
}
all_cases = pytest.mark.parametrize("case", CASES)


def reference(case: str, **changes: Any) -> Any:
    """A random model with nothing left at a value that hides faults (norms at 1, biases at 0)."""
    family, options = CASES[case]
    config_class = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(
        config_class(**(SIZES | options | changes)), attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(1.5 * parameter.shape[1] ** -0.5 * torch.randn_like(parameter))
    return model.eval().requires_grad_(False)


def saved(model: Any) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    with tempfile.TemporaryDirectory() as name:
        model.save_pretrained(name)
        config = read_config(Path(name))
        assert config is not None
        return config, {name: tensor.clone() for name, tensor in read_tensors(Path(name))}


@functools.cache
def pair(case: str) -> tuple[Any, Decoder]:
    model = reference(case)
    config, tensors = saved(model)
    return model, Decoder.from_tensors(config, tensors.items(), dtype=torch.float32)


@functools.cache
def llama() -> Decoder:
    return pair("llama")[1]


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 101, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected(model: Any, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, V] and features [T, L + 1, H] of one pass without a cache."""
    output = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    return output.logits[0].float(), torch.stack(output.hidden_states, dim=2)[0].float()


# Parity


@all_cases
def test_logits_and_features_equal_transformers_in_chunks(case: str) -> None:
    model, decoder = pair(case)
    ids = tokens(40)
    every = range(decoder.config.num_layers + 1)
    cache = decoder.new_cache(slots=1, capacity=40)
    logits, features, done = [], [], 0
    for count in (1, FEW_ROWS + 2, 5, 1, 1, 14):
        scores = decoder([Chunk(0, ids[done : done + count], count)], cache, every)
        logits += scores.logits
        features += scores.features
        done += count
    assert done == 40 == cache.length(0)
    logits_TV, features_TFH = expected(model, ids)
    assert logits_TV.abs().max() > 3, "a flat model would hide faults"
    assert (torch.cat(logits) - logits_TV).abs().max() < 1e-4
    assert (torch.cat(features) - features_TFH).abs().max() < 1e-4
    assert logits[0].dtype == torch.float32


@all_cases
def test_ragged_batch_equals_transformers_also_after_truncation(case: str) -> None:
    model, decoder = pair(case)
    lengths = (33, 12, 26, 7)  # beyond the window, and not
    prompts = [tokens(length, seed) for seed, length in enumerate(lengths)]
    wanted = [expected(model, ids)[0] for ids in prompts]
    cache = decoder.new_cache(slots=5, capacity=40)

    # 1. Read all but five tokens, a wrong draft after them, then forget the draft and more.
    decoder([Chunk(slot, ids[:-5], 0) for slot, ids in enumerate(prompts)], cache)
    decoder([Chunk(slot, tokens(slot + 1, seed=9)) for slot in range(4)], cache)
    for slot, length in enumerate(lengths):
        cache.truncate(slot, length - 5 - (slot % 2))

    # 2. Slots in another order, chunks of different lengths, beside a newcomer.
    order = (2, 0, 3, 1)
    chunks = [Chunk(slot, prompts[slot][cache.length(slot) : -1], 2) for slot in order]
    scores = decoder([Chunk(4, tokens(3, seed=5)), *chunks], cache)
    for slot, logits_OV in zip(order, scores.logits[1:], strict=True):
        assert (logits_OV - wanted[slot][-3:-1]).abs().max() < 1e-4
    scores = decoder([Chunk(slot, prompts[slot][-1:]) for slot in order], cache)
    for slot, logits_OV in zip(order, scores.logits, strict=True):
        assert (logits_OV[0] - wanted[slot][-1]).abs().max() < 1e-4


@all_cases
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_no_more_than_transformers(case: str, dtype: torch.dtype) -> None:
    model, decoder = pair(case)
    ids = tokens(30)
    exact, _ = expected(model, ids)
    theirs, _ = expected(reference(case).to(dtype), ids)
    half = Decoder.from_tensors(decoder.config, decoder.state_dict().items(), dtype=dtype)
    cache = half.new_cache(slots=1, capacity=30)
    ours = [*half([Chunk(0, ids[:20], 20)], cache).logits, *half([Chunk(0, ids[20:], 10)], cache).logits]
    error, allowed = (torch.cat(ours) - exact).std(), (theirs - exact).std()
    assert cache.keys[0].dtype == half.dtype == dtype
    assert ours[0].dtype == torch.float32
    assert 0 < error < 1.3 * allowed + 0.01 * exact.std()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scaled_embeddings_are_transformers_bits(dtype: torch.dtype) -> None:
    model, ids = reference("gemma3").to(dtype), tokens(9)
    _, decoder = pair("gemma3")
    half = Decoder.from_tensors(decoder.config, decoder.state_dict().items(), dtype=dtype)
    ours = half([Chunk(0, ids, 0)], half.new_cache(1, 9), features=[0]).features[0][:, 0]
    assert torch.equal(ours.float(), expected(model, ids)[1][:, 0])


def test_dynamic_rope_beyond_the_original_context() -> None:
    """transformers' numbers for text decoded token by token, and the same however the text is cut into passes."""
    model = reference("llama-dynamic", max_position_embeddings=12)
    config, tensors = saved(model)
    decoder = Decoder.from_tensors(config, tensors.items(), dtype=torch.float32)
    assert decoder.context == 24
    ids, theirs = tokens(24), transformers.DynamicCache()
    stepwise = torch.cat([model(torch.tensor([[token]]), cache=theirs).logits[0] for token in ids])
    cache = decoder.new_cache(slots=2, capacity=24)
    assert (decoder([Chunk(0, ids, 24)], cache).logits[0] - stepwise).abs().max() < 1e-4
    for start in (0, 7, 14):
        decoder([Chunk(1, ids[start : start + 7], 0)], cache)
    cache.truncate(1, 13)
    assert (decoder([Chunk(1, ids[13:], 11)], cache).logits[0] - stepwise[13:]).abs().max() < 1e-4


def test_explicit_rope_factors_do_what_llama3_scaling_does() -> None:
    _, decoder = pair("llama-llama3")
    rope = decoder.config.layers[0].rope
    assert rope is not None
    size = decoder.config.head_dim
    plain = 10_000.0 ** -(torch.arange(0, size, 2) / size)
    wavelength = 2 * torch.pi / plain
    smooth = ((32 / wavelength - 1) / 3).clamp(0, 1)
    factors = 1 / (smooth + (1 - smooth) / 8)
    explicit = Rope(theta=10_000.0, factors=tuple(factors.tolist()))
    config = replace(decoder.config, layers=(Layer(rope=explicit),) * 3)
    other = Decoder.from_tensors(config, decoder.state_dict().items(), dtype=torch.float32)
    chunk = Chunk(0, tokens(40), 40)
    both = [model([chunk], model.new_cache(1, 40)).logits[0] for model in (decoder, other)]
    assert (both[0] - both[1]).abs().max() < 1e-4
    wrong = replace(config, layers=(Layer(rope=Rope(factors=(1.0,))),) * 3)
    with pytest.raises(ValueError, match=r"1 rope factors for heads of size 12, which need 6"):
        Decoder(wrong)([Chunk(0, [1])], Decoder(wrong).new_cache(1, 4))


# The interface


def test_it_is_a_language_model() -> None:
    model: LanguageModel = llama()
    assert (model.vocab_size, model.context, model.device) == (101, 64, torch.device("cpu"))
    with pytest.raises(ValueError, match="cache of 65 tokens exceeds the model's context: ask for at most 64"):
        model.new_cache(1, 65)


def test_only_the_rows_asked_for_are_scored_in_the_order_given() -> None:
    decoder, ids = llama(), tokens(12)
    full = decoder([Chunk(0, ids, 12)], decoder.new_cache(1, 12)).logits[0]
    cache = decoder.new_cache(3, 12)
    rows: list[int] = []
    hook = decoder.head.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))  # type: ignore[union-attr]
    scores = decoder([Chunk(2, ids[:9], 3), Chunk(0, ids[:4], 0), Chunk(1, ids[:6])], cache, features=(3, 1))
    hook.remove()
    assert rows == [4]
    assert [tuple(logits.shape) for logits in scores.logits] == [(3, 101), (0, 101), (1, 101)]
    assert (scores.logits[0] - full[6:9]).abs().max() < 1e-5
    assert (scores.logits[2] - full[5:6]).abs().max() < 1e-5
    assert [tuple(features.shape) for features in scores.features] == [(9, 2, 48), (4, 2, 48), (6, 2, 48)]
    assert decoder([], cache).logits == []
    assert decoder([Chunk(0, ids[4:])], cache).features == []
    with pytest.raises(ValueError, match=r"features \[4\] do not exist: this model has 0 to 3"):
        decoder([Chunk(0, [1])], cache, features=[4])


def test_two_chunks_of_one_slot_in_a_pass_are_its_next_tokens() -> None:
    decoder, ids = llama(), tokens(9)
    whole = decoder([Chunk(0, ids, 9)], decoder.new_cache(1, 9)).logits[0]
    parts = decoder([Chunk(0, ids[:4], 4), Chunk(0, ids[4:], 5)], decoder.new_cache(1, 9)).logits
    assert (torch.cat(parts) - whole).abs().max() < 1e-5


@pytest.mark.parametrize("case", ["llama", "mistral", "gemma2"])
def test_replay_after_truncation_gives_the_same_bits(case: str) -> None:
    _, decoder = pair(case)
    ids = tokens(20)
    cache = decoder.new_cache(2, 30)
    decoder([Chunk(1, ids, 0)], cache)

    def generate() -> list[torch.Tensor]:
        steps = [decoder([Chunk(1, [7, 8, 9], 3)], cache).logits[0]]
        for _ in range(4):
            steps.append(decoder([Chunk(1, [int(steps[-1][-1].argmax())])], cache).logits[0])
        return steps

    first = generate()
    cache.truncate(1, 20)
    decoder([Chunk(1, tokens(10, seed=4), 0)], cache)  # another continuation, overwritten below
    cache.truncate(1, 20)
    assert all(torch.equal(a, b) for a, b in zip(first, generate(), strict=True))


def test_what_lies_beyond_a_length_is_never_read() -> None:
    decoder, ids = llama(), tokens(10)
    clean, dirty = decoder.new_cache(1, 20), decoder.new_cache(1, 20)
    for tensor in (*dirty.keys, *dirty.values):
        tensor.fill_(torch.nan)
    for chunk in (Chunk(0, ids[:6], 6), Chunk(0, ids[6:7]), Chunk(0, ids[7:], 3)):
        assert torch.equal(decoder([chunk], clean).logits[0], decoder([chunk], dirty).logits[0])


def test_neighbours_do_not_change_a_sequence() -> None:
    decoder, ids = llama(), tokens(11)
    alone = decoder([Chunk(0, ids, 11)], decoder.new_cache(1, 40)).logits[0]
    for lengths in ([1, 30], [11, 11, 11], [2] * 7):
        chunks = [Chunk(slot + 1, tokens(length, seed=slot)) for slot, length in enumerate(lengths)]
        scores = decoder([*chunks, Chunk(0, ids, 11)], decoder.new_cache(len(lengths) + 1, 40))
        assert (scores.logits[-1] - alone).abs().max() < 1e-5


def test_a_pass_that_fails_leaves_the_cache_as_it_was() -> None:
    decoder, ids = llama(), tokens(8)
    cache, untouched = decoder.new_cache(2, 20), decoder.new_cache(2, 20)
    for each in (cache, untouched):
        decoder([Chunk(0, ids, 0)], each)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for part in (decoder.layers[1], decoder.head):
        assert isinstance(part, torch.nn.Module)
        hook = part.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            decoder([Chunk(0, [5, 6]), Chunk(1, [7])], cache)
        hook.remove()
    assert (cache.length(0), cache.length(1)) == (8, 0)
    again = [decoder([Chunk(0, [9])], each).logits[0] for each in (cache, untouched)]
    assert torch.equal(*again)


# Building and cutting


def test_loading_builds_no_graph_and_copies_nothing_that_fits() -> None:
    tensors = dict(llama().state_dict())
    decoder = Decoder.from_tensors(llama().config, tensors.items(), dtype=torch.float32)
    assert not any(parameter.requires_grad for parameter in decoder.parameters())
    assert not decoder([Chunk(0, [1, 2])], decoder.new_cache(1, 4)).logits[0].requires_grad
    given = {tensor.data_ptr() for tensor in tensors.values()}
    assert given == {parameter.data_ptr() for parameter in decoder.parameters()}
    assert sum(parameter.numel() for parameter in decoder.parameters()) == decoder.config.num_parameters


def test_inference_mode_may_begin_and_end_anywhere() -> None:
    decoder, ids = llama(), tokens(6)
    with torch.inference_mode():
        cache = decoder.new_cache(1, 6)
        first = decoder([Chunk(0, ids[:3], 3)], cache).logits[0]
    second = decoder([Chunk(0, ids[3:], 3)], cache).logits[0]
    whole = decoder([Chunk(0, ids, 6)], decoder.new_cache(1, 6)).logits[0]
    assert (torch.cat((first, second)) - whole).abs().max() < 1e-5


def test_layers_can_be_trained_and_the_cache_stays_out_of_the_graph() -> None:
    decoder = Decoder(llama().config)
    cache = decoder.new_cache(1, 8)
    logits = decoder([Chunk(0, tokens(4), 4)], cache).logits[0]
    logits.square().mean().backward()
    assert decoder.get_parameter("layers.0.attention.q.weight").grad is not None
    assert not cache.keys[0].requires_grad


def test_norms_stay_float32_in_half_precision() -> None:
    decoder = Decoder.from_tensors(llama().config, llama().state_dict().items(), dtype=torch.bfloat16)
    norms = [module for module in decoder.modules() if isinstance(module, Norm)]
    assert len(norms) == 7
    assert {norm.weight.dtype for norm in norms} == {torch.float32}
    assert decoder.get_parameter("layers.0.mlp.up.weight").dtype == torch.bfloat16


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1.0, 1e4])
def test_the_norm_is_torchs(scale: float) -> None:
    norm = Norm(48, eps=1e-6)
    norm.weight.data.copy_(torch.randn(48))
    x = scale * torch.randn(5, 2, 48)
    wanted = torch.nn.functional.rms_norm(x, (48,), norm.weight, 1e-6)
    assert torch.allclose(norm(x), wanted, rtol=1e-5, atol=0)


def test_from_tensors_wants_every_tensor_once_in_its_shape() -> None:
    config, tensors = llama().config, dict(llama().state_dict())

    def build(items: list[tuple[str, torch.Tensor]]) -> Decoder:
        return Decoder.from_tensors(config, items, dtype=torch.float32)

    items = list(tensors.items())
    with pytest.raises(ValueError, match=r"1 tensors of this llama model are missing, head.weight first"):
        build([item for item in items if item[0] != "head.weight"])
    with pytest.raises(ValueError, match=r"tensor norm.weight is given twice or has no place"):
        build([*items, ("norm.weight", tensors["norm.weight"])])
    with pytest.raises(ValueError, match=r"tensor layers.0.mlp.up.bias is given twice or has no place"):
        build([*items, ("layers.0.mlp.up.bias", torch.zeros(80))])
    with pytest.raises(ValueError, match=r"tensor norm.weight has shape \[1\], the configuration needs \[48\]"):
        build([("norm.weight", torch.zeros(1)), *items])


def test_meta_device_then_assign() -> None:
    with torch.device("meta"):
        decoder = Decoder(llama().config)
    decoder.load_state_dict(llama().state_dict(), assign=True)
    chunk = Chunk(0, tokens(5), 5)
    both = [model([chunk], model.new_cache(1, 5)).logits[0] for model in (decoder, llama())]
    assert torch.equal(*both)


def test_cut_shares_the_tensors_and_is_the_model_of_those_layers() -> None:
    _, decoder = pair("gemma3")  # layers of two kinds
    cut = decoder.cut([0, 5, 6])
    whole = {parameter.data_ptr() for parameter in decoder.parameters()}
    assert {parameter.data_ptr() for parameter in cut.parameters()} <= whole
    assert [layer.window for layer in cut.config.layers] == [WINDOW, None, WINDOW]
    names = {f"layers.{new}.": f"layers.{old}." for new, old in enumerate((0, 5, 6))}
    state = decoder.state_dict()

    def original(name: str) -> str:
        return next((name.replace(new, old, 1) for new, old in names.items() if name.startswith(new)), name)

    copied = [(name, state[original(name)]) for name in cut.state_dict()]
    rebuilt = Decoder.from_tensors(cut.config, copied, dtype=torch.float32)
    chunk = Chunk(0, tokens(20), 20)
    logits = [model([chunk], model.new_cache(1, 20)).logits[0] for model in (cut, rebuilt, decoder)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2])
    everything = decoder.cut(range(7))
    assert torch.equal(everything([chunk], everything.new_cache(1, 20)).logits[0], logits[2])
    for layers in ([], [7], [-1]):
        with pytest.raises(ValueError, match="name at least one, from 0 to 6"):
            decoder.cut(layers)


def test_impossible_shapes_are_refused() -> None:
    config = llama().config
    for changes in ({"num_heads": 3}, {"head_dim": 5}, {"layers": ()}):
        with pytest.raises(ValueError, match="must be a multiple"):
            Decoder(replace(config, **changes))
