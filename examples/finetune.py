"""One's own training loop: the only line that differs is `seqsplit.compile`.

Run it with `.venv/bin/python examples/finetune.py` after `make demo`.
"""

import torch
from rich.progress import track
from transformers import LlamaConfig, LlamaForCausalLM

import corpus
import seqsplit

LENGTH, STEPS, ACCUMULATE = 4096, 4, 2

torch.manual_seed(0)
text = corpus.load(vocab_size=8192)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=text.vocab_size,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
)
model = seqsplit.compile(model)  # the same object: optimizers, hooks and saving work as before
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

batches = text.batches(LENGTH)
for _step in track(range(STEPS), description="training"):
    for _ in range(ACCUMULATE):
        tokens = next(batches)
        loss = model(input_ids=tokens, labels=tokens).loss / ACCUMULATE
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item() * ACCUMULATE:.4f}")

print(seqsplit.explain(model, input_ids=tokens, labels=tokens))
