"""What a learner trains is what its proposer will compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.checkpoints.drafts import load_draft
from paceline.models.config import Layer, ModelConfig, Rope
from paceline.models.decoder import Decoder
from paceline.models.feature import FeatureDraft
from paceline.models.heads import Heads
from paceline.models.interface import Chunk
from paceline.training.data import Batch
from paceline.training.learners import KINDS, Learner, begin, subsets

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    layers=(Layer(rope=Rope()),) * 7,
    context=64,
    tied=True,
)
IDS = [3, 5, 8, *range(20, 60)]
TEXTS = [[7, 9, 30, 31, 2, 40, 41, 44, 3], [1, 50, 22, 22, 60, 5], [90, 3]]


def target(*, packed: bool = False, **changes: object) -> Decoder:
    torch.manual_seed(1)
    config = replace(CONFIG, **changes)  # type: ignore[arg-type]
    tensors = {
        name: torch.randn(tensor.shape) * 0.25 if tensor.dim() > 1 else 1 + 0.1 * torch.randn(tensor.shape)
        for name, tensor in Decoder(config).state_dict().items()
    }
    return Decoder.from_tensors(config, tensors.items(), dtype=torch.float32, packed=packed)


def learner(kind: str, of: Decoder, ids: Sequence[int] | None = IDS) -> Learner:
    made = begin(kind, of, "tiny", ids, layers=[0, 3], heads=3)
    torch.manual_seed(2)
    for parameter in made.module.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    return made


def batch(of: Decoder, features: Sequence[int], texts: Sequence[Sequence[int]] = TEXTS, prompt: int = 1) -> Batch:
    states, last = [], of.config.num_layers
    with torch.no_grad():
        for text in texts:
            (found,) = of([Chunk(0, text[:-1])], of.new_cache(1, 32), [*features, last]).features
            states.append(found)
        all_NFH = torch.cat(states)
        return Batch(
            lengths=[len(text) - 1 for text in texts],
            tokens_N=torch.tensor([token for text in texts for token in text[:-1]]),
            next_N=torch.tensor([token for text in texts for token in text[1:]]),
            trained_N=torch.tensor([t >= prompt for text in texts for t in range(1, len(text))]),
            features_NFH=all_NFH[:, :-1],
            hidden_NH=all_NFH[:, -1],
            lse_N=of.logits(all_NFH[:, -1]).logsumexp(-1),
        )


def drafted(
    kind: str, module: FeatureDraft | Heads | Decoder, data: Batch, text: int, read: int, steps: int
) -> list[torch.Tensor]:
    """[D] the logits of each step of a draft behind `read` positions of a text whose tokens all get accepted."""
    start = sum(data.lengths[:text])
    following = data.next_N[start : start + data.lengths[text]].tolist()
    if isinstance(module, Heads):
        return list(module(data.hidden_NH[start + read - 1 : start + read], steps)[0])
    if isinstance(module, Decoder):
        tokens = [int(data.tokens_N[start]), *following]
        scores = module([Chunk(0, tokens[: read + steps], outputs=steps)], module.new_cache(1, 32))
        return list(scores.logits[0])
    cache, found = module.new_cache(1, 32), []
    given = module.project(data.features_NFH[start : start + read])
    chunk = Chunk(0, following[:read])
    for step in range(steps):
        logits, given = module([chunk], given, cache)
        found.append(logits[0])
        chunk = Chunk(0, following[read + step : read + step + 1] or [0])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_of_every_step_is_what_a_draft_would_say_there(kind: str) -> None:
    of = target()
    made = learner(kind, of)
    data = batch(of, made.features)
    starts = [sum(data.lengths[:n]) for n in range(len(TEXTS))]
    seen = 0
    with torch.no_grad():
        for step, (logits_RD, rows_R) in enumerate(made.unroll(data, 3)):
            assert len(set(rows_R.tolist())) == len(rows_R)
            for logits_D, row in zip(logits_RD, rows_R.tolist(), strict=True):
                text = max(n for n, start in enumerate(starts) if start <= row)
                read = row - starts[text] - step
                if read < 1:
                    continue
                expected = drafted(kind, made.module, data, text, read, step + 1)[step]  # type: ignore[arg-type]
                torch.testing.assert_close(logits_D, expected, atol=2e-5, rtol=1e-5)
                seen += 1
    assert seen > 10


@pytest.mark.parametrize("kind", KINDS)
def test_only_trained_positions_come_and_all_that_a_step_can_reach(kind: str) -> None:
    of = target()
    made = learner(kind, of)
    data = batch(of, made.features, prompt=4)
    trained = set(data.trained_N.nonzero()[:, 0].tolist())
    # A head drafts from any state; a layer of its own never begins inside a prompt, whose first 4 tokens are given.
    ahead = {"shallow": 0, "heads": 1, "eagle1": 3, "eagle3": 3}[kind]
    for step, (_, rows_R) in enumerate(made.unroll(data, 2)):
        starts = [sum(data.lengths[:n]) for n in range(len(TEXTS))]
        reached = {s + t for s, n in zip(starts, data.lengths, strict=True) for t in range(step + ahead, n)}
        assert set(rows_R.tolist()) == trained & reached


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_what_is_trained_and_nothing_of_the_target(kind: str) -> None:
    of = target()
    before = {name: tensor.clone() for name, tensor in of.state_dict().items()}
    made = learner(kind, of)
    optimiser = torch.optim.SGD([p for p in made.module.parameters() if p.requires_grad], lr=0.1)
    logits = [logits_RD for logits_RD, _ in made.unroll(batch(of, made.features), 3)]
    sum((part**2).mean() for part in logits).backward()  # type: ignore[union-attr]
    trained = {name: p for name, p in made.module.named_parameters() if p.requires_grad}
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in trained.values()), trained.keys()
    optimiser.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in of.state_dict().items())


def test_training_a_cut_leaves_the_packed_target_as_it_was() -> None:
    """A matrix of exactly one panel unpacks without a copy: 16 outputs here."""
    of = target(packed=True, num_heads=2, num_kv_heads=1)
    held = {name: part.packed.data.clone() for name, part in of.named_modules() if getattr(part, "packed", None)}
    assert len(held) > 30
    made = begin("shallow", of, "tiny", IDS, layers=[0, 3])
    with torch.no_grad():
        for parameter in made.module.parameters():
            parameter.add_(1 if parameter.requires_grad else 0)
    for name, data in held.items():
        packed = getattr(of.get_submodule(name), "packed")  # noqa: B009
        assert torch.equal(packed.data, data), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_learner_starts_as_a_saved_draft(kind: str, tmp_path: Path) -> None:
    of = target()
    first, second = learner(kind, of), begin(kind, of, "tiny", IDS, layers=[0, 3], heads=3, seed=5)
    first.save(tmp_path)
    second.start(tmp_path)
    data = batch(of, first.features)
    with torch.no_grad():
        for (one, _), (other, _) in zip(first.unroll(data, 2), second.unroll(data, 2), strict=True):
            assert (one - other).norm() < 0.05 * one.norm()  # bfloat16 on disk
    with pytest.raises(ValueError, match="start from one of the same, or anew"):
        begin(kind, of, "tiny", IDS[1:], layers=[0, 3], heads=3).start(tmp_path)
    other_kind = "heads" if kind != "heads" else "eagle3"
    with pytest.raises(ValueError, match=f"its kind is {kind}, wanted is {other_kind}"):
        begin(other_kind, of, "tiny", IDS, heads=3).start(tmp_path)


def test_later_steps_learn_through_the_earlier_ones() -> None:
    """An unrolled step reads the draft's own state with its gradient: otherwise it would not learn to be read."""
    of = target()
    made = learner("eagle3", of)
    steps = list(made.unroll(batch(of, made.features), 2))
    (steps[1][0] ** 2).mean().backward()
    fused = made.module.get_parameter("fc.weight")
    assert fused.grad is not None
    assert fused.grad.abs().max() > 0


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_draft_says_what_the_learner_says(
    kind: str, ids: list[int] | None, packed: bool, tmp_path: Path
) -> None:
    of = target()
    made = learner(kind, of, ids)
    made.save(tmp_path)
    runs = target(packed=packed)
    loaded = load_draft(tmp_path, runs)
    data = batch(of, made.features)
    assert (loaded.ids is None) == (ids is None)
    with torch.inference_mode():
        for text, read in ((0, 3), (1, 2)):
            expected = drafted(kind, made.module, data, text, read, 2)  # type: ignore[arg-type]
            found = drafted(kind, loaded.module, data, text, read, 2)
            # bfloat16 on disk, and Q8_0 where the kernels run it.
            for f, e in zip(found, expected, strict=True):
                assert (f - e).norm() < 0.1 * e.norm()


def test_subsets_have_as_many_layers_as_asked_for_each_once() -> None:
    for depth, count in ((30, 4), (2, 2), (2, 5), (7, 1), (9, 3)):
        for layers in subsets(depth, count).values():
            assert len(layers) == len(set(layers)) == min(depth, count)
            assert all(0 <= layer < depth for layer in layers)
