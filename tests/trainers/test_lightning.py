"""A module of PyTorch Lightning, unchanged but for `seqsplit.compile(model)`."""

import pytest

pytest.importorskip("lightning")

import lightning
import torch
from common import (
    STEPS,
    Outcome,
    check_all_split,
    check_both,
    check_tensors,
    collate,
    sgd,
    tiny_model,
    token_rows,
    trained,
)


class Module(lightning.LightningModule):
    """A language model as Lightning's documentation would write it."""

    def __init__(self, model, smoothing):
        super().__init__()
        self.model, self.smoothing, self.numbers = model, smoothing, []

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log("loss", loss)
        self.numbers.append({"loss": loss.item()})
        return loss

    def validation_step(self, batch, index):
        loss = self.loss(batch)
        self.log("val_loss", loss)
        self.numbers.append({"val_loss": loss.item()})

    def loss(self, batch):
        """In the model, or from its logits."""
        if not self.smoothing:
            return self.model(**batch).loss
        logits = self.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1),
            batch["labels"][:, 1:].flatten(),
            label_smoothing=self.smoothing,
        )

    def configure_optimizers(self):
        return sgd(self)


def loader(count, seed=0):
    rows = token_rows(count, seed=seed)
    return torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=collate)


def lightning_trainer(folder, **options):
    return lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


# What Lightning says about its own code, and advice on loaders with several processes.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]

VARIANTS = {
    "labels inside": (0.0, {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}),
    "loss of the logits": (0.1, {}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_fit(name, tmp_path, plans):
    """Training and validation; the checkpoint loads into an eager module."""
    smoothing, options = VARIANTS[name]

    def train(add_line):
        model = tiny_model()
        add_line(model)
        module = Module(model, smoothing)
        before = trained(module)
        trainer = lightning_trainer(tmp_path, **options)
        trainer.fit(module, loader(2 * STEPS * 2), loader(4, seed=1))
        path = tmp_path / f"{add_line.__name__}.ckpt"
        trainer.save_checkpoint(path)
        again = Module(tiny_model(), smoothing)
        again.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
        check_tensors(trained(module), trained(again), tolerance=0)
        return Outcome(trained(module), module.numbers, before)

    expected, _ = check_both(train)
    assert any("val_loss" in entry for entry in expected.numbers)
    check_all_split(plans)


def test_line_on_the_lightning_module(tmp_path, plans):
    """The loss function of a module, compiled instead of the model."""

    def train(add_line):
        module = Module(tiny_model(), 0.0)
        if add_line.__name__ == "add_seqsplit":
            module.loss = add_line(module.loss)
        before = trained(module)
        lightning_trainer(tmp_path).fit(module, loader(2 * STEPS))
        return Outcome(trained(module), module.numbers, before)

    check_both(train)
    check_all_split(plans)
