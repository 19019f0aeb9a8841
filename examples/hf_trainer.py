"""Hugging Face's Trainer with titan-ckpt checkpoints. Kill it and start it again: it goes on bit for bit.

pip install accelerate 'titan-ckpt[hf]'
torchrun --nproc-per-node 2 examples/hf_trainer.py runs/trainer 20
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from titan_ckpt.integrations.transformers import TrainerCheckpoints

url, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
samples = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (96, 16))]
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
arguments = TrainingArguments(
    output_dir="/tmp/unused",
    use_cpu=True,
    max_steps=steps,
    save_steps=5,
    logging_steps=5,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=samples)
checkpoints = TrainerCheckpoints(trainer, url)
trainer.train(resume_from_checkpoint=checkpoints.newest())
