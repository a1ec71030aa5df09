"""Train a tiny GPT-2 with Transformers' Trainer: flockstep launch -n 2 tiny_gpt_transformers.py."""

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import flockstep
from flockstep.transformers import FlockstepTrainer, open_group

open_group()  # before TrainingArguments
text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
data = [{"input_ids": text[at : at + 32], "labels": text[at : at + 32]} for at in range(0, len(text) - 32, 4)]
config = GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
args = TrainingArguments(
    output_dir="tiny-gpt",
    per_device_train_batch_size=8,
    num_train_epochs=8,
    learning_rate=5e-3,
    average_tokens_across_devices=False,  # otherwise the ranks would wait for each other in every step
    eval_strategy="epoch",
    save_strategy="no",
    report_to=[],
    use_cpu=True,
)
trainer = FlockstepTrainer(
    GPT2LMHeadModel(config), args, train_dataset=data, eval_dataset=data[::4], strategy="local_sgd(period=8)"
)
trainer.train()
loss = trainer.evaluate()["eval_loss"]
if flockstep.is_main():
    print(f"loss {loss:.3f} nats per byte")
