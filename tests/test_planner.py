"""The planner's figures are those of the tracker, at lengths it has not rehearsed."""

import copy
import json

import pytest
import torch
from torch import nn

import seqsplit
from benchmarks import common
from benchmarks.batches import make_batch
from benchmarks.models import Decoder, DecoderShape
from seqsplit import Schedule, cli
from seqsplit.errors import InvalidOptionError
from zoo import batches, probe

SHAPES = {
    "grouped": DecoderShape(d=64, layers=5, heads=4, kv_heads=2, ff=160, vocab=509),
    "tied": DecoderShape(d=96, layers=3, heads=4, kv_heads=4, ff=100, vocab=1013, tied=True),
    "narrow head": DecoderShape(d=128, layers=8, heads=8, kv_heads=1, ff=352, vocab=61),
}
SCHEDULES = {
    "checkpoints": Schedule(),
    "3 forwards": Schedule(forwards=3),
    "offload, attention kept": Schedule(offload="cpu", keep_attention=True),
}
OPTIONS = {"chunk_size": 64, "head_chunk_size": 64}


def step(model, ids):
    return model(ids, ids)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_predicted_peak_is_the_tracked_one(shape):
    model = common.make_model(SHAPES[shape], torch.float32, "cpu")
    plans = {
        length: seqsplit.plan(
            model, seq_len=length, schedules=SCHEDULES, step=step, optimizer="none", **OPTIONS
        )
        for length in (448, 1280)
    }
    for name, schedule in SCHEDULES.items():
        mine = seqsplit.compile(copy.deepcopy(model), schedule=schedule, **OPTIONS)
        common.train_step(mine, mine, make_batch(SHAPES[shape], 128))
        for length, plan in plans.items():
            (choice,) = (choice for choice in plan.choices if choice.name == name)
            batch = make_batch(SHAPES[shape], length)
            mine.zero_grad(set_to_none=True)
            with seqsplit.track_memory() as memory:
                common.train_step(mine, mine, batch)
            assert choice.parts.total == pytest.approx(memory.peak_bytes, rel=0.03)
            held = sum(p.numel() * p.element_size() for p in mine.parameters())
            assert plan.weight_bytes == held
            assert choice.peak_bytes == held + choice.parts.total


@pytest.mark.parametrize("window", [200, 700])
def test_keys_of_a_window_do_not_grow(window):
    shape = DecoderShape(d=64, layers=1, heads=8, kv_heads=8, ff=96, vocab=61, window=window)
    model = common.make_model(shape, torch.float32, "cpu")
    options = {"schedules": {"checkpoints": Schedule()}, "step": step, "optimizer": "none"}
    mine = seqsplit.compile(copy.deepcopy(model), **OPTIONS)
    common.train_step(mine, mine, make_batch(shape, 128))
    for length in (1280, 2560):
        (choice,) = seqsplit.plan(model, seq_len=length, **options, **OPTIONS).choices
        mine.zero_grad(set_to_none=True)
        with seqsplit.track_memory() as memory:
            common.train_step(mine, mine, make_batch(shape, length))
        assert choice.parts.total == pytest.approx(memory.peak_bytes, rel=0.03)


def test_automatic_chunks_are_made_smaller_until_a_step_fits():
    model = common.make_model(SHAPES["grouped"], torch.float32, "cpu")
    options = {"seq_len": 8192, "schedules": {"checkpoints": Schedule()}, "step": step}
    options |= {"optimizer": "none", "headroom": 0}
    roomy = seqsplit.plan(model, memory="4GB", **options)
    small = {"chunk_size": roomy.chunk_size // 4, "head_chunk_size": roomy.head_chunk_size // 4}
    wanted = seqsplit.plan(model, memory="4GB", **options, **small).choices[0].peak_bytes
    tight = seqsplit.plan(model, memory=wanted + 1, **options)
    assert tight.recommended is not None
    assert tight.options == {"schedule": Schedule(), **small}
    asked = {"chunk_size": roomy.chunk_size, "head_chunk_size": roomy.head_chunk_size}
    assert seqsplit.plan(model, memory=wanted + 1, **options, **asked).recommended is None
    hopeless = seqsplit.plan(model, memory="1MB", **options)
    assert (hopeless.chunk_size, hopeless.recommended) == (roomy.chunk_size, None)


def test_the_longest_sequence_is_where_the_peak_meets_the_memory():
    shape = SHAPES["grouped"]
    with torch.device("meta"):
        model = Decoder(shape).bfloat16()
    options = {"schedules": {"checkpoints": Schedule()}, "step": step, "headroom": 0.0, **OPTIONS}
    plan = seqsplit.plan(model, seq_len=1024, memory="64MB", **options)
    (choice,) = plan.choices
    assert plan.memory_bytes == 64 * 2**20
    assert plan.recommended is choice
    assert plan.options == {"schedule": Schedule(), **OPTIONS}
    at_most = seqsplit.plan(model, seq_len=choice.longest, memory="64MB", **options)
    assert at_most.choices[0].peak_bytes == pytest.approx(plan.memory_bytes, rel=1e-3)
    beyond = seqsplit.plan(model, seq_len=choice.longest + 64, memory="64MB", **options)
    assert beyond.recommended is None
    with pytest.raises(ValueError, match="no schedule fits"):
        _ = beyond.options
    assert "nothing fits" in str(beyond)


def test_the_fastest_schedule_that_fits_is_recommended():
    model = common.make_model(SHAPES["narrow head"], torch.float32, "cpu")
    schedules = {"checkpoints": Schedule(), "3 forwards": Schedule(forwards=3)}
    options = {"seq_len": 4096, "schedules": schedules, "step": step, "optimizer": "none"}
    roomy = seqsplit.plan(model, memory="1GB", **options, **OPTIONS)
    assert [choice.name for choice in roomy.choices] == list(schedules)
    assert roomy.recommended.name == "checkpoints"
    first, second = (choice.peak_bytes for choice in roomy.choices)
    assert second < first
    tight = seqsplit.plan(model, memory=(first + second) / 2, headroom=0, **options, **OPTIONS)
    assert tight.recommended.name == "3 forwards"
    assert "3 forwards *" in str(tight)


def test_frozen_weights_have_neither_gradients_nor_optimizer_states():
    model = common.make_model(SHAPES["grouped"], torch.float32, "cpu")
    head = model.head.weight
    options = {"seq_len": 512, "schedules": {"checkpoints": Schedule()}, "step": step, **OPTIONS}
    full = seqsplit.plan(model, **options)
    assert full.optimizer_bytes == 2 * full.weight_bytes
    model.requires_grad_(False)
    head.requires_grad_(True)
    frozen = seqsplit.plan(model, optimizer="adamw8bit", **options)
    assert frozen.optimizer_bytes == 2 * head.numel()
    assert frozen.weight_bytes == full.weight_bytes
    assert frozen.choices[0].parts.gradients == pytest.approx(4 * head.numel(), rel=0.01)
    assert all(p.device.type == "cpu" and p.grad is None for p in model.parameters())


def test_gradients_that_are_there_already():
    model = common.make_model(SHAPES["narrow head"], torch.float32, "cpu")
    options = {"seq_len": 2048, "schedules": {"checkpoints": Schedule()}, "step": step, **OPTIONS}
    fresh, there = (seqsplit.plan(model, accumulate=a, **options) for a in (False, True))
    assert fresh.choices[0].peak_bytes < there.choices[0].peak_bytes
    assert there.choices[0].parts.gradients >= 0.99 * there.weight_bytes


def test_a_model_of_ones_own_that_gives_logits():
    model = probe.build()
    plan = seqsplit.plan(
        model, seq_len=100, schedules={"checkpoints": Schedule()}, chunk_size=16, head_chunk_size=16
    )
    mine = seqsplit.compile(copy.deepcopy(model), chunk_size=16, head_chunk_size=16)

    def loss_of(ids):  # its logits are gone when the backward begins
        logits = mine(ids)[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    loss_of(batches.with_labels(1, 32)[0]).backward()
    ids, _ = batches.with_labels(1, 100)
    mine.zero_grad(set_to_none=True)
    with seqsplit.track_memory() as memory:
        loss_of(ids).backward()
    assert plan.choices[0].parts.total == pytest.approx(memory.peak_bytes, rel=0.05)


def test_arguments_are_checked():
    model = nn.Linear(2, 2)
    with pytest.raises(InvalidOptionError, match="memory='much'"):
        seqsplit.plan(model, seq_len=8, memory="much")
    with pytest.raises(InvalidOptionError, match="optimizer='sofia'"):
        seqsplit.plan(model, seq_len=8, optimizer="sofia")
    with pytest.raises(InvalidOptionError, match="cannot plan for a str"):
        seqsplit.plan("a name", seq_len=8)


def test_the_command_line(tmp_path, capsys):
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 257,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["plan", str(tmp_path), "--seq-len", "2048", "--chunk-size", "64"]
    assert cli.main([*arguments, "--memory", "1GB"]) == 0
    assert "attention kept *" in capsys.readouterr().out
    assert cli.main([*arguments, "--memory", "1MB"]) == 1
    assert "nothing fits" in capsys.readouterr().out
    (tmp_path / "config.json").write_text("{}")
    assert cli.main(arguments) == 2
    assert "names no model_type" in capsys.readouterr().err
